"""Slow, hostile and merely clumsy clients, over real sockets, and a healthy client that must not notice them."""

import contextlib
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from attackers import encoded, picture, prepared
from http_client import connect, head, read, send
from http_client import post as post_
from http_fuzzer import fuzz
from service_process import ServiceProcess, save_small_checkpoint
from watch import Watch

FILES, STALL = 256, 1.5  # descriptors that the service may open; seconds that it waits for anybody
KEY = "X-API-Key: secret"
IMAGE = encoded(picture())
get, post = partial(head, "GET"), lambda body, *headers: post_(body, KEY, *headers)
LIMITED = ("/bin/sh", "-c", f'ulimit -n {FILES}; exec "$0" "$@"', sys.executable, "-m", "service")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    flags = ("--stall-seconds", f"{STALL}", "--max-held-bytes", "64000000")
    with ServiceProcess(folder, *flags, command=LIMITED, environment={"BKN_ZOO_API_KEYS": "secret"}) as process:
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):  # load what is loaded on first use
            assert send(process.port, post(encoded(picture(), kind))).status == 200
        for mode in (b"population", b"sample"):  # which the service prepares by itself, too
            data = post(IMAGE).replace(b"/v1/classify", b"/v1/classify?statistics=" + mode, 1)
            assert send(process.port, data).status == 200
        yield process


def closes(connection, within):
    """Whether the service closes a connection, with or without an answer."""
    connection.settimeout(max(within, 0.1))
    try:
        while connection.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def undisturbed(service, what, megabytes=60.0):
    """A healthy client is answered in time while the block runs, and the memory grows by no more than that."""
    with Watch(service.url, IMAGE, KEY) as watch, service.growth() as grown:
        yield
    print(f"{what}: {max(grown):+.0f} MB at most")
    watch.check(what)
    assert max(grown) < megabytes
    assert "Traceback" not in service.log()


def test_stalled_heads_are_closed_and_keep_nobody_out(service):
    starts = (b"", b"G", b"GET /health/live HTTP/1.1\r\nHost", b"POST /v1/classify HTTP/1.1\r\nHost: a\r\n")
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + IMAGE
    body = form.ljust(2_000_000, b"\0") + b"\r\n--x--\r\n"  # more than starlette would keep in memory
    good = [get(target, KEY) for target in ("/", "/static/page.css", "/v1/models")]
    good.append(post(body, "Content-Type: multipart/form-data; boundary=x"))
    with undisturbed(service, "stalled heads"), contextlib.ExitStack() as stack:
        begun, connections = time.monotonic(), []
        for number in range(2 * FILES):
            connections.append(stack.enter_context(connect(service.port)))
            connections[-1].sendall(starts[number % len(starts)])
            if number % 64 == 63:
                assert {send(service.port, data).status for data in good} == {200}
        assert all(closes(connection, begun + STALL + 8 - time.monotonic()) for connection in connections)
    with connect(service.port) as connection:
        connection.sendall(b"GET / HT")
        assert read(connection, None)[0].error == (408, "too_slow")
    for reason in ("made room", "slow head"):
        assert service.metric(f'bkn_connections_cut_total{{reason="{reason}"}}') > 0


def test_stalled_bodies_and_unread_answers_are_given_up(service):
    with undisturbed(service, "stalled bodies", 120), contextlib.ExitStack() as stack:
        begun = time.monotonic()
        stalled = [stack.enter_context(connect(service.port)) for _ in range(32)]
        for connection in stalled:  # more than all bodies together may hold
            connection.sendall(post(bytes(9_000_000))[:3_000_000])
        early = stack.enter_context(connect(service.port))
        early.sendall(post_(bytes(9_000_000))[:1000])
        assert read(early)[0].status == 401
        pool = stack.enter_context(ThreadPoolExecutor(1))
        cut_off = pool.submit(trickle, early, 3 * STALL + 6)
        assert all(closes(connection, begun + STALL + 8 - time.monotonic()) for connection in stalled)
        assert cut_off.result()
        assert ask_without_reading(service, stack.enter_context(socket.socket()))
    assert service.metric('bkn_connections_cut_total{reason="lingered"}') > 0


def ask_without_reading(service, connection):
    """Whether the service gives up a client that sends a few requests at a time, but reads nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the network would hold megabytes
    connection.connect(("127.0.0.1", service.port))
    connection.settimeout(60)
    wanted, end = 0.0, time.monotonic() + 40
    while time.monotonic() < end:
        if service.metric('bkn_connections_cut_total{reason="not read"}'):
            return True
        answered = service.metric('bkn_requests_total{method="any",route="none",status="200"}')
        if answered >= wanted:
            wanted = answered + 16
            connection.sendall(get("/static/page.js") * 16)
        time.sleep(0.02)
    return False


def trickle(connection, most):
    """Whether the other side stops to take it."""
    end = time.monotonic() + most
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            connection.sendall(b"a")
            time.sleep(0.1)
        return False
    return True


def test_pipelined_requests_are_answered_in_order(service):
    with connect(service.port) as connection:
        connection.sendall(get("/health/live") + post(IMAGE) + get("/nowhere") + get("/health/live"))
        assert [reply.status for reply in read(connection, 4)] == [200, 200, 404, 200]


def test_damaged_requests_in_random_packets_are_answered(service):
    before = service.memory()
    problems, statuses = fuzz(service.port, 300, seed=0)
    print(f"fuzzing: {dict(statuses)}, {service.memory() - before:+.1f} MB")
    assert not problems, "\n".join(problems)
    assert {400, 404, 401} <= statuses.keys()
    assert service.memory() - before < 50


@pytest.mark.parametrize(
    ("name", "status", "megabytes"),
    [
        ("trailers", 400, 60), ("trailers that end", 400, 60), ("chunks of 1 byte", 400, 60), ("pipelining", 200, 60),
        ("1 chunks of 17 bytes", 400, 60), ("5 empty headers", 400, 60), ("4a near-miss names in JSON", 422, 60),
        ("6 base64 in JSON, 9.9 MB", 415, 150), ("run lengths", 415, 60), ("many rows", 413, 60),
        ("65535 tags", 200, 60), ("EXIF in a PNG", 200, 200),
        ("large PNG", 200, 200), ("7 WebP of 49 megapixels", 200, 60), ("3a TIFF of 32,768 strips", 200, 60),
    ],
)  # fmt: skip
def test_attack_disturbs_no_healthy_client(service, name, status, megabytes):
    data = prepared(name).replace(b"Host: a\r\n", f"Host: a\r\n{KEY}\r\n".encode(), 1)
    assert send(service.port, data).status == status
    with undisturbed(service, name, megabytes):
        end, found = time.monotonic() + 1, []
        while not found or time.monotonic() < end:
            found += service.at_once(*[data] * 8)
    assert {reply.status for reply in found} <= {status, 429}
