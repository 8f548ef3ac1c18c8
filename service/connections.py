"""The HTTP edge: a small state machine for each connection, and every limit on what its client may cost.

h11 reads and writes HTTP; how long and how much a client may take is decided here, except for bodies, which `uploads`
counts. Of uvicorn this uses what it hands to a protocol class: the application, its sets of connections and of tasks,
and the headers of every answer.
"""

import asyncio
import http
import logging
import socket
from typing import Any, cast
from urllib.parse import unquote

import h11
from fastapi.responses import JSONResponse, RedirectResponse, Response

from .envelope import QUIET, Envelope
from .errors import MalformedRequestError, OverloadedError, ServiceError, SlowError, respond
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger("bkn_zoo.service")

MAX_HEAD = 16_384
MAX_PIPELINED = 32  # requests in a row that came before their turn
MAX_BUFFERED = 65_536  # bytes of a body that nobody has asked for yet
TINY_CHUNKS, TINY = 1000, 16  # so many chunks of fewer bytes than this on average keep Python busy for nothing
RESERVE = 16  # connections beyond the most, for those who ask after the service's health
SPARE_FILES = 64  # descriptors for the engines, the listener, the log and the page
LINGER = 3  # times the seconds of a stall, to read on when an answer came before the end of what it answers
LOOKS = (0.001, 0.01, 0.1, 0.5)  # seconds between looks for the reset of a client that has gone: a round trip
CLOSE = (b"connection", b"close")
CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
NOT_HTTP = f"this is not HTTP/1.1, or its headers are longer than {MAX_HEAD} bytes: send a request such as /docs shows."
BROKEN_BODY = "the body is not framed as HTTP asks for: send Content-Length, or chunks of a sensible size."


class Edge:
    """What all connections share.

    Attributes:
        most: connections at once; more are let in only for health checks.
        awaited: connections whose client has to act next, those first that have been silent for longest.
        draining: whether answers ask their clients to close the connection.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.most = max(1, min(settings.max_connections, _files_allowed() - SPARE_FILES - RESERVE))
        self.awaited: dict[Connection, None] = {}
        self.draining = False

    def make_room(self) -> None:
        """Close the connection that has been silent for longest, if any is."""
        if self.awaited:
            next(iter(self.awaited)).cut("made room")


class Connection(asyncio.Protocol):
    """One client's connection, with at most one request at a time.

    It is waiting for a head, or answering, or lingering: when it closes before it has read all that was sent, it reads
    on for a while, since the client might otherwise never see the answer.
    """

    def __init__(
        self, edge: Edge, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None
    ) -> None:
        self.edge, self.settings = edge, edge.settings
        self.app, self.state, self.app_state = config.loaded_app, server_state, app_state
        self.loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self.http = h11.Connection(h11.SERVER, MAX_HEAD)
        self.transport: asyncio.Transport
        self.exchange: Exchange | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.closing = False
        self.ahead = False  # whether a request has come before its turn
        self._heard = False  # whether any of the next head has come
        self._in_a_row = 0
        self._surplus = False  # whether there is more after the last request, or after what was none
        self._ended = False  # whether the client has ended its side
        self._paused = False
        self._lingers_until: float | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._write_patience: asyncio.TimerHandle | None = None

    # What the transport and uvicorn call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.addresses = [tuple(transport.get_extra_info(end) or ("", 0))[:2] for end in ("sockname", "peername")]
        self.state.connections.add(self)
        self.edge.metrics.connections.inc()
        if len(self.state.connections) > self.edge.most:
            self.edge.make_room()
        if len(self.state.connections) > self.edge.most + RESERVE:
            return self.cut("too many")
        self._wait(self.settings.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self in self.edge.awaited:  # and is now the last to have been silent
            del self.edge.awaited[self]
            self.edge.awaited[self] = None
        self._in_a_row = 0
        if self._lingers_until is not None:
            return self._wait(min(self.settings.stall_seconds, self._lingers_until - self.loop.time()))
        if self._surplus or self.http.their_state is h11.MUST_CLOSE:
            self._surplus = True
            return
        if self.exchange is None and not self._heard:
            self._heard = True
            self._wait(self.settings.head_seconds)
        self.http.receive_data(data)
        self._advance()

    def eof_received(self) -> bool:
        """Whether the connection stays open, since only the client's side has ended, and it waits for an answer."""
        self._ended = True
        exchange = self.exchange
        if exchange is None or not exchange.whole or self._lingers_until is not None:
            return False
        if not self._surplus:
            self.http.receive_data(b"")
        if not exchange.started and exchange.scope["http_version"] == "1.1":
            # To one that has closed its socket anything is answered with a reset; to one that still listens, this says
            # nothing that it has to heed.
            self.transport.write(self.http.send(CONTINUE) or b"")
            self._look(exchange, LOOKS)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.state.connections.discard(self)
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
        """Close as soon as what was asked is answered."""
        self.closing = True
        if self.exchange is None:
            self.transport.abort() if self._lingers_until is not None else self._close()

    # What happens to a connection

    def answered(self, exchange: "Exchange") -> None:
        """Go on to the next request, or end."""
        self.exchange = None
        self.state.total_requests += 1
        if self.transport.is_closing():
            return
        again = exchange.whole and not self.closing and not self._surplus
        if not again or self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return self._end(exchange.whole)
        self.http.start_next_cycle()
        self.ahead = False
        self._heard = bool(self.http.trailing_data[0])
        self._wait(self.settings.head_seconds if self._heard else self.settings.idle_seconds)
        self.read(True)
        if self._heard or self._ended:
            self._advance()

    def read(self, on: bool) -> None:
        """Take more from the client, or leave it to the network to hold it back."""
        if on == self._paused and not self._ended and not self.transport.is_closing():
            self._paused = not on
            self.transport.resume_reading() if on else self.transport.pause_reading()

    def cut(self, reason: str) -> None:
        """Close at once, whatever has not been sent yet."""
        self.edge.metrics.cut.labels(reason).inc()
        self.edge.awaited.pop(self, None)
        self.state.connections.discard(self)  # whoever makes room must see that there is some
        self.transport.abort()

    def _advance(self) -> None:
        """Act on all that has been read."""
        while not self.transport.is_closing() and self._lingers_until is None:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                return self._malformed()
            if event is h11.NEED_DATA:
                return
            if event is h11.PAUSED:  # the next request stays where it is until this one is answered
                self.ahead = True
                return self.read(False)
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data):
                assert self.exchange is not None
                self.exchange.take(event)
                if self.exchange.chunks > TINY_CHUNKS and self.exchange.bytes < TINY * self.exchange.chunks:
                    return self._malformed()
            elif isinstance(event, h11.EndOfMessage):
                assert self.exchange is not None
                self.edge.awaited.pop(self, None)
                self.exchange.end()
                more = bool(self.http.trailing_data[0])
                if self.http.their_state is h11.MUST_CLOSE:
                    self._surplus = more
                    return
                if not more:
                    return
            else:  # the client's side has ended, and all that it asked is answered
                return self._close()

    def _begin(self, request: h11.Request) -> None:
        headers = list(request.headers)
        names = [name for name, _ in headers]
        length = len(request.target) + sum(len(name) + len(value) for name, value in headers)
        # Of two lengths, a proxy may have believed the other; h11 would take the second.
        if length > MAX_HEAD or (b"content-length" in names and b"transfer-encoding" in names):
            return self._refuse(MalformedRequestError(NOT_HTTP))
        if self._patience is not None:
            self._patience.cancel()
        self._in_a_row += 1
        target, _, query = request.target.partition(b"?")
        root = self.settings.root_path
        path = unquote(target.decode())
        at_root = root != "" and path == root
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path  # a proxy may have taken it away
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
            "headers": headers,
            "state": self.app_state.copy(),
        }
        last = self._in_a_row >= MAX_PIPELINED
        # The page finds what it needs beside itself, which is below the root only with a slash at its end.
        answer: Response | None = RedirectResponse(f"{root}/") if at_root else None
        if len(self.state.connections) > self.edge.most and path not in QUIET:
            answer, last = self._too_many(), True
        self.exchange = Exchange(self, scope, last)
        app = self.app if answer is None else Envelope(answer, self.edge.metrics)
        task = self.loop.create_task(self.exchange.run(app))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    def _too_many(self) -> JSONResponse:
        self.edge.metrics.rejected.labels("connections").inc()
        return respond(OverloadedError(f"{self.edge.most} connections are open: try again in a second.", 1))

    def _malformed(self) -> None:
        if self.exchange is None:
            self._refuse(MalformedRequestError(NOT_HTTP))
        else:
            self._surplus = True
            self.exchange.fail(MalformedRequestError(BROKEN_BODY))

    def _refuse(self, error: ServiceError) -> None:
        """Answer what is no request, and note it as one of which no more is known."""
        self.edge.metrics.requests.labels("any", "none", error.status).inc()
        log.info("no request", extra={"status": error.status, "error": error.message})
        body = bytes(respond(error).body)
        phrase = http.HTTPStatus(error.status).phrase
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"HTTP/1.1 {error.status} {phrase}\r\n{head}\r\n\r\n".encode() + body)
        self._end(False)

    def _wait(self, seconds: float) -> None:
        """Leave the client so much time for what it has to do next."""
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

    def _look(self, exchange: "Exchange", pauses: tuple[float, ...]) -> None:
        """Find out whether a client that has ended its side still listens."""
        if self.exchange is not exchange or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif pauses:
            self.loop.call_later(pauses[0], self._look, exchange, pauses[1:])

    def _end(self, all_read: bool) -> None:
        if self._ended or (all_read and not self._surplus and not self.http.trailing_data[0]):
            return self._close()
        self.read(True)
        self.transport.write_eof()
        patience = 1.0 if self.closing else self.settings.stall_seconds
        self._lingers_until = self.loop.time() + LINGER * patience
        self._wait(patience)

    def _close(self) -> None:
        """Close once all is sent."""
        if self._patience is not None:
            self._patience.cancel()
        self.transport.close()
        if self.transport.get_write_buffer_size() and self._write_patience is None:
            self._write_patience = self.loop.call_later(self.settings.stall_seconds, self.cut, "not read")


class Exchange:
    """One request and its answer, as ASGI has them.

    Attributes:
        whole: whether all of the request has come.
        started: whether an answer has begun.
        chunks, bytes: how many of its body have come.
    """

    def __init__(self, connection: Connection, scope: dict[str, Any], last: bool) -> None:
        self.connection, self.scope, self.last = connection, scope, last
        self.whole = self.started = False
        self._body = bytearray()
        self.chunks = self.bytes = 0
        self._told = self._gone = self._done = False
        self._error: ServiceError | None = None
        self._head = b""
        self._change = asyncio.Event()

    # What the connection tells

    def take(self, data: h11.Data) -> None:
        self.chunks += data.chunk_start
        self.bytes += len(data.data)
        self._body += data.data
        if len(self._body) > MAX_BUFFERED:
            self.connection.read(False)
        self._change.set()

    def end(self) -> None:
        self.whole = True
        self._change.set()

    def fail(self, error: ServiceError) -> None:
        self._error = error
        self._change.set()

    def leave(self) -> None:
        self._gone = True
        self._change.set()

    # What the application asks

    async def run(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("an answer was cut short")
        finally:
            if not self._done and not self._gone:
                self.connection.cut("failed")

    async def receive(self) -> dict[str, Any]:
        http = self.connection.http
        if http.they_are_waiting_for_100_continue and not self.started and not self._gone:
            self.connection.transport.write(http.send(CONTINUE) or b"")
        while not (self._gone or self._done or self._error or self._body or (self.whole and not self._told)):
            if not self.connection.ahead:
                self.connection.read(True)
            self._change.clear()
            await self._change.wait()
        if self._gone or self._done:
            return {"type": "http.disconnect"}
        if self._error is not None:
            raise self._error
        body, self._body, self._told = bytes(self._body), bytearray(), self.whole
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    async def send(self, message: dict[str, Any]) -> None:
        connection = self.connection
        if not connection.writable.is_set():
            await connection.writable.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self.started = True
            status, headers = message["status"], [*connection.state.default_headers, *message["headers"]]
            if self.last or not self.whole or connection.closing or connection.edge.draining:
                headers.append(CLOSE)
            reason = http.HTTPStatus(status).phrase.encode()
            self._head = connection.http.send(h11.Response(status_code=status, headers=headers, reason=reason)) or b""
            return
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        parts = [self._head, connection.http.send(h11.Data(data=body)) or b""]
        self._head = b""
        if not message.get("more_body", False):
            parts.append(connection.http.send(h11.EndOfMessage()) or b"")
            self._done = True
            self._change.set()
        connection.transport.write(b"".join(parts))
        if self._done:
            connection.answered(self)


def _files_allowed() -> int:
    """How many descriptors this process may have; very many where nothing says so."""
    try:
        import resource
    except ImportError:  # Windows
        return 2**20
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit
