"""uvicorn's HTTP, with a bound on headers and with errors that look like all others."""

from typing import TYPE_CHECKING

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from service.errors import error_response

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
else:
    Base = AutoHTTPProtocol

MAX_HEAD = 65_536
NOT_HTTP = f"this is not HTTP, or its headers are longer than {MAX_HEAD} bytes: send a request such as /docs shows."


class Protocol(Base):
    """Either of uvicorn's two: that of httptools, which takes headers without end, or that of h11, which does not."""

    _head = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        within = bool(self.scope) and "method" not in self.scope  # known once the headers are complete
        self._head = self._head + len(data) if within else 0
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(NOT_HTTP)

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            raise ValueError(NOT_HTTP)  # which becomes a 400
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        body = bytes(error_response(400, "malformed_request", NOT_HTTP).body)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()
