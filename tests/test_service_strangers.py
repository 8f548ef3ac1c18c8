"""Slow, hostile and merely clumsy clients, over real sockets, and a healthy client who must not notice them."""

import asyncio
import contextlib
import inspect
import io
import json
import re
import resource
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import uvicorn
from http_fuzzer import fuzz
from PIL import Image
from service_process import ServiceProcess, Watch, save_small_checkpoint
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.connections import Connection
from service.edge import Edge, Host
from service.metrics import Metrics
from service.server import Server
from service.settings import read_settings

FILES, STALL = 256, 1.5  # descriptors that the service may open; seconds that it waits for anybody
KEY = {"X-API-Key": "secret"}


class FewFiles(ServiceProcess):
    command = ("/bin/sh", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', sys.executable, "-m", "service")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    flags = ("--head-seconds", f"{STALL}", "--stall-seconds", f"{STALL}", "--max-held-bytes", "64000000")
    with FewFiles(folder, *flags, environment={"BKN_ZOO_API_KEYS": KEY["X-API-Key"]}) as process:
        for kind in ("PNG", "JPEG", "WEBP"):  # what is loaded on first use is loaded
            assert ask(process, post(encoded(picture(), kind)))[0] == 200
        yield process


def picture(side: int = 40) -> Image.Image:
    row, column = np.mgrid[0:side, 0:side] / 5
    colours = np.stack([np.sin(column), np.cos(row), np.sin(row + column)], axis=-1)
    return Image.fromarray((127.5 + 120 * colours).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def head(method: str, target: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, key: bool = True) -> bytes:
    keyed = ["X-API-Key: secret"] if key else []
    return head("POST", "/v1/classify", f"Content-Length: {len(body)}", *keyed, *headers) + body


def get(target: str, *headers: str) -> bytes:
    return head("GET", target, "X-API-Key: secret", *headers)


def connect(service: ServiceProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=60)


def answers(connection: socket.socket, until_closed: bool = False, most: int = 1) -> list[tuple[int, bytes]]:
    """Statuses and bodies of the answers that come: so many, or all until the service closes the connection."""
    found: list[tuple[int, bytes]] = []
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while until_closed or len(found) < most:
            data, whole = parse(data, found)
            if whole:
                continue
            part = connection.recv(65_536)
            if not part:
                break
            data += part
    return found


def parse(data: bytes, found: list[tuple[int, bytes]]) -> tuple[bytes, bool]:
    start, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return data, False
    status = int(start.split()[1])
    length = re.search(rb"\r\ncontent-length: *(\d+)", start, re.IGNORECASE)
    size = int(length[1]) if length else 0
    if len(rest) < size:
        return data, False
    if status != 100:
        found.append((status, rest[:size]))
    return rest[size:], True


def ask(service: ServiceProcess, data: bytes) -> tuple[int, bytes]:
    with connect(service) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        found = answers(connection)
        return found[0] if found else (0, b"")


def closes(connection: socket.socket, within: float) -> bool:
    """Whether the service closes a connection, with or without an answer."""
    end = time.monotonic() + within
    try:
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(65_536):
                return True
    except TimeoutError:
        pass
    except OSError:
        return True
    return False


class Growth:
    """The most that the service's memory grew while the block ran, in MB."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service, self.most = service, 0.0
        self._over = threading.Event()

    def __enter__(self) -> "Growth":
        self._before = self.service.memory()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self.service.memory() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def undisturbed(service: ServiceProcess, what: str, megabytes: float = 60.0) -> Iterator[None]:
    """A healthy client is answered in time while the block runs, and the memory grows by no more than that."""
    with Watch(service.url, encoded(picture()), KEY) as watch, Growth(service) as growth:
        yield
    print(f"{what}: {growth.most:+.0f} MB at most")
    watch.check(what)
    assert growth.most < megabytes
    assert "Traceback" not in service.log()


def again(seconds: float = 1.0) -> Iterator[None]:
    """Once more, until the healthy client has been asking for long enough to notice."""
    end = time.monotonic() + seconds
    yield
    while time.monotonic() < end:
        yield


def at_once(service: ServiceProcess, *requests: bytes) -> list[tuple[int, float]]:
    """The status and the seconds of each of many requests that are sent together."""

    def timed(data: bytes) -> tuple[int, float]:
        begun = time.perf_counter()
        return ask(service, data)[0], time.perf_counter() - begun

    with ThreadPoolExecutor(len(requests)) as clients:
        return list(clients.map(timed, requests))


# HTTP


def test_trailers_without_end_are_not_kept(service: ServiceProcess) -> None:
    trailers = b"".join(b"X-%d: %s\r\n" % (k, b"a" * 50) for k in range(1000))
    with undisturbed(service, "trailers"):
        for _, (key, status) in zip(again(), [((), 401), (("X-API-Key: secret",), 400)] * 99, strict=False):
            with connect(service) as connection:
                connection.sendall(head("POST", "/v1/classify", "Transfer-Encoding: chunked", *key) + b"0\r\n")
                with contextlib.suppress(OSError):
                    for _ in range(300):
                        connection.sendall(trailers)
                assert answers(connection)[0][0] == status


@pytest.mark.parametrize("start", ["GET /health/live", "POST /v1/classify", "CONNECT a:1", "OPTIONS /v1/classify"])
def test_what_follows_an_upgrade_is_a_body_and_no_request(service: ServiceProcess, start: str) -> None:
    method, target = start.split()
    hidden = get("/hidden") if method != "POST" else encoded(picture())
    upgrade = ("Connection: Upgrade", "Upgrade: h2c", "X-API-Key: secret", f"Content-Length: {len(hidden)}")
    with connect(service) as connection:
        connection.sendall(head(method, target, *upgrade))
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            connection.sendall(hidden)
            connection.sendall(get("/health/ready", "Connection: close"))
        found = answers(connection, until_closed=True)
    assert found[0][0] == {"GET": 200, "POST": 200, "CONNECT": 404, "OPTIONS": 405}[method]
    assert not any(b"hidden" in body for _, body in found)
    assert len(found) <= 2
    assert all(json.loads(body) == {"status": "ready"} for _, body in found[1:])


def test_connections_that_stall_in_their_head_are_closed_and_keep_nobody_out(service: ServiceProcess) -> None:
    starts = (b"", b"G", b"GET /health/live HTTP/1.1\r\nHost", b"POST /v1/classify HTTP/1.1\r\nHost: a\r\n")
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + encoded(picture())
    body = form.ljust(2_000_000, b"\0") + b"\r\n--x--\r\n"  # more than starlette would keep in memory
    with undisturbed(service, "stalled heads"), contextlib.ExitStack() as stack:
        begun = time.monotonic()
        connections = []
        for number in range(2 * FILES):
            connections.append(stack.enter_context(connect(service)))
            connections[-1].sendall(starts[number % len(starts)])
            if number % 64 == 63:
                for target in ("/", "/static/page.css", "/v1/models"):
                    assert ask(service, get(target))[0] == 200
                assert ask(service, post(body, "Content-Type: multipart/form-data; boundary=x"))[0] == 200
        assert all(closes(connection, begun + STALL + 8 - time.monotonic()) for connection in connections)
    assert metric(service, 'bkn_connections_cut_total{reason="made room"}') > 0
    assert metric(service, 'bkn_connections_cut_total{reason="slow head"}') > 0


def metric(service: ServiceProcess, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", ask(service, get("/metrics"))[1].decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_head_that_trickles_is_told_why_it_is_closed(service: ServiceProcess) -> None:
    with connect(service) as connection:
        for letter in b"GET / HT":
            connection.sendall(bytes([letter]))
            time.sleep(0.02)
        status, body = answers(connection, until_closed=True)[0]
    assert (status, json.loads(body)["error"]["code"]) == (408, "too_slow")


def test_bodies_that_stall_and_answers_that_nobody_reads_are_given_up(service: ServiceProcess) -> None:
    with undisturbed(service, "stalled bodies", 120), contextlib.ExitStack() as stack:
        begun = time.monotonic()
        stalled = [stack.enter_context(connect(service)) for _ in range(32)]
        for connection in stalled:  # more than all bodies together may hold
            connection.sendall(post(bytes(9_000_000))[:3_000_000])
        early = stack.enter_context(connect(service))
        early.sendall(post(bytes(9_000_000), key=False)[:1000])
        assert answers(early)[0][0] == 401
        pool = stack.enter_context(ThreadPoolExecutor(1))
        cut_off = pool.submit(trickle, early, 3 * STALL + 6)
        assert all(closes(connection, begun + STALL + 8 - time.monotonic()) for connection in stalled)
        assert cut_off.result()
        assert ask_without_reading(service, stack.enter_context(socket.socket()))
    assert metric(service, 'bkn_connections_cut_total{reason="lingered"}') > 0


def ask_without_reading(service: ServiceProcess, connection: socket.socket) -> bool:
    """Whether the service gives such a client up, once what the network holds keeps it from writing.

    A few requests at a time, so that the service does not close the connection since too many come too early.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the network would hold megabytes
    connection.connect(("127.0.0.1", service.port))
    connection.settimeout(60)
    wanted, end = 0.0, time.monotonic() + 40
    while time.monotonic() < end:
        if metric(service, 'bkn_connections_cut_total{reason="not read"}'):
            return True
        answered = metric(service, 'bkn_requests_total{method="any",route="none",status="200"}')
        if answered >= wanted:
            wanted = answered + 16
            connection.sendall(get("/static/page.js") * 16)
        time.sleep(0.02)
    return False


def trickle(connection: socket.socket, most: float) -> bool:
    """Whether the other side stops to take it."""
    end = time.monotonic() + most
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.sendall(b"a")
            time.sleep(0.1)
        return False
    return True


def test_forms_of_many_files_take_no_descriptors_for_them(service: ServiceProcess) -> None:
    descriptors = Path(f"/proc/{service.process.pid}/fd")
    file = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + bytes(1_200_000) + b"\r\n"
    start = head(
        "POST", "/v1/classify/batch", "X-API-Key: secret", "Content-Type: multipart/form-data; boundary=x",
        f"Content-Length: {6 * len(file) + 7}",
    )  # fmt: skip
    before = len(list(descriptors.iterdir()))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(service)) for _ in range(3)]
        for connection in connections:
            connection.sendall(start + 6 * file)  # all but the end
        time.sleep(0.5)
        assert len(list(descriptors.iterdir())) <= before + 3 + 4
        for connection in connections:
            connection.sendall(b"--x--\r\n")
            ((status, body),) = answers(connection)
            codes = [result["error"]["code"] for result in json.loads(body)["results"]]
            assert (status, codes) == (200, ["unsupported_format"] * 6)


def test_pipelined_requests_wait_in_the_network_and_are_bounded(service: ServiceProcess) -> None:
    with undisturbed(service, "pipelining"):
        for _ in again():
            with contextlib.ExitStack() as stack:
                flooding = [stack.enter_context(connect(service)) for _ in range(4)]
                senders = [threading.Thread(target=flood, args=(connection,)) for connection in flooding]
                for sender in senders:
                    sender.start()
                found = [answers(connection, until_closed=True) for connection in flooding]
                for sender in senders:
                    sender.join()
            for one in found:
                assert 2 <= len(one) <= 1000
                assert {status for status, _ in one} == {200}
    with connect(service) as connection:  # a few are in order
        connection.sendall(get("/health/live") + post(encoded(picture())) + get("/nowhere") + get("/health/live"))
        assert [status for status, _ in answers(connection, most=4)] == [200, 200, 404, 200]


def flood(connection: socket.socket) -> None:
    tiny = b"GET /health/live HTTP/1.1\r\nHost:a\r\n\r\n"
    with contextlib.suppress(OSError):
        connection.settimeout(3)
        for _ in range(100):
            connection.sendall(tiny * 1000)


def test_a_long_body_and_part_of_the_next_head_in_one_packet_are_told_apart(service: ServiceProcess) -> None:
    body = encoded(picture()).ljust(90_000, b"\0")
    following = get("/health/live")
    with connect(service) as connection:
        connection.sendall(post(body) + following[:9])
        assert answers(connection)[0][0] == 200
        connection.sendall(following[9:])
        assert answers(connection)[0][0] == 200


def test_a_half_closed_client_gets_its_answer(service: ServiceProcess) -> None:
    for data, wanted in (
        (post(encoded(picture())), [200]),
        (post(encoded(picture())) + get("/health/live"), [200, 200]),
        (post(encoded(picture()), "Connection: close"), [200]),
        (post(encoded(picture())).replace(b"HTTP/1.1", b"HTTP/1.0"), [200]),
    ):
        with connect(service) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert [status for status, _ in answers(connection, until_closed=True)] == wanted


def test_a_body_of_tiny_chunks_is_refused_before_it_costs_much(service: ServiceProcess) -> None:
    start = head("POST", "/v1/classify", "Transfer-Encoding: chunked", "X-API-Key: secret")
    with undisturbed(service, "tiny chunks"):
        for _ in again():
            found = at_once(service, *[start + b"1\r\na\r\n" * 500_000 + b"0\r\n\r\n"] * 4)
            assert {status for status, _ in found} == {400}
    image = encoded(picture())
    parts = b"".join(b"%x\r\n%s\r\n" % (len(image[k : k + 50]), image[k : k + 50]) for k in range(0, len(image), 50))
    assert ask(service, start + parts + b"0\r\n\r\n")[0] == 200


def test_damaged_requests_in_random_packets_are_answered_as_they_were_sent(service: ServiceProcess) -> None:
    before = service.memory()
    problems, statuses = fuzz(service.port, 300, seed=0)
    print(f"fuzzing: {dict(statuses)}, {service.memory() - before:+.1f} MB")
    assert not problems, "\n".join(problems)
    assert {400, 404, 401} <= statuses.keys()
    assert service.memory() - before < 50


def test_uvicorn_hands_to_a_protocol_what_connections_rely_on() -> None:
    """Where this fails, a new release of uvicorn asks for a look at service/server.py."""
    theirs, ours = (inspect.signature(made).parameters for made in (H11Protocol.__init__, Server._connect))
    assert list(theirs) == list(ours)
    assert {"connections", "tasks", "default_headers"} <= vars(ServerState()).keys()
    assert callable(H11Protocol.shutdown)
    config = uvicorn.Config(lambda: None, log_config=None, proxy_headers=False)
    config.load()
    assert callable(config.loaded_app)


@pytest.mark.parametrize(
    ("path", "others", "status", "header"),
    [
        ("/v1/models", 2, b"429 Too Many Requests", b"retry-after: 1"),
        ("/bkn", 0, b"307 Temporary Redirect", b"location: /bkn/"),
    ],
)
def test_what_the_edge_answers_by_itself_is_like_any_other_answer(
    path: str, others: int, status: bytes, header: bytes
) -> None:
    """Where there are too many connections, and where the page is asked for without the slash at its end."""

    async def answer() -> bytes:
        transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        host = Host(None, {}, {Mock() for _ in range(others)}, set(), list)  # at work, so that none makes room
        edge = Edge(read_settings(["--max-connections", "2", "--root-path", "/bkn"]), Metrics())
        connection = Connection(edge, host)
        connection.connection_made(transport)
        connection.data_received(get(path))
        await asyncio.gather(*host.tasks)
        return b"".join(call.args[0] for call in transport.write.call_args_list)

    first, *headers = asyncio.run(answer()).partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert first == b"HTTP/1.1 " + status
    assert header in headers
    assert any(re.fullmatch(rb"x-request-id: \w+", line) for line in headers)


# Images


def run_lengths(side: int = 7000) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 8, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 1084, 0, 0, 1078) + header + bytes(1024) + b"\0\0\0\1\0\1"


def png(width: int, height: int, pixels: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(pixels, 1)), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def rationals(kind: str) -> bytes:
    entries = struct.pack("<HHII", 0x0112, 3, 1, 6) + struct.pack("<HHII", 0x011A, 5, 1_200_000, 38)
    exif = b"II*\0\x08\0\0\0\2\0" + entries + bytes(4) + bytes(9_600_000)
    if kind != "JPEG":
        return encoded(picture(), kind, exif=exif)
    whole, parts = encoded(picture(), kind), [exif[k : k + 65_000] for k in range(0, len(exif), 65_000)]
    segments = (b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts)
    return whole[:2] + b"".join(segments) + whole[2:]


def many_tags() -> bytes:
    entries = b"".join(struct.pack("<HHII", tag, 5, 1, 2**31) for tag in range(1, 65_536))
    return encoded(picture(), "PNG", exif=b"II*\0\x08\0\0\0\xff\xff" + entries + bytes(4))


@pytest.mark.parametrize(
    ("name", "make", "times", "status", "megabytes"),
    [
        ("run lengths", lambda: [run_lengths()], 16, 415, 60),
        ("very many rows", lambda: [png(1, 49_999_999, bytes(1000))], 32, 413, 60),
        ("EXIF", lambda: [rationals(kind) for kind in ("PNG", "JPEG", "WEBP")], 1, 200, 200),
        ("65535 tags", lambda: [many_tags()], 3, 200, 60),
    ],
)
def test_an_image_cannot_be_made_slow_cheaply(
    service: ServiceProcess, name: str, make: Callable[[], list[bytes]], times: int, status: int, megabytes: float
) -> None:
    data = [post(image) for image in make()]
    lines = len(service.log().splitlines())
    with undisturbed(service, name, megabytes):
        found = [one for _ in again() for one in at_once(service, *data * times)]
    print(f"{name}: {max(seconds for _, seconds in found):.2f} s at most")
    assert {one for one, _ in found} == {status}
    assert max(seconds for _, seconds in found) < 3
    assert len(service.log().splitlines()) - lines < len(found) + 1000  # one for each, and for the healthy client


def test_small_images_do_not_wait_behind_large_ones(service: ServiceProcess) -> None:
    large = post(png(7000, 7000, bytes(7001 * 7000)))
    with undisturbed(service, "large images", 900):
        found = Counter(status for status, _ in at_once(service, *[large] * 32))
    print(f"large images: {dict(found)}")
    assert found.keys() == {200, 429}
    assert found[200] >= 2


def test_it_is_as_it_was_after_all_that(service: ServiceProcess) -> None:
    """The last of this file."""
    time.sleep(STALL)
    assert metric(service, "bkn_connections") < 5
    text = ask(service, get("/metrics"))[1].decode()
    assert not re.findall(r'bkn_requests_total\{[^}]*status="50[^3]"\}', text)
    files = len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))
    assert files < FILES / 2
    assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)[0] == FILES
