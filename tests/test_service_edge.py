"""What one client may cost the others: limits of HTTP, methods and names in metrics, and chaos."""

import inspect
import json

import attackers
import pytest
import uvicorn
from attackers import ROWS, encoded, picture
from chaos import chaos, problems
from http_client import chunked, connect, head, post, read, send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

IMAGE = encoded(picture())
LIVE = head("GET", "/health/live")


def test_uvicorn_has_what_the_edge_relies_on():
    """Where this fails, a new release of uvicorn asks for a look at service/edge.py."""
    arguments = inspect.signature(HttpToolsProtocol.__init__).parameters
    assert list(arguments) == ["self", "config", "server_state", "app_state", "_loop"]
    assert list(inspect.signature(RequestResponseCycle.__init__).parameters) == [
        "self", "scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers",
        "message_event", "expect_100_continue", "keep_alive", "on_response",
    ]  # fmt: skip
    assert {"connections", "tasks", "default_headers", "total_requests"} <= vars(ServerState()).keys()
    for kind, names in (
        (HttpToolsProtocol, ("shutdown", "_start_asgi_task", "on_message_begin", "on_body", "on_response_complete")),
        (FlowControl, ("pause_reading", "resume_reading")),
        (uvicorn.Server, ("startup", "main_loop", "on_tick", "shutdown", "handle_exit")),
    ):
        assert all(callable(getattr(kind, name)) for name in names)


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_requests_are_read_at_every_split(local, size):
    """Heads, bodies, chunks and the next request, in packets of any size."""
    parts = (IMAGE[:300], IMAGE[300:301], IMAGE[301:])
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    stream = post(IMAGE) + b"\r\n" + LIVE + chunked() + chunks + b"0\r\nX: y\r\n\r\n"
    with connect(local.port) as connection:
        for k in range(0, len(stream), size):
            connection.sendall(stream[k : k + size])
        first, live, second = read(connection, 3)
    assert (first.status, live.json(), second.scores()) == (200, {"status": "live"}, first.scores())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("GET", "/", *(f"X-{k}: 1" for k in range(98))), 200),
        (head("GET", "/", *(f"X-{k}: 1" for k in range(101))), 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\n" * 5000, 400),
        (head("GET", "/", "X: " + "a" * 16_000), 200),
        (head("GET", "/", "X: " + "a" * 16_400), 400),
        (head("GET", "http://example.org:80/v1%2Fmodels?a=b"), 200),
        (head("GET", "HTTPS://example.org"), 200),
        (head("GET", "/").replace(b"HTTP/1.1", b"HTTP/9.9"), 400),
        (head("GET", "/").replace(b"HTTP/1.1", b"HTTP/1.2"), 400),
        (head("GET", "/").replace(b"\r\n", b"\n"), 400),
        (head("GET", "/", "Host: b"), 400),
        (head("GET", "/").replace(b"Host: a\r\n", b""), 400),
        (head("GET", "/", "A: b", " c: d"), 400),
        (b"\r\n" + head("GET", "/"), 200),
        (chunked().replace(b"chunked", b"\r\n chunked") + b"0\r\n\r\n", 400),
        (chunked().replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", 400),
        (chunked("Content-Length: 0") + b"0\r\n\r\n", 400),
        (chunked() + b"5\r\nhello\r\n0\r\n\r\n", 415),
        (b"\x16\x03\x01\x02\x00", 400),
    ],
)  # fmt: skip
def test_head_is_parsed_strictly_and_within_limits(local, data, status):
    assert send(local.port, data).status == status


def test_full_service_answers_health_checks_only(local, monkeypatch):
    monkeypatch.setattr(local.service.edge, "most", 0)
    refused = local.ask("/v1/models")
    assert refused.error == (429, "overloaded")
    assert refused.headers.keys() >= {"retry-after", "x-request-id"}
    assert local.ask("/health/live").status == 200


# The rows of the table that tests/test_service_strangers.py does not send.
@pytest.mark.parametrize("name", [name for name in ROWS if name.split()[0] not in ("1", "3a", "4a", "5", "6", "7")])
def test_attack_is_answered_and_leaves_no_fault(service, name):
    reply = send(service.port, attackers.prepared(name))
    wanted = {"2": 400, "3b": 422, "3c": 200, "4b": 422, "8": 200, "9": 422, "10": 422, "11": 200}[name.split()[0]]
    assert reply.status == wanted, reply.body
    assert "Traceback" not in service.log()


def test_methods_of_strangers_are_no_labels_and_are_cut_in_logs(service):
    sizes = []
    for k in range(20):
        assert service.ask("/v1/classify", method=f"X{k}" * 100).status == 400
        sizes.append(len(service.ask("/metrics").body))
    assert sizes[-1] < sizes[1] + 200, "but for more digits"
    assert max(map(len, service.log().splitlines())) < 1000


def test_chaos_loses_no_healthy_request_and_leaves_nothing(checkpoints):
    """A short run of `python tests/chaos.py --minutes 30`."""
    found = chaos(checkpoints, seconds=8, clients=4, every=3)
    print(json.dumps(found))
    assert problems(found) == []
    assert min(found["asked"]) > 10
    assert sum(found["attacks"].values()) > 20
