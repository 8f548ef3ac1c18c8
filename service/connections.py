"""The HTTP edge: one state machine per connection, with all limits on clients.

h11 parses and writes HTTP. It is written in Python, so this module limits the work per client and turn of the event
loop: headers are parsed when they are complete and within their limits, a body is parsed in slices, and connections
    with
more to parse share a few milliseconds per turn. `uploads` counts the bytes of bodies.
"""

import asyncio
import http
import logging
import re
import socket
from typing import cast
from urllib.parse import unquote

import h11
from fastapi.responses import JSONResponse, RedirectResponse, Response

from .edge import RESERVE, Edge, Host
from .envelope import QUIET, Envelope
from .errors import MalformedRequestError, OverloadedError, ServiceError, SlowError, respond
from .exchange import CONTINUE, Exchange

log = logging.getLogger("bkn_zoo.service")

MAX_HEAD = 16_384  # bytes of the request line and all headers, with separators
MAX_HEADERS = 100
MAX_PIPELINED = 32  # requests in a row that arrived before the previous response
SLICE = 8192  # bytes of a chunked body (or its trailers) that h11 gets at once
WHOLE_SLICE = 262_144  # the same for a body with a length, which is a single event
EVENTS = 16  # of h11 per slice; a request without chunks has three
FREE_CHUNKS, MIN_CHUNK = 1000, 256  # after so many chunks, their average must be this many bytes
LINGER = 3  # times `stall_seconds`: time to read on after a response that came before the end of its request
LOOKS = (0.001, 0.01, 0.1, 0.5)  # seconds between checks for the reset of a disconnected client
END_OF_HEAD = re.compile(rb"\n\r?\n")
AUTHORITY = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)  # of a target in absolute form
NOT_HTTP = (
    f"this is not HTTP/1.1, or it has more than {MAX_HEADERS} headers or {MAX_HEAD} bytes of them: "
    "see /docs for examples."
)
BROKEN_BODY = "the framing of the body is invalid: send Content-Length, or larger chunks."


class Connection(asyncio.Protocol):
    """The connection of one client, with at most one request at a time.

    It waits for headers, or responds, or lingers: a connection that ends before all input is read continues to read for
    a while, because a reset could otherwise overtake the response.
    """

    def __init__(self, edge: Edge, host: Host, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.edge, self.settings, self.host = edge, edge.settings, host
        self.loop = loop or asyncio.get_running_loop()
        self.http = h11.Connection(h11.SERVER, MAX_HEAD)
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.closing = False
        self._input = bytearray()  # received, but not passed to h11 yet
        self._is_queued = False  # waits for its turn to parse
        self._is_hungry = True  # whether h11 has consumed its input
        self._heard = False  # whether a part of the next headers has arrived
        self._in_a_row = 0
        self._surplus = False  # whether input follows the last request, or an invalid one
        self._ended = False  # whether the client has closed its sending side
        self._paused = False
        self._lingers_until: float | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._write_patience: asyncio.TimerHandle | None = None

    # Called by the transport and by the server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.addresses = [tuple(transport.get_extra_info(end) or ("", 0))[:2] for end in ("sockname", "peername")]
        self.host.connections.add(self)
        self.edge.metrics.connections.inc()
        if len(self.host.connections) > self.edge.most:
            self.edge.make_room()
        if len(self.host.connections) > self.edge.most + RESERVE:
            return self.cut("too many")
        self._wait(self.settings.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self in self.edge.awaited:  # move it to the end
            del self.edge.awaited[self]
            self.edge.awaited[self] = None
        self._in_a_row = 0
        if self._lingers_until is not None:
            return self._wait(min(self.settings.stall_seconds, self._lingers_until - self.loop.time()))
        if self._surplus:
            return
        self._input += data
        if not self._is_queued:
            self._parse()

    def eof_received(self) -> bool:
        """Whether the connection stays open, because the client may still wait for a response.

        All input is parsed at this point, because reading is paused otherwise.
        """
        self._ended = True
        exchange = self.exchange
        if exchange is None or not exchange.whole or self._lingers_until is not None:
            return False
        if not exchange.started and exchange.scope["http_version"] == "1.1":
            # A closed socket responds with a reset; a client that still listens ignores this.
            self.transport.write(self.http.send(CONTINUE) or b"")
            self._look(exchange, LOOKS)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.host.connections.discard(self)
        self.edge.metrics.connections.dec()
        self.edge.awaited.pop(self, None)
        for timer in (self._patience, self._write_patience):
            if timer is not None:
                timer.cancel()
        if self.exchange is not None:
            self.exchange.leave()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.edge.awaited[self] = None
        self._write_patience = self.loop.call_later(self.settings.stall_seconds, self.cut, "not read")

    def resume_writing(self) -> None:
        self.writable.set()
        if self._write_patience is not None:
            self._write_patience.cancel()
            self._write_patience = None
        if self.exchange is not None and self.exchange.whole:
            self.edge.awaited.pop(self, None)

    def shutdown(self) -> None:
        """Close as soon as the current request is answered."""
        self.closing = True
        if self.exchange is None:
            self.transport.abort() if self._lingers_until is not None else self._close()

    # Called by exchanges and by the edge

    def answered(self, exchange: Exchange) -> None:
        """Continue with the next request, or end."""
        self.exchange = None
        if self.transport.is_closing():
            return
        again = exchange.whole and not self.closing and not self._surplus
        if not again or self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return self._end(exchange.whole)
        if self._ended and not self._input:
            return self._close()
        if self.http.trailing_data[0]:  # moved back to the input
            self.http = h11.Connection(h11.SERVER, MAX_HEAD)
        else:
            self.http.start_next_cycle()
        self._is_hungry, self._heard = True, False
        self._wait(self.settings.idle_seconds)
        self._parse()

    def go_on(self) -> None:
        """Parse another slice, now that it is this connection's turn."""
        self._is_queued = False
        self._parse()

    def update_reading(self) -> None:
        """Resume or pause reading. While paused, the network slows the client down."""
        full = self.exchange is not None and self.exchange.is_full
        pause = self._lingers_until is None and not self._surplus and (self._is_queued or full or self._is_ahead)
        if pause != self._paused and not self._ended and not self.transport.is_closing():
            self._paused = pause
            self.transport.pause_reading() if pause else self.transport.resume_reading()

    def cut(self, reason: str) -> None:
        """Close at once, even if data was not sent yet."""
        self.edge.metrics.cut.labels(reason).inc()
        self.edge.awaited.pop(self, None)
        self.host.connections.discard(self)  # so that its place is free
        self.transport.abort()

    # Parsing

    @property
    def _is_ahead(self) -> bool:
        """Whether input has arrived before its turn."""
        return self.exchange is not None and self.exchange.whole and bool(self._input)

    def _parse(self) -> None:
        """Parse a slice of the input. The rest waits for another turn."""
        if self.transport.is_closing() or self._lingers_until is not None:
            return
        if self.exchange is None:
            more = self._parse_head() and self._parse_body()
        else:
            more = not self.exchange.whole and self._parse_body()
        if more:
            self._is_queued = True
            self.edge.parse_later(self)
        self.update_reading()

    def _parse_head(self) -> bool:
        """Begin a request if its headers are complete. Returns whether it began."""
        if self._input and not self._heard:
            self._heard = True
            self._wait(self.settings.head_seconds)
        found = END_OF_HEAD.search(self._input)
        end = found.end() if found else len(self._input)
        # Checked before h11 parses it, because every header takes Python microseconds.
        is_long = end > MAX_HEAD or self._input.count(b"\n", 0, end) > MAX_HEADERS + 2
        is_other = b"" < self._input[:1] <= b" "  # not a method, but TLS begins like this
        if is_long or is_other or (self._ended and not found):
            self._refuse(MalformedRequestError(NOT_HTTP))
        elif found:
            self.http.receive_data(bytes(self._input[:end]))
            del self._input[:end]
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                event = None
            if isinstance(event, h11.Request):
                self._begin(event)
            else:
                self._refuse(MalformedRequestError(NOT_HTTP))
        return self.exchange is not None

    def _parse_body(self) -> bool:
        """Parse a slice of the body. Returns whether there is more to parse now."""
        exchange = self.exchange
        assert exchange is not None
        if self._is_hungry and self._input:
            size = SLICE if exchange.is_chunked else WHOLE_SLICE
            self.http.receive_data(bytes(self._input[:size]))
            del self._input[:size]
        self._is_hungry = False
        for _ in range(EVENTS):
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                return self._break_off(exchange)
            if event is h11.NEED_DATA:
                self._is_hungry = True
                return bool(self._input)
            if isinstance(event, h11.Data):
                exchange.take(event)
                if exchange.chunks > FREE_CHUNKS and exchange.bytes < MIN_CHUNK * exchange.chunks:
                    return self._break_off(exchange)
            else:  # the end of the request
                self.edge.awaited.pop(self, None)
                exchange.end()
                self._input[:0] = self.http.trailing_data[0]
                if self.http.their_state is h11.MUST_CLOSE:
                    self._surplus = bool(self._input)
                return False
        return True

    def _break_off(self, exchange: Exchange) -> bool:
        self._surplus = True
        exchange.fail(MalformedRequestError(BROKEN_BODY))
        return False

    def _begin(self, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        # If there are two lengths, a proxy may have used the other one; h11 would use the second.
        two_lengths = b"content-length" in names and b"transfer-encoding" in names
        if two_lengths or request.http_version not in (b"1.0", b"1.1"):
            return self._refuse(MalformedRequestError(NOT_HTTP))
        if self._patience is not None:
            self._patience.cancel()
        self._in_a_row += 1
        target, _, query = request.target.partition(b"?")
        target = AUTHORITY.sub(b"", target, count=1) or b"/" if AUTHORITY.match(target) else target
        root = self.settings.root_path
        path = unquote(target.decode())
        at_root = root != "" and path == root
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path  # a proxy may have removed it
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "server": self.addresses[0],
            "client": self.addresses[1],
            "scheme": "http",
            "method": request.method.decode(),
            "root_path": root,
            "path": root + path,
            "raw_path": target,
            "query_string": query,
            "headers": list(request.headers),
            "state": self.host.app_state.copy(),
        }
        last = self._in_a_row >= MAX_PIPELINED
        # The files of the page are found only if its address ends with a slash.
        answer: Response | None = RedirectResponse(f"{root}/") if at_root else None
        if len(self.host.connections) > self.edge.most and path not in QUIET:
            answer, last = self._too_many(), True
        self.exchange = Exchange(self, scope, last, b"transfer-encoding" in names)
        app = self.host.app if answer is None else Envelope(answer, self.edge.metrics)
        task = self.loop.create_task(self.exchange.run(app))
        self.host.tasks.add(task)
        task.add_done_callback(self.host.tasks.discard)

    def _too_many(self) -> JSONResponse:
        self.edge.metrics.rejected.labels("connections").inc()
        return respond(OverloadedError(f"{self.edge.most} connections are open: try again in a second.", 1))

    def _refuse(self, error: ServiceError) -> None:
        """Respond to input that is not a valid request."""
        self.edge.metrics.requests.labels("any", "none", error.status).inc()
        log.info("no request", extra={"status": error.status, "error": error.message})
        body = bytes(respond(error).body)
        phrase = http.HTTPStatus(error.status).phrase
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"HTTP/1.1 {error.status} {phrase}\r\n{head}\r\n\r\n".encode() + body)
        self._end(False)

    # Time limits and the end

    def _wait(self, seconds: float) -> None:
        """Set the time limit for the client's next step."""
        self.edge.awaited.setdefault(self)
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self.transport.is_closing():
            return
        if self._lingers_until is not None:
            self.cut("lingered")
        elif self._heard:
            self.edge.metrics.cut.labels("slow head").inc()
            seconds = self.settings.head_seconds
            self._refuse(SlowError(f"the headers took longer than {seconds:g} s: send them at once."))
        else:
            self._close()

    def _look(self, exchange: Exchange, pauses: tuple[float, ...]) -> None:
        """Check whether a client that has closed its sending side still listens."""
        if self.exchange is not exchange or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif pauses:
            self.loop.call_later(pauses[0], self._look, exchange, pauses[1:])

    def _end(self, all_read: bool) -> None:
        if self._ended or (all_read and not self._surplus and not self._input):
            return self._close()
        self._input.clear()
        patience = 1.0 if self.closing else self.settings.stall_seconds
        self._lingers_until = self.loop.time() + LINGER * patience
        self.update_reading()
        self.transport.write_eof()
        self._wait(patience)

    def _close(self) -> None:
        """Close once everything is sent."""
        if self._patience is not None:
            self._patience.cancel()
        self.transport.close()
        if self.transport.get_write_buffer_size() and self._write_patience is None:
            self._write_patience = self.loop.call_later(self.settings.stall_seconds, self.cut, "not read")
