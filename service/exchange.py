"""One request and its response, as ASGI messages."""

import asyncio
import http
import logging
from typing import TYPE_CHECKING, Any

import h11

from .errors import ServiceError

if TYPE_CHECKING:
    from .connections import Connection

log = logging.getLogger("bkn_zoo.service")

MAX_BUFFERED = 65_536  # bytes of a body that the application has not read yet
CLOSE = (b"connection", b"close")
CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Exchange:
    """One request on a connection, and its response.

    Attributes:
        whole: whether the request is complete.
        started: whether the response has begun.
        chunks, bytes: received chunks and bytes of its body.
    """

    def __init__(self, connection: "Connection", scope: dict[str, Any], last: bool, is_chunked: bool) -> None:
        self.connection, self.scope, self.last, self.is_chunked = connection, scope, last, is_chunked
        self.whole = self.started = False
        self._body = bytearray()
        self.chunks = self.bytes = 0
        self._told = self._gone = self._done = False
        self._error: ServiceError | None = None
        self._head = b""
        self._change = asyncio.Event()

    # Called by the connection

    @property
    def is_full(self) -> bool:
        return len(self._body) > MAX_BUFFERED

    def take(self, data: h11.Data) -> None:
        self.chunks += data.chunk_start
        self.bytes += len(data.data)
        self._body += data.data
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

    # Called by the application

    async def run(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("a response was cut short")
        finally:
            if not self._done and not self._gone:
                self.connection.cut("failed")

    async def receive(self) -> dict[str, Any]:
        http = self.connection.http
        if http.they_are_waiting_for_100_continue and not self.started and not self._gone:
            self.connection.transport.write(http.send(CONTINUE) or b"")
        while not (self._gone or self._done or self._error or self._body or (self.whole and not self._told)):
            self._change.clear()
            await self._change.wait()
        if self._gone or self._done:
            return {"type": "http.disconnect"}
        if self._error is not None:
            raise self._error
        body, self._body, self._told = bytes(self._body), bytearray(), self.whole
        self.connection.update_reading()
        return {"type": "http.request", "body": body, "more_body": not self.whole}

    async def send(self, message: dict[str, Any]) -> None:
        connection = self.connection
        if not connection.writable.is_set():
            await connection.writable.wait()
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self.started = True
            status, headers = message["status"], [*connection.host.headers(), *message["headers"]]
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
