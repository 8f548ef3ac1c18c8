"""HTTP by hand, over real sockets: the requests that tests send, and the answers that they read."""

import json
import socket
import time
from contextlib import suppress
from typing import NamedTuple


class Reply(NamedTuple):
    """An answer; status 0 where none came."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        """Status and code."""
        return self.status, self.json()["error"]["code"]

    def scores(self):
        return {prediction["label"]: prediction["score"] for prediction in self.json()["predictions"]}


def head(method, target, *headers):
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: a", *headers, "", ""]).encode("latin-1")


def request(target="/v1/classify", body=b"", *headers, method="POST", length=None):
    """A request with a length, on a connection of its own."""
    told = len(body) if length is None else length
    return head(method, target, "Connection: close", f"Content-Length: {told}", *headers) + body


def post(body, *headers, target="/v1/classify"):
    """A request after which the connection stays open."""
    return head("POST", target, f"Content-Length: {len(body)}", *headers) + body


def chunked(*headers):
    return head("POST", "/v1/classify", "Transfer-Encoding: chunked", *headers)


def form(*files, **fields):
    """A multipart body, in which bytes are files, and its content type."""
    parts = []
    for name, value in (*files, *fields.items()):
        filename = '; filename="photo.png"' if isinstance(value, bytes) else ""
        data = value if isinstance(value, bytes) else value.encode()
        parts.append(f'--xyz\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n\r\n'.encode() + data)
    return b"\r\n".join(parts) + b"\r\n--xyz--\r\n", "multipart/form-data; boundary=xyz"


def connect(port, timeout=60.0, source="127.0.0.1"):
    """A connection to this machine from an address, which on Linux may be any that begins with 127."""
    return socket.create_connection(("127.0.0.1", port), timeout, (source, 0))


def read(connection, count=1, heads=()):
    """So many answers, or all until the service closes the connection; `heads` says which have no body."""
    begun, data, found = time.perf_counter(), b"", []
    with suppress(ConnectionResetError):
        while count is None or len(found) < count:
            start, separator, rest = data.partition(b"\r\n\r\n")
            first, *lines = start.decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            size = 0 if True in heads[len(found) : len(found) + 1] else int(headers.get("content-length", 0))
            if separator and len(rest) >= size:
                data, status = rest[size:], int(first.split()[1])
                if status != 100:
                    found.append(Reply(status, headers, rest[:size], time.perf_counter() - begun))
            elif part := connection.recv(65_536):
                data += part
            else:
                break
    return found


def send(port, data, timeout=60.0):
    """The first answer to some bytes, even where it comes before all of them are sent."""
    begun = time.perf_counter()
    with suppress(ConnectionRefusedError, TimeoutError), connect(port, timeout) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        for reply in read(connection, heads=[data.startswith(b"HEAD ")]):
            return reply._replace(seconds=time.perf_counter() - begun)
    return Reply(0, {}, b"", time.perf_counter() - begun)
