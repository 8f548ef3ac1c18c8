"""Valid requests, damaged at random and cut into random packets: what a parser of HTTP must survive.

Never may there be an answer of 500 or more, a connection that hangs or an answer to a request that was not sent. Every
head in a damaged stream is taken for one that might be good.
"""

import contextlib
import io
import random
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

from attackers import encoded, picture
from http_client import connect, read

HANGS = 20.0  # seconds after which a connection that should be closed hangs
QUIET = 0.5  # seconds after which no further answer is expected
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\nX-Request-Id: hidden\r\n\r\n"
SPECIAL = [
    b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b"\xff", b"0", b"-", b";", b"%00", b"\r\n\r\n", b"\x0b",
    b"\r\nContent-Length: 5", b"\r\nContent-Length: 0", b"\r\nTransfer-Encoding: chunked",
    b"\r\nTransfer-Encoding: gzip",
    b"\r\nTransfer-Encoding:\tchunked", b"\r\nTransfer-Encoding : chunked", b"\r\n Transfer-Encoding: chunked",
    b"\r\nConnection: Upgrade\r\nUpgrade: h2c", b"\r\nConnection: close", b"\r\nExpect: 100-continue", b"HTTP/1.0",
    b"0\r\n\r\n", b"fffffffffffffffff\r\n", HIDDEN,
]  # fmt: skip


class Head(NamedTuple):
    method: bytes
    identity: str | None  # what X-Request-Id says, if the service takes it over


def valid(generator, number):
    """One to three requests on one connection, each with an id of its own."""
    image = encoded(picture(generator.randrange(256), 9)) + generator.choice([b"", HIDDEN])
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (image[:50], image[50:])) + b"0\r\n\r\n"
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + image + b"\r\n--x--\r\n"
    length = b"Content-Length: %d\r\n"
    kinds = [
        (b"GET /health/live", b"", b""),
        (b"GET /v1/models?a=b", b"", b""),
        (b"GET /health/live", b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + length % len(HIDDEN), HIDDEN),
        (b"OPTIONS *", b"", b""),
        (b"POST /nowhere", length % len(HIDDEN), HIDDEN),
        (b"POST /v1/classify", length % len(image), image),
        (b"POST /v1/classify", b"Transfer-Encoding: chunked\r\n", chunks),
        (b"POST /v1/classify", b"Expect: 100-continue\r\n" + length % len(image), image),
        (b"POST /v1/classify", b"Content-Type: multipart/form-data; boundary=x\r\n" + length % len(form), form),
    ]
    found = b""
    for k in range(generator.randint(1, 3)):
        start, headers, body = generator.choice(kinds)
        found += start + b" HTTP/1.1\r\nHost: a\r\nX-Request-Id: id-%d-%d\r\n" % (number, k) + headers + b"\r\n" + body
    return found


def damage(data, generator):
    for _ in range(generator.randint(0, 4)):
        # Half of it near the beginning, where the first head is.
        a = generator.randrange(len(data) if generator.random() < 0.5 else min(len(data), 200)) if data else 0
        b = min(len(data), a + generator.choice([1, 2, 5, 20, 100]))
        data = generator.choice([
            data[:a] + bytes([generator.randrange(256)]) + data[a + 1 :],
            data[:a] + data[b:],
            data[:b] + data[a:b] * generator.choice([1, 1, 20]) + data[b:],
            data[:a] + generator.choice(SPECIAL) + data[a:],
            re.sub(rb"\r\n", lambda match: generator.choice([b"\r\n", b"\n", b"\r\n" * 2, match[0]]), data, count=3),
            re.sub(rb"[0-9]", lambda match: b"%d" % generator.randrange(10), data, count=generator.randrange(9)),
        ])  # fmt: skip
    return data


def heads_in(data):
    """The requests that a stream may be said to hold, in order."""
    found = []
    while match := re.search(rb"\n\r?\n", data):
        unfolded = re.sub(rb"\r?\n[ \t]+", b" ", data[: match.start()])
        lines = [line.removesuffix(b"\r") for line in unfolded.split(b"\n")]
        data = data[match.end() :]
        pairs = [line.partition(b":")[::2] for line in lines[1:]]
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        identity = headers.get(b"x-request-id", b"")
        known = re.fullmatch(rb"[A-Za-z0-9._-]{1,64}", identity)
        found.append(Head(lines[0].partition(b" ")[0], identity.decode() if known else None))
        if b"transfer-encoding" in headers:
            rest = after_chunks(data)
        else:
            length = headers.get(b"content-length", b"0").partition(b",")[0]
            rest = data[int(length) :] if length.isdigit() and len(length) < 20 else None
        if rest is None:
            break
        data = rest
    return found


def after_chunks(data):
    """What follows a chunked body; None where it has no end."""
    while match := re.match(rb"([0-9a-fA-F]{1,20})[^\n]*\n", data):
        size = int(match[1], 16)
        data = data[match.end() :]
        if size == 0:
            end = re.match(rb"\r?\n", data) or re.search(rb"\n\r?\n", data)
            return data[end.end() :] if end else None
        data = data[size + 2 :]
    return None


def talk(port, data, generator):
    """All answers to a stream in random packets; None where the service does not close the connection."""
    cuts = sorted(generator.randrange(len(data) + 1) for _ in range(generator.choice([0, 1, 3, 10])))
    heads = [head.method == b"HEAD" for head in heads_in(data)]
    with connect(port, HANGS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
                connection.sendall(data[a:b])
                time.sleep(generator.choice([0, 0, 0.002]))
        # A client that closes its sending side has gone, so it first waits for its answers.
        data = received(connection, QUIET)[0]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        more, is_closed = received(connection, HANGS)
        return read(SimpleNamespace(recv=io.BytesIO(data + more).read), None, heads) if is_closed else None


def received(connection, seconds):
    """What arrives until the service closes the connection or is silent for so long, and whether it has closed."""
    connection.settimeout(seconds)
    data = b""
    try:
        while part := connection.recv(65_536):
            data += part
    except TimeoutError:
        return data, False
    except OSError:
        pass
    return data, True


def wrong_with(data, answers):
    """What may not be, if anything."""
    if answers is None:
        return "the connection hangs"
    heads, statuses = heads_in(data), [answer.status for answer in answers]
    if max(statuses, default=0) >= 500:
        return f"answered {statuses}"
    identities = [answer.headers["x-request-id"] for answer in answers if "x-request-id" in answer.headers]
    # What is no request has no id.
    if len(identities) > len(heads) or len(answers) > len(identities) + 1:
        return f"{len(heads)} requests, but answers {answers}"
    for head, identity in zip(heads, identities, strict=False):
        if identity != head.identity if head.identity is not None else not re.fullmatch("[0-9a-f]{32}", identity):
            return f"asked {heads}, but answers {answers}"
    return None


def fuzz(port, mutations, seed):
    """What went wrong, and how often which status was answered."""
    statuses = Counter()

    def one(number):
        generator = random.Random(f"{seed} {number}")
        data = damage(valid(generator, number), generator)
        answers = talk(port, data, generator)
        statuses.update(answer.status for answer in answers or [])
        problem = wrong_with(data, answers)
        return None if problem is None else f"{number}: {problem}: {data[:1500]!r}"

    with ThreadPoolExecutor(8) as clients:
        return [problem for problem in clients.map(one, range(mutations)) if problem is not None], statuses
