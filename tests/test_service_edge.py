"""What one client may cost the others: work per turn of the event loop, lanes of decoding, metrics, and chaos."""

import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock, patch

import attackers
import h11
import pytest
import uvicorn
from attackers import ROWS, encoded, picture
from chaos import chaos, problems
from http_client import head, post, send
from service_process import ROOT, ServiceProcess, save_small_checkpoint
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service import connections, edge
from service.connections import Connection
from service.edge import Edge, Host
from service.metrics import Metrics
from service.server import Server
from service.settings import read_settings


class Client:
    """A connection without a network: what is sent to it, and what it answers."""

    def __init__(self, edge, app, others=0):
        self.transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        self.host = Host(app, {}, {Mock() for _ in range(others)}, set(), list)
        self.connection = Connection(edge, self.host)
        self.connection.connection_made(self.transport)

    def send(self, data):
        self.connection.data_received(data)

    @property
    def answer(self):
        return b"".join(call.args[0] for call in self.transport.write.call_args_list)

    @property
    def is_paused(self):
        calls = [call[0] for call in self.transport.method_calls if call[0] in ("pause_reading", "resume_reading")]
        return calls[-1:] == ["pause_reading"]


async def counts(scope, receive, send):
    """An application that answers with the number of bytes that it was sent."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def with_clients(run, *flags, app=counts, **options):
    async def main():
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
def test_answers_of_the_edge_look_like_all_others(path, others, status, header):
    """Where there are too many connections, and where the page is asked for without the slash at its end."""

    async def run(connect):
        client = connect()
        client.send(head("GET", path))
        await asyncio.gather(*client.host.tasks)
        return client.answer

    answer = with_clients(run, "--max-connections", "2", "--root-path", "/bkn", others=others)
    first, *headers = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert first == b"HTTP/1.1 " + status
    assert header in headers
    assert any(re.fullmatch(rb"x-request-id: \w+", line) for line in headers)


def test_uvicorn_has_what_the_server_relies_on():
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


def test_only_the_server_module_names_uvicorn():
    files = [file.name for file in (ROOT / "service").glob("*.py") if "import uvicorn" in file.read_text()]
    assert files == ["server.py"]


@pytest.mark.parametrize(
    "body",
    [b"1\r\na\r\n", b"11\r\n" + b"a" * 17 + b"\r\n", b"0\r\n" + b"a:\r\n" * 3000],
    ids=["chunks of 1 byte", "chunks of 17 bytes", "trailers"],
)
def test_packet_is_parsed_in_slices_of_bounded_work(body, monkeypatch):
    """Whatever it holds: so many events of h11 at once, and so many bytes of anything that it parses as one."""
    events, fed = [0], [0]
    next_event, receive_data = h11.Connection.next_event, h11.Connection.receive_data
    monkeypatch.setattr(
        h11.Connection, "next_event", lambda http: (events.append(events.pop() + 1), next_event(http))[1]
    )
    monkeypatch.setattr(
        h11.Connection, "receive_data", lambda http, data: (fed.append(len(data)), receive_data(http, data))[1]
    )

    async def run(connect):
        client = connect()
        client.send(head("POST", "/", "Transfer-Encoding: chunked") + (body * 20_000)[:250_000])
        assert events[0] <= connections.EVENTS + 1
        assert max(fed) <= connections.SLICE
        assert client.is_paused, "no more is read until this is parsed"
        await asyncio.sleep(0)

    with_clients(run)


def test_connections_share_the_time_of_a_turn(monkeypatch):
    """However many have something to parse."""
    now = [0.0]
    monkeypatch.setattr(edge.time, "perf_counter", lambda: now[0])

    def go_on(client):
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
def test_requests_are_read_at_every_split(size):
    """Heads, bodies, chunks and the next request, in packets of any size."""
    image = bytes(range(256)) * (40 if size > 1 else 4)  # or it would take many seconds
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (image[:300], image[300:301], image[301:]))
    stream = (
        post(image) + head("POST", "/", "Transfer-Encoding: chunked") + chunks + b"0\r\nX: y\r\n\r\n" + head("GET", "/")
    )

    async def run(connect):
        client = connect()
        for k in range(0, len(stream), size):
            while client.is_paused:
                await asyncio.sleep(0)
            client.send(stream[k : k + size])
        while client.answer.count(b"200") < 3:
            await asyncio.sleep(0)
        return client.answer

    answer = asyncio.run(asyncio.wait_for(_async(run, size), 30))
    assert re.findall(rb"\r\n\r\n(\d+)(?=HTTP|$)", answer) == [b"%d" % len(image)] * 2 + [b"0"]


async def _async(run, size):
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
def test_head_is_checked_before_it_is_parsed(data, status):
    async def run(connect):
        client = connect()
        with patch.object(client.connection.http, "next_event", wraps=client.connection.http.next_event) as parsed:
            client.send(data)
            await asyncio.gather(*client.host.tasks)
        if b"a:" in data:
            parsed.assert_not_called()
        return client.answer

    assert with_clients(run).startswith(b"HTTP/1.1 %d " % status)


def test_absolute_target_names_the_same_path():
    paths = []

    async def app(scope, receive, send):
        paths.append((scope["path"], scope["query_string"]))
        await counts(scope, receive, send)

    async def run(connect):
        for target in ("/a%20b?c", "http://example.org:80/a%20b?c", "http://example.org?c", "*"):
            client = connect()
            client.send(head("GET", target))
            await asyncio.gather(*client.host.tasks)

    with_clients(run, app=app)
    assert paths == [("/a b", b"c"), ("/a b", b"c"), ("/", b"c"), ("*", b"")]


# The whole service


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    return folder


@pytest.fixture(scope="module")
def service(checkpoints):
    with ServiceProcess(checkpoints) as process:
        yield process


@pytest.mark.parametrize("name", ROWS)
def test_attack_is_answered_and_leaves_no_fault(service, name):
    reply = send(service.port, attackers.prepared(name))
    wanted = {"1": 400, "2": 405, "3": 200, "4": 422, "5": 400, "6": 415, "7": 200}[name[0]]
    assert reply.status == wanted, reply.body
    assert "Traceback" not in service.log()


def test_methods_of_strangers_are_no_labels_and_are_cut_in_logs(service):
    sizes = []
    for k in range(50):
        for path in ("/health/live", "/v1/classify"):
            assert service.ask(path, method=f"X{k}" * 100).status == 405
        sizes.append(len(service.ask("/metrics").body))
    assert sizes[-1] < sizes[1] + 200, "but for more digits"
    assert max(map(len, service.log().splitlines())) < 1000


def test_service_runs_with_standard_streams_closed(checkpoints):
    run = ("/bin/sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-', sys.executable, "-m", "service")
    with ServiceProcess(checkpoints, command=run) as process:
        assert process.ask(body=encoded(picture())).status == 200
        opened = [os.readlink(f"/proc/{process.process.pid}/fd/{number}") for number in range(3)]
        assert opened[2] == "/dev/null"
        assert process.stop() == 0


def test_checkpoint_with_nan_ends_the_command(checkpoints, tmp_path):
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
    assert "fc.weight contains infinite numbers or NaN" in done.stderr
    assert done.stdout == ""


def test_chaos_loses_no_healthy_request_and_leaves_nothing(checkpoints):
    """A short run of `python tests/attack.py --minutes 30`."""
    found = chaos(checkpoints, seconds=8, clients=4, every=3)
    print(json.dumps(found))
    assert problems(found) == []
    assert min(found["asked"]) > 10
    assert sum(found["attacks"].values()) > 20
