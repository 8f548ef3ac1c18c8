"""The HTTP edge: uvicorn's HTTP/1.1 on httptools, with all limits on clients.

A connection gives the parser one head at a time, once it is complete and within its limits. Chunked bodies are parsed
in slices, and connections with more to parse share a few milliseconds per turn of the event loop.

Of uvicorn, this file and `server` use: `HttpToolsProtocol` (constructor; methods that the transport, the server and the
parser call; `_start_asgi_task`; `parser`, `cycle`, `flow`, `headers`, `url`, `scope`), `RequestResponseCycle`
(constructor, `receive`, `send`, `keep_alive`, `more_body`, `body`, `message_event`, `response_complete`), `FlowControl`
(`pause_reading`, `resume_reading`), `ServerState` (`connections`, `default_headers`, `total_requests`) and `Server`
(`startup`, `on_tick`, `handle_exit`, `shutdown`, `servers`). Of httptools: `HttpRequestParser` and its errors.
pyproject.toml limits both to versions that were tried, and tests/test_service_edge.py checks these names.
"""

import asyncio
import http
import logging
import re
import time
from collections import deque
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .envelope import QUIET, Envelope
from .errors import ServiceError, respond
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

# Connections beyond the limit, for health checks.
RESERVE = 16
# Descriptors for the engines, the listener, the log and the page.
SPARE_FILES = 64
# Seconds per turn of the loop for connections that have more to parse.
TURN = 0.002
# Bytes of the request line and all headers, with separators; also the free part of a chunked body's framing.
MAX_HEAD = 16_384
MAX_HEADERS = 100
# Requests in a row that arrived before the previous response.
MAX_PIPELINED = 32
# Bytes of a chunked body that are parsed at once.
SLICE = 8192
# Bytes of a chunked body per byte of chunk sizes, extensions and trailers.
BODY_PER_FRAMING = 8
# Times `stall_seconds`: time to read on after a response that came before the end of its request.
LINGER = 3
# Seconds that a connection stays open between two requests.
IDLE = 75.0
END_OF_HEAD = re.compile(rb"\n\r?\n")
# Of a target in absolute form.
AUTHORITY = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)
NOT_HTTP = f"this is not HTTP/1.1, or it has more than {MAX_HEADERS} headers or {MAX_HEAD} bytes of them: see /docs."
BROKEN_BODY = "the framing of the body is invalid: send Content-Length, or larger chunks."


class Edge:
    """The state that all connections share."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        # More connections than these are accepted only for health checks.
        self.most = settings.max_connections
        # Not on Windows.
        with suppress(ImportError):
            import resource

            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            if files != resource.RLIM_INFINITY:
                self.most = max(1, min(self.most, files - SPARE_FILES - RESERVE))
        # Connections that wait for their client, the longest silent first.
        self.awaited: dict[Connection, None] = {}
        # Whether responses ask clients to close the connection.
        self.draining = False
        self._unparsed: deque[Connection] = deque()
        self._scheduled = False

    def make_room(self) -> None:
        """Close the connection that was silent for the longest time, if any."""
        if self.awaited:
            next(iter(self.awaited)).cut("made room")

    def parse_later(self, connection: "Connection") -> None:
        """Queue a connection for its next turn to parse."""
        self._unparsed.append(connection)
        if not self._scheduled:
            self._scheduled = True
            connection.loop.call_soon(self._turn, connection.loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        end = time.perf_counter() + TURN
        while self._unparsed and time.perf_counter() < end:
            self._unparsed.popleft().go_on()
        self._scheduled = bool(self._unparsed)
        if self._scheduled:
            loop.call_soon(self._turn, loop)


class Flow(FlowControl):
    """Reading stays paused while received input waits to be parsed."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Exchange(RequestResponseCycle):
    """One request and its response."""

    edge: Edge
    # Why the rest of the body cannot be read, if so.
    refusal: ServiceError | None = None
    # Whether the connection ends after the response.
    ends = False

    async def receive(self) -> Any:
        message = await super().receive()
        if self.refusal is not None and message["type"] == "http.request":
            raise self.refusal
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.keep_alive = self.keep_alive and not self.more_body and not self.edge.draining
        elif not message.get("more_body", False):
            # Otherwise uvicorn would close at once, and the reset of a client that still sends could overtake this.
            self.ends, self.keep_alive = not self.keep_alive, True
        await super().send(message)


class Connection(HttpToolsProtocol):
    """The connection of one client, with at most one request at a time.

    It waits for a head, or responds, or lingers: a connection that ends before all input is read continues to read for
    a while, because a reset could otherwise overtake the response.
    """

    cycle: Exchange

    def __init__(
        self, edge: Edge, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.edge, self.settings = edge, edge.settings
        # Received, but not parsed yet; and whether it waits for its turn to parse.
        self._input, self._is_queued = bytearray(), False
        # Whether a part of the next head has arrived, and the requests since data arrived.
        self._heard, self._in_a_row = False, 0
        # Bytes of a body with a length that did not arrive yet, and of a chunked body: received, and its framing.
        self._left = self._size = self._framing = 0
        # Whether what follows is not a request, and is dropped.
        self._surplus = False
        self._lingers_until: float | None = None
        self._patience = self.loop.call_later(self.settings.stall_seconds, self._too_slow)
        self._write_patience: asyncio.TimerHandle | None = None

    # Called by the transport and by the server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow = Flow(self.transport)
        self.edge.metrics.connections.inc()
        if len(self.connections) > self.edge.most:
            self.edge.make_room()
        if len(self.connections) > self.edge.most + RESERVE:
            return self.cut("too many")
        self._wait(self.settings.stall_seconds)

    def data_received(self, data: bytes) -> None:
        if self in self.edge.awaited:
            # Move it to the end.
            self.edge.awaited[self] = self.edge.awaited.pop(self)
        self._in_a_row = 0
        if self._lingers_until is not None:
            return self._wait(min(self.settings.stall_seconds, self._lingers_until - self.loop.time()))
        if self._surplus:
            return
        self._input += data
        if not self._is_queued:
            self._parse()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.edge.metrics.connections.dec()
        self.edge.awaited.pop(self, None)
        self._patience.cancel()
        if self._write_patience is not None:
            self._write_patience.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.edge.awaited[self] = None
        self._write_patience = self.loop.call_later(self.settings.stall_seconds, self.cut, "not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_patience is not None:
            self._write_patience.cancel()
            self._write_patience = None
        if self._is_answering and not self.cycle.more_body:
            self.edge.awaited.pop(self, None)

    def shutdown(self) -> None:
        """Close at once unless a request is being answered, which then ends the connection."""
        if self._lingers_until is not None:
            self.transport.abort()
        elif not self._is_answering:
            self._close()

    # Called by the edge

    def go_on(self) -> None:
        """Parse another slice, now that it is this connection's turn."""
        self._is_queued = False
        self._parse()

    def cut(self, reason: str) -> None:
        """Close at once, even if data was not sent yet."""
        self.edge.metrics.cut.labels(reason).inc()
        self.edge.awaited.pop(self, None)
        # Its place is free from now on.
        self.connections.discard(self)
        self.transport.abort()

    # Parsing

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parse a head and a slice of its body, or another slice. The rest waits for another turn."""
        if self.transport.is_closing() or self._lingers_until is not None:
            return
        if not self._is_answering:
            self._parse_head()
        if self._is_answering and self.cycle.more_body and self._input:
            self._parse_slice()
            if self.cycle.more_body and self._input:
                self._is_queued = True
                self.edge.parse_later(self)
        self._update_reading()

    def _parse_head(self) -> None:
        """Begin a request if its head is complete."""
        if self._input and not self._heard:
            self._heard = True
            self._wait(self.settings.stall_seconds)
        if self._input[:1] in (b"\r", b"\n"):
            # Clients of old sent an empty line after a body.
            self._input = self._input.lstrip(b"\r\n")
        found = END_OF_HEAD.search(self._input)
        end = found.end() if found else len(self._input)
        is_long = end > MAX_HEAD or self._input.count(b"\n", 0, end) > MAX_HEADERS + 2
        # A method begins with a letter; TLS does not.
        is_other = b"" < self._input[:1] <= b" "
        if is_long or is_other:
            return self._refuse(ServiceError("malformed_request", NOT_HTTP))
        if found is None:
            return
        # The parser of the last request may still wait for its body, which did not pass through it.
        self.parser = httptools.HttpRequestParser(self)
        head = bytes(self._input[:end])
        del self._input[:end]
        try:
            self.parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            return self._refuse(ServiceError("malformed_request", NOT_HTTP))
        if not self._is_answering:
            self._refuse(ServiceError("malformed_request", NOT_HTTP))

    def _parse_slice(self) -> None:
        """Parse a slice of a body."""
        size = self._left or SLICE
        part = bytes(self._input[:size])
        del self._input[:size]
        if self._left:
            self._left -= len(part)
            self.on_body(part)
            if not self._left:
                self.on_message_complete()
            return
        self._framing += len(part)
        try:
            self.parser.feed_data(part)
            is_broken = self._framing > MAX_HEAD + self._size // BODY_PER_FRAMING
        except httptools.HttpParserError:
            is_broken = True
        if is_broken:
            self._surplus = True
            self._input.clear()
            if self.cycle.more_body:
                self.cycle.refusal = ServiceError("malformed_request", BROKEN_BODY)
                self.cycle.message_event.set()
            else:
                # Another request follows in the slice, and the parser cannot stop between them.
                self.cycle.keep_alive = False

    def _update_reading(self) -> None:
        """Resume or pause reading. While paused, the network slows the client down."""
        if self.transport.is_closing():
            return
        is_ahead = self._is_answering and not self.cycle.more_body and bool(self._input)
        held = cast(Flow, self.flow).held = self._is_queued or is_ahead
        if held:
            self.flow.pause_reading()
        elif not self._is_answering or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    # Called by the parser and by the response

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise ServiceError("malformed_request", "a request within a body")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        encodings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        hosts = names.count(b"host")
        is_known = version == "1.0" or (version == "1.1" and hosts == 1)
        if not is_known or hosts > 1 or encodings not in ([], [b"chunked"]):
            raise ServiceError("malformed_request", NOT_HTTP)
        self._fill_scope(version)
        is_full = len(self.connections) > self.edge.most
        is_refused = is_full and self.scope["path"].removeprefix(self.settings.root_path) not in QUIET
        self._patience.cancel()
        self._in_a_row += 1
        is_last = is_refused or self._in_a_row >= MAX_PIPELINED or version == "1.0" or self.parser.should_upgrade()
        self._left = int(dict(self.headers).get(b"content-length", b"0"))
        self._size = self._framing = 0
        self.cycle = Exchange(
            scope=self.scope, transport=self.transport, flow=self.flow, logger=self.logger,
            access_logger=self.access_logger, access_log=False, default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(), expect_100_continue=self.expect_100_continue,
            keep_alive=not is_last and self.parser.should_keep_alive(), on_response=self.on_response_complete,
        )  # fmt: skip
        self.cycle.edge = self.edge
        # Trailers are dropped.
        self.headers = []
        self._start_asgi_task(self.cycle, self._too_many() if is_refused else self.app)

    def _fill_scope(self, version: str) -> None:
        """Complete the ASGI scope of the request."""
        target, _, query = self.url.partition(b"?")
        target = AUTHORITY.sub(b"", target, count=1) or b"/" if AUTHORITY.match(target) else target
        root, path = self.settings.root_path, unquote(target.decode("ascii"))
        # A proxy may have removed the root.
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path
        self.scope |= cast(Any, {
            "http_version": version, "method": self.parser.get_method().decode("ascii"), "root_path": root,
            "path": root + path, "raw_path": target, "query_string": query,
        })  # fmt: skip

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        # Of a request to upgrade, whose body the parser does not take for one.
        if self._left:
            return
        self.edge.awaited.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the next request, or end."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.cycle.ends:
            return self._end(all_read=not self.cycle.more_body)
        self._heard = False
        self._wait(IDLE)
        self._parse()

    def _too_many(self) -> Any:
        self.edge.metrics.rejected.labels("connections").inc()
        error = ServiceError("overloaded", f"{self.edge.most} connections are open: try again in a second.", 1)
        return Envelope(respond(error), self.edge.metrics)

    def _refuse(self, error: ServiceError) -> None:
        """Respond to input that is not a valid request."""
        self.edge.metrics.requests.labels("any", "none", error.status).inc()
        log.info("no request", extra={"status": error.status, "error": error.message})
        body = bytes(respond(error).body)
        phrase = http.HTTPStatus(error.status).phrase
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"HTTP/1.1 {error.status} {phrase}\r\n{head}\r\n\r\n".encode() + body)
        self._end(all_read=False)

    # Time limits and the end

    def _wait(self, seconds: float) -> None:
        """Set the time limit for the client's next step."""
        self.edge.awaited.setdefault(self)
        self._patience.cancel()
        self._patience = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._lingers_until is not None:
            self.cut("lingered")
        elif self._heard:
            self.edge.metrics.cut.labels("slow head").inc()
            seconds = self.settings.stall_seconds
            self._refuse(ServiceError("too_slow", f"the headers took longer than {seconds:g} s: send them at once."))
        else:
            self._close()

    def _end(self, all_read: bool) -> None:
        if all_read and not self._surplus and not self._input:
            return self._close()
        self._input.clear()
        patience = 1.0 if self.edge.draining else self.settings.stall_seconds
        self._lingers_until = self.loop.time() + LINGER * patience
        self._update_reading()
        self.transport.write_eof()
        self._wait(patience)

    def _close(self) -> None:
        """Close once everything is sent."""
        self._patience.cancel()
        self.transport.close()
        if self.transport.get_write_buffer_size() and self._write_patience is None:
            self._write_patience = self.loop.call_later(self.settings.stall_seconds, self.cut, "not read")
