"""What one client may cost the others: work per turn of the event loop, lanes of decoding, metrics, and chaos."""

import asyncio
import base64
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import attackers
import h11
import pytest
import uvicorn
from attackers import ROWS, encoded, noise, picture
from chaos import chaos, problems
from http_client import head, post, send
from service_process import ROOT, ServiceProcess, save_small_checkpoint
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bkn_zoo.errors import BrokenImageError, ImageTooLargeError
from service import connections, edge, uploads
from service.connections import Connection
from service.costs import CHEAP, estimate
from service.decoding import Lane
from service.edge import Edge, Host
from service.errors import BadParameterError
from service.metrics import Metrics
from service.server import Server
from service.settings import read_settings
from service.slow_decoder import SlowDecoder


class Client:
    """A connection without a network: what is sent to it, and what it answers."""

    def __init__(self, edge: Edge, app: Any, others: int = 0) -> None:
        self.transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        self.host = Host(app, {}, {Mock() for _ in range(others)}, set(), list)
        self.connection = Connection(edge, self.host)
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    @property
    def answer(self) -> bytes:
        return b"".join(call.args[0] for call in self.transport.write.call_args_list)

    @property
    def is_paused(self) -> bool:
        calls = [call[0] for call in self.transport.method_calls if call[0] in ("pause_reading", "resume_reading")]
        return calls[-1:] == ["pause_reading"]


async def counts(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the number of bytes that it was sent."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def with_clients(run: Callable[..., Any], *flags: str, app: Any = counts, **options: Any) -> Any:
    async def main() -> Any:
        shared = Edge(read_settings([*flags]), Metrics())
        return await run(lambda: Client(shared, app, **options))

    return asyncio.run(main())


# HTTP


@pytest.mark.parametrize(
    ("path", "others", "status", "header"),
    [
        ("/v1/models", 2, b"429 Too Many Requests", b"retry-after: 1"),
        ("/bkn", 0, b"307 Temporary Redirect", b"location: /bkn/"),
    ],
)
def test_answers_of_the_edge_look_like_all_others(path: str, others: int, status: bytes, header: bytes) -> None:
    """Where there are too many connections, and where the page is asked for without the slash at its end."""

    async def run(connect: Callable[[], Client]) -> bytes:
        client = connect()
        client.send(head("GET", path))
        await asyncio.gather(*client.host.tasks)
        return client.answer

    answer = with_clients(run, "--max-connections", "2", "--root-path", "/bkn", others=others)
    first, *headers = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert first == b"HTTP/1.1 " + status
    assert header in headers
    assert any(re.fullmatch(rb"x-request-id: \w+", line) for line in headers)


def test_uvicorn_has_what_the_server_relies_on() -> None:
    """Where this fails, a new release of uvicorn asks for a look at service/server.py."""
    theirs, ours = (inspect.signature(made).parameters for made in (H11Protocol.__init__, Server._connect))
    assert list(theirs) == list(ours)
    assert {"connections", "tasks", "default_headers"} <= vars(ServerState()).keys()
    assert callable(H11Protocol.shutdown)
    for name in ("startup", "main_loop", "on_tick", "shutdown", "handle_exit"):
        assert callable(getattr(uvicorn.Server, name))
    config = uvicorn.Config(lambda: None, log_config=None, proxy_headers=False)
    config.load()
    assert callable(config.loaded_app)


def test_only_the_server_module_names_uvicorn() -> None:
    files = [file.name for file in (ROOT / "service").glob("*.py") if "import uvicorn" in file.read_text()]
    assert files == ["server.py"]


@pytest.mark.parametrize(
    "body",
    [b"1\r\na\r\n", b"11\r\n" + b"a" * 17 + b"\r\n", b"0\r\n" + b"a:\r\n" * 3000],
    ids=["chunks of 1 byte", "chunks of 17 bytes", "trailers"],
)
def test_packet_is_parsed_in_slices_of_bounded_work(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds: so many events of h11 at once, and so many bytes of anything that it parses as one."""
    events, fed = [0], [0]
    next_event, receive_data = h11.Connection.next_event, h11.Connection.receive_data
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda http: (events.append(events.pop() + 1), next_event(http))[1]
    )
    monkeypatch.setattr(
        h11.Connection, "receive_data", lambda http, data: (fed.append(len(data)), receive_data(http, data))[1]
    )

    async def run(connect: Callable[[], Client]) -> None:
        client = connect()
        client.send(head("POST", "/", "Transfer-Encoding: chunked") + (body * 20_000)[:250_000])
        assert events[0] <= connections.EVENTS + 1
        assert max(fed) <= connections.SLICE
        assert client.is_paused, "no more is read until this is parsed"
        await asyncio.sleep(0)

    with_clients(run)


def test_connections_share_the_time_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have something to parse."""
    now = [0.0]
    monkeypatch.setattr(edge.time, "perf_counter", lambda: now[0])

    def go_on(client: Mock) -> None:
        now[0] += edge.TURN / 4
        shared.parse_later(client)

    shared, loop = Edge(read_settings([]), Metrics()), Mock()
    waiting = [Mock(loop=loop) for _ in range(100)]
    for client in waiting:
        client.go_on.side_effect = lambda client=client: go_on(client)
        shared.parse_later(client)
    for turn in range(1, 50):
        assert loop.call_soon.call_count == turn, "one call per turn"
        callback, *arguments = loop.call_soon.call_args.args
        callback(*arguments)
        assert sum(client.go_on.call_count for client in waiting) == 4 * turn
    assert {client.go_on.call_count for client in waiting} == {1, 2}, "in turn"


@pytest.mark.parametrize("size", [1, 7, 100, 8192, 100_000])
def test_requests_are_read_at_every_split(size: int) -> None:
    """Heads, bodies, chunks and the next request, in packets of any size."""
    image = bytes(range(256)) * 40
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (image[:3000], image[3000:3001], image[3001:]))
    stream = (
        post(image) + head("POST", "/", "Transfer-Encoding: chunked") + chunks + b"0\r\nX: y\r\n\r\n" + head("GET", "/")
    )

    async def run(connect: Callable[[], Client]) -> bytes:
        client = connect()
        for k in range(0, len(stream), size):
            while client.is_paused:
                await asyncio.sleep(0)
            client.send(stream[k : k + size])
        while client.answer.count(b"200") < 3:
            await asyncio.sleep(0)
        return client.answer

    answer = asyncio.run(asyncio.wait_for(_async(run, size), 30))
    assert re.findall(rb"\r\n\r\n(\d+)(?=HTTP|$)", answer) == [b"10240", b"10240", b"0"]


async def _async(run: Callable[..., Any], size: int) -> Any:
    shared = Edge(read_settings([]), Metrics())
    return await run(lambda: Client(shared, counts))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("GET", "/", *(f"X-{k}: 1" for k in range(98))), 200),
        (head("GET", "/", *(f"X-{k}: 1" for k in range(101))), 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 15_800 + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\n" * 5000, 400),
        (head("GET", "/", "X: " + "a" * 16_000), 200),
        (head("GET", "/", "X: " + "a" * 16_400), 400),
        (head("GET", "http://example.org/v1/models?a=b"), 200),
        (head("GET", "HTTPS://example.org"), 200),
        (head("GET", "/").replace(b"HTTP/1.1", b"HTTP/9.9"), 400),
        (head("GET", "/").replace(b"HTTP/1.1", b"HTTP/1.2"), 400),
        (b"\x16\x03\x01\x02\x00", 400),
    ],
)  # fmt: skip
def test_head_is_checked_before_it_is_parsed(data: bytes, status: int) -> None:
    async def run(connect: Callable[[], Client]) -> bytes:
        client = connect()
        with patch.object(client.connection.http, "next_event", wraps=client.connection.http.next_event) as parsed:
            client.send(data)
            await asyncio.gather(*client.host.tasks)
        if b"a:" in data:
            parsed.assert_not_called()
        return client.answer

    assert with_clients(run).startswith(b"HTTP/1.1 %d " % status)


def test_absolute_target_names_the_same_path() -> None:
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append((scope["path"], scope["query_string"]))
        await counts(scope, receive, send)

    async def run(connect: Callable[[], Client]) -> None:
        for target in ("/a%20b?c", "http://example.org:80/a%20b?c", "http://example.org?c", "*"):
            client = connect()
            client.send(head("GET", target))
            await asyncio.gather(*client.host.tasks)

    with_clients(run, app=app)
    assert paths == [("/a b", b"c"), ("/a b", b"c"), ("/", b"c"), ("*", b"")]


# Bodies


def test_large_json_is_parsed_in_a_thread_and_small_is_not() -> None:
    sizes = []

    async def work(size: int, parse: Any, *arguments: Any) -> Any:
        sizes.append(size)
        return parse(*arguments)

    def read(image: bytes) -> bytes:
        body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        message = {"type": "http.request", "body": body}
        asked = Mock(headers={"content-type": "application/json"}, query_params={}, scope={"query_string": b""})
        asked.stream = lambda: _parts(message["body"])
        return asyncio.run(uploads.read_upload(asked, "image", work))[0]

    large = os.urandom(300_001)
    assert (read(b"small"), sizes) == (b"small", [])
    assert (read(large), len(sizes)) == (large, 1)


async def _parts(body: bytes) -> Any:
    yield body


@pytest.mark.parametrize(
    "text", ["QQ==QQ==", "A" * 65_534 + "==" + "AAAA", "A" * 65_536 + "!AAA", "=AAA", "A===", "AAAAA"]
)
def test_base64_with_padding_or_letters_out_of_place_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="not base64"):
        uploads._from_base64(text)


def test_parameter_names_are_limited_before_they_are_compared() -> None:
    with patch("service.uploads.get_close_matches") as compare:
        with pytest.raises(BadParameterError, match="more than 32 parameters"):
            uploads._chosen({f"modal{k}": 1 for k in range(33)})
        with pytest.raises(BadParameterError, match="more than 32 parameters"):
            uploads._query(Mock(scope={"query_string": b"&".join([b"modal=1"] * 33)}))
    compare.assert_not_called()


# Images


@pytest.mark.parametrize(
    ("make", "is_cheap"),
    [
        (lambda: encoded(picture(side=600), "JPEG"), True),
        (lambda: encoded(noise(900), "PNG"), True),
        (lambda: encoded(picture(side=900), "WEBP"), True),
        (lambda: encoded(picture(side=900), "BMP"), True),
        (lambda: encoded(noise(600), "JPEG", progressive=True), True),
        (lambda: encoded(picture(side=1500).convert("RGBA"), "PNG"), False),
        (lambda: encoded(picture(side=1500), "WEBP"), False),
        (attackers.progressive, False),
        (attackers.large_webp, False),
        (attackers.large_png, False),
        (attackers.strips, False),
        (attackers.planar, False),
        (lambda: encoded(picture(), "TIFF"), False),
        (lambda: encoded(picture(), "GIF"), False),
        (lambda: attackers.png(9, 9, *[(b"eXIf", b"")] * 300, pixels=bytes(90)), False),
    ],
)  # fmt: skip
def test_costly_images_are_known_by_their_header(make: Callable[[], bytes], is_cheap: bool) -> None:
    data = make()
    begun = time.process_time()
    cost = estimate(data, 50_000_000)
    assert time.process_time() - begun < CHEAP
    assert cost.is_cheap is is_cheap
    assert (cost.image is not None) or not is_cheap


def test_pixels_are_counted_without_opening_the_file() -> None:
    sizes = {"strips": 8 * 32_768, "planar": 4000 * 4000, "large_webp": 49_000_000, "large_png": 49_000_000}
    assert {name: estimate(getattr(attackers, name)(), 50_000_000).pixels for name in sizes} == sizes
    with pytest.raises(ImageTooLargeError):
        estimate(attackers.large_webp(), 1_000_000)


@pytest.fixture(scope="module")
def decoder() -> Iterator[SlowDecoder]:
    decoder = SlowDecoder()
    yield decoder
    decoder.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_slow_decoder_gives_the_same_pixels(decoder: SlowDecoder, kind: str) -> None:
    from bkn_zoo.images import Preprocessing, open_image, preprocess

    data, about = encoded(picture(side=90).resize((90, 70)), kind), Preprocessing(32, (0.5,) * 3, (0.25,) * 3)
    square = decoder.decode(data, 32, about.interpolation, 10_000)
    assert preprocess(square, about).equal(preprocess(open_image(data), about))


def test_slow_decoder_passes_errors_on_and_survives_them(decoder: SlowDecoder) -> None:
    with pytest.raises(BrokenImageError, match="cannot be decoded"):
        decoder.decode(encoded(picture())[:200], 32, "bilinear", 10_000)
    with pytest.raises(ImageTooLargeError, match="40 x 40 pixels, but 1,000 are allowed"):
        decoder.decode(encoded(picture()), 32, "bilinear", 1000)
    assert decoder.decode(encoded(picture()), 32, "bilinear", 10_000).size == (32, 32)


def test_slow_decoder_that_dies_refuses_its_image() -> None:
    decoder = SlowDecoder()
    os.kill(decoder._process.pid, signal.SIGKILL)
    with pytest.raises(BrokenImageError, match="the decoder ended"):
        decoder.decode(encoded(picture()), 32, "bilinear", 10_000)
    assert not decoder.is_alive


def test_small_input_overtakes_and_a_cancelled_one_gives_way() -> None:
    async def run() -> list[str]:
        lane, order, gate = Lane("it", 1, 1, 10), [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(name: str) -> None:
            order.append(name)
            if name == "first":
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

        tasks = [asyncio.create_task(lane.run(1, wait, work, name))
                 for name, wait in (("first", 0), ("large", 5), ("gone", 0.5), ("small", 0.001))]  # fmt: skip
        await asyncio.sleep(0.05)
        tasks[2].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not lane.busy
        lane.stop()
        return order

    assert asyncio.run(run()) == ["first", "small", "large"]


# The whole service


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    return folder


@pytest.fixture(scope="module")
def service(checkpoints: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(checkpoints) as process:
        yield process


@pytest.mark.parametrize("name", ROWS)
def test_attack_is_answered_and_leaves_no_fault(service: ServiceProcess, name: str) -> None:
    reply = send(service.port, attackers.prepared(name))
    wanted = {"1": 400, "2": 405, "3": 200, "4": 422, "5": 400, "6": 415, "7": 200}[name[0]]
    assert reply.status == wanted, reply.body
    assert "Traceback" not in service.log()


def test_methods_of_strangers_are_no_labels_and_are_cut_in_logs(service: ServiceProcess) -> None:
    sizes = []
    for k in range(50):
        for path in ("/health/live", "/v1/classify"):
            assert service.ask(path, method=f"X{k}" * 100).status == 405
        sizes.append(len(service.ask("/metrics").body))
    assert sizes[-1] < sizes[1] + 200, "but for more digits"
    assert max(map(len, service.log().splitlines())) < 1000


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_service_runs_with_standard_streams_closed(checkpoints: Path, closed: str) -> None:
    run = ("/bin/sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "service")
    with ServiceProcess(checkpoints, command=run) as process:
        assert process.ask(body=encoded(picture())).status == 200
        opened = [os.readlink(f"/proc/{process.process.pid}/fd/{number}") for number in range(3)]
        assert opened[2] == "/dev/null"
        assert process.stop() == 0


def test_checkpoint_with_nan_ends_the_command(checkpoints: Path, tmp_path: Path) -> None:
    import shutil

    import safetensors.torch

    shutil.copytree(checkpoints / "small", tmp_path / "nan")
    weights = safetensors.torch.load_file(tmp_path / "nan" / "model.safetensors")
    weights["fc.weight"][3, 4] = float("nan")
    safetensors.torch.save_file(weights, tmp_path / "nan" / "model.safetensors")
    config = json.loads((tmp_path / "nan" / "config.json").read_text())
    (tmp_path / "nan" / "config.json").write_text(json.dumps(config | {"sha256": {}}))
    done = subprocess.run([sys.executable, "-m", "service", "--port", "0", "--models", str(tmp_path / "nan")], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 1
    assert "fc.weight has numbers that are infinite or not numbers" in done.stderr
    assert done.stdout == ""


def test_chaos_loses_no_healthy_request_and_leaves_nothing(checkpoints: Path) -> None:
    """A short run of `python tests/attack.py --minutes 30`."""
    found = chaos(checkpoints, seconds=12, clients=4, every=4)
    print(json.dumps(found))
    assert problems(found) == []
    assert min(found["asked"]) > 10
    assert sum(found["attacks"].values()) > 20
