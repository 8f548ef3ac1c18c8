"""Hundreds of bad requests: the service refuses each of them in words and at once, and goes on as before."""

import base64
import contextlib
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np
import pytest
from attackers import encoded, png, tiff
from attackers import picture as make_picture
from http_client import Reply, request, send
from service_process import ServiceProcess, save_small_checkpoint

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
INTERNAL = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|/usr/|/tmp/|/home|<class|\bat 0x|\w(Error|Exception|Warning)\b|"
    r"pydantic|starlette|fastapi|uvicorn|torch|openvino|numpy|\bPIL\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Case:
    """One thing to send.

    Attributes:
        data: the bytes that go over the wire, with the head of the request.
        may_succeed: whether it may be good by chance, as an image with a bit turned over may.
        gives_up: whether the client stops in the middle of what it announced, so that no answer is due.
    """

    name: str
    data: bytes
    may_succeed: bool = False
    gives_up: bool = False


def picture(kind: str = "PNG") -> bytes:
    return encoded(make_picture(side=48), kind)


def image(name: str, body: bytes, *headers: str, **kind: bool) -> Case:
    return Case(name, request("/v1/classify", body, *(headers or ("Content-Type: application/octet-stream",))), **kind)


def as_json(name: str, body: bytes | dict, target: str = "/v1/classify") -> Case:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Case(name, request(target, text, "Content-Type: application/json"))


def truncations() -> Iterator[Case]:
    for kind in FORMATS:
        whole = picture(kind)
        for size in (1, 2, 4, 8, 12, 20, 30, *(len(whole) * part // 10 for part in range(1, 10, 2))):
            yield image(f"the first {size} bytes of {kind}", whole[:size])


def bit_flips() -> Iterator[Case]:
    random = np.random.default_rng(5)
    for kind in FORMATS:
        for number in range(16):
            data = bytearray(picture(kind))
            # Half of them in the header, where they do most.
            place = int(random.integers(0, 40 if number % 2 else len(data)))
            data[place] ^= 1 << int(random.integers(0, 8))
            yield image(f"{kind} with a bit of byte {place} turned over", bytes(data), may_succeed=True)


def wrong_beginnings() -> Iterator[Case]:
    starts = {kind: picture(kind)[:14] for kind in FORMATS}
    for kind in FORMATS:
        for other, start in starts.items():
            if other != kind:
                yield image(f"{kind} that begins as {other}", start + picture(kind)[14:])
        yield image(f"{kind} after a space", b" " + picture(kind))
        yield image(f"{kind} backwards", picture(kind)[::-1])


def other_things() -> Iterator[Case]:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
    entity = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>' + svg
    things = {
        "nothing": b"", "one zero byte": b"\0", "a million zeros": bytes(1_000_000), "text": b"a photograph of a cat",
        "an address": b"https://example.org/cat.png", "a local address": b"http://127.0.0.1:22/",
        "a path": b"/etc/passwd", "a file address": b"file:///etc/passwd", "SVG": svg, "SVG with an entity": entity,
        "HTML": b"<!doctype html><script>alert(1)</script>", "PDF": b"%PDF-1.7\n1 0 obj",
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file", "ZIP": b"PK\x03\x04" + bytes(60),
        "gzip": zlib.compress(picture(), wbits=31), "ICO": b"\0\0\1\0\1\0" + bytes(60),
        "HEIC": b"\0\0\0\x18ftypheic" + bytes(60), "AVIF": b"\0\0\0\x18ftypavif" + bytes(60),
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60), "PSD": b"8BPS\0\1" + bytes(60),
        "PPM": b"P6 9 9 255\n" + bytes(243), "FITS": b"SIMPLE  =                    T" + bytes(60),
        "a pickle": b"\x80\x04\x95" + bytes(60), "a program": b"\x7fELF" + bytes(60),
        "noise": np.random.default_rng(1).bytes(5000), "UTF-16": "a cat".encode("utf-16"),
    }  # fmt: skip
    for name, data in things.items():
        yield image(name, data)


def bombs() -> Iterator[Case]:
    for side in (20_000, 65_535, 2**31 - 1, 2**32 - 1, 0):
        yield image(f"PNG of {side} x {side}", png(side, side, kind=2))
    yield image("PNG of 20000 x 20000 with all its rows", png(20_000, 20_000, pixels=bytes(30_000_000), kind=2))
    yield image("PNG of 1 x 1000000000", png(1, 10**9, kind=2))
    yield image("PNG with 100000 chunks", png(9, 9, *[(b"tEXt", b"a\0b")] * 100_000, kind=2))
    yield image("PNG whose chunk is longer than the file", picture()[:33] + b"\x7f\xff\xff\xffIDAT" + bytes(90))
    yield image("PNG with too few rows", png(3000, 3000, pixels=bytes(9000), kind=2))
    for side in (16_384, 65_535):
        yield image(f"GIF of {side} x {side}", b"GIF89a" + struct.pack("<HH", side, side) + picture("GIF")[10:])
    for width, height in ((30_000, 30_000), (-30_000, 30_000), (2**31 - 1, 2**31 - 1), (9, -(2**31)), (0, 0)):
        size = struct.pack("<ii", width, height)
        yield image(f"BMP of {width} x {height}", picture("BMP")[:18] + size + picture("BMP")[26:])
    jpeg = picture("JPEG")
    frame = jpeg.index(b"\xff\xc0") + 5
    for side in (30_000, 65_500):
        yield image(f"JPEG of {side} x {side}", jpeg[:frame] + struct.pack(">HH", side, side) + jpeg[frame + 4 :])
    yield image("JPEG with 5000 scans", jpeg[:-2] + b"\xff\xda\0\x08\1\1\0\0\x3f\0" * 5000 + b"\xff\xd9")
    extended = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\0" * 2
    yield image("WebP of 16384 x 16384", b"RIFF" + struct.pack("<I", 22) + b"WEBP" + extended + bytes(60))
    for side in (20_000, 2**32 - 1):
        yield image(
            f"TIFF of {side} x {side}", tiff((256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (273, 4, 1, 8))
        )
    yield image("TIFF with a billion strips", tiff((256, 4, 1, 9), (257, 4, 1, 9), (273, 4, 10**9, 8)))
    yield image("TIFF with 60000 tags", tiff(*((300 + k, 4, 1, 8) for k in range(60_000))))
    yield image("TIFF whose directory is itself", b"II*\0\x08\0\0\0\0\0" + struct.pack("<I", 8))
    yield image("a body one byte too long", bytes(10_000_001))
    yield image("a body far too long", bytes(25_000_000))


def http_itself() -> Iterator[Case]:
    good = picture()
    target = "/v1/classify"
    yield image("a header of a megabyte", good, "X-Long: " + "a" * 1_000_000)
    yield image("20000 headers", good, *(f"X-{k}: 1" for k in range(20_000)))
    yield Case("a header that never ends", b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 500_000)
    yield Case("an address that never ends", b"POST /" + b"a" * 500_000)
    yield Case("a query of 200 kB", request(f"{target}?model={'a' * 200_000}", good))
    yield Case("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    yield Case("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50))
    yield Case("noise", b"\0\1\2\3\r\n\r\n")
    yield Case("no version", b"POST /v1/classify\r\n\r\n")
    yield Case("another protocol", b"EHLO example.org\r\n\r\n")
    for version in (b"HTTP/9.9", b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0"):
        yield Case(f"{version!r}", request(target, good).replace(b"HTTP/1.1", version))
    yield Case("a method in small letters", request(target, good, method="post"))
    yield Case("a method of its own", request(target, good, method="CLASSIFY"))
    yield Case("a header without a colon", request(target, good, "Nonsense"))
    yield Case("a header with a space in its name", request(target, good, "A B: c"))
    yield Case("a header with NUL", request(target, good, "A: b\0c"))
    yield Case("an address with a raw byte", request("/models/\xff\xfe", good))
    for length in ("-1", "+5", "1e3", "0x10", "nan", "abc", "5, 6", "9" * 30, " "):
        yield Case(f"Content-Length: {length}", request(target, good, length=length))
    for length in (10**9, 10**12, 10**18):
        yield Case(f"Content-Length: {length}, and a few bytes", request(target, good, length=length))
    yield Case("Content-Length twice", request(target, good, "Content-Length: 3"))
    yield Case("Content-Length less than the body", request(target, good, length=40))
    yield Case("Content-Length more than the body", request(target, good, length=len(good) + 100), gives_up=True)
    yield Case("Content-Length and chunks", request(target, good, "Transfer-Encoding: chunked"))
    chunked = f"POST {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    for name, chunks in {
        "of no size": b"\r\nabc\r\n", "of a size in words": b"three\r\nabc\r\n",
        "of a negative size": b"-3\r\nabc\r\n", "longer than they say": b"3\r\nabcdef\r\n0\r\n\r\n",
        "without an image": b"0\r\n\r\n", "of one byte": b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n",
        "over the limit": (b"%x\r\n" % 2_000_000 + bytes(2_000_000) + b"\r\n") * 6 + b"0\r\n\r\n",
    }.items():  # fmt: skip
        yield Case(f"chunks {name}", chunked + chunks)
    yield Case("chunks of a huge size", chunked + b"f" * 20 + b"\r\nabc\r\n", gives_up=True)
    yield Case("chunks that stop", chunked + b"ff\r\nabc", gives_up=True)
    yield Case("an encoding of its own", chunked.replace(b"chunked", b"gzip, zebra") + good)
    yield Case("headers that stop", b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-", gives_up=True)


def part(name: str, data: bytes, filename: str | None = "a.png", *headers: str) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"'
    lines = [f'Content-Disposition: form-data; name="{name}"{file}', *headers, "", ""]
    return b"--xyz\r\n" + "\r\n".join(lines).encode("latin-1") + data + b"\r\n"


def forms() -> Iterator[Case]:
    good, end, kind = picture(), b"--xyz--\r\n", "Content-Type: multipart/form-data; boundary=xyz"
    whole = part("image", good) + end
    inner = b'--in\r\nContent-Disposition: form-data; name="image"; filename="b"\r\n\r\n' + good + b"\r\n--in--\r\n"
    yield image(
        "a form in a form", part("image", inner, None, "Content-Type: multipart/mixed; boundary=in") + end, kind
    )
    yield image(
        "a form as the file", part("image", inner, "a", "Content-Type: multipart/mixed; boundary=in") + end, kind
    )
    nested = good
    for _ in range(30):
        nested = part("image", nested) + end
    yield image("forms thirty deep", nested, kind)
    for name, boundary in {
        "no boundary": "", "an empty boundary": "; boundary=", "another boundary": "; boundary=abc",
        "an open quote": '; boundary="', "a boundary of 300": "; boundary=" + "x" * 300, "an é": "; boundary=\xe9",
        "a boundary of spaces": "; boundary=   ", "a boundary of dashes": "; boundary=----",
    }.items():  # fmt: skip
        yield image(f"a form with {name}", whole, f"Content-Type: multipart/form-data{boundary}")
    for name, body in {
        "nothing": b"", "only its end": end, "no end": part("image", good), "text": b"hello",
        "a file of another name": part("file", good) + end,
        "the image as text": part("image", b"abc", None) + end,
        "the image as long text": part("image", b"a" * 2_000_000, None) + end,
        "an empty file": part("image", b"") + end,
        "a file of text": part("image", b"hello") + end,
        "two files": part("image", good) + part("image", good) + end,
        "1000 fields": b"".join(part(f"f{k}", b"1", None) for k in range(1000)) + part("image", good) + end,
        "a part without a name": b"--xyz\r\nContent-Disposition: form-data\r\n\r\nabc\r\n" + end,
        "a part without a head": b"--xyz\r\n\r\nabc\r\n" + end,
        "a part with 5000 headers": part("image", good, "a", *["A: b"] * 5000) + end,
        "a part with a header of 1 MB": part("image", good, "a", "A: " + "b" * 1_000_000) + end,
        "bytes for a name": part("\xff\xfe\0", good) + end,
        "10000 boundaries": b"--xyz\r\n" * 10_000 + end,
        "newlines of Unix": whole.replace(b"\r\n", b"\n"),
        "an unknown mode": part("statistics", b"mine", None) + whole,
        "top_k of zero": part("top_k", b"0", None) + whole,
        "top_k in words": part("top_k", b"five", None) + whole,
        "an unknown model": part("model", b"../../secret", None) + whole,
        "a model of NUL": part("model", b"a\0b", None) + whole,
        "a model that is no text": part("model", b"\xff\xfe", None) + whole,
    }.items():  # fmt: skip
        yield image(f"a form of {name}", body, kind)


def content_types() -> Iterator[Case]:
    good = picture()
    encoded = base64.b64encode(good)
    yield image("an image called JSON", good, "Content-Type: application/json")
    yield image("an image called a form", good, "Content-Type: multipart/form-data; boundary=xyz")
    for kind in ("image/png", "text/plain", "application/xml", "", "nonsense", "a/b/c;;;=", "image/svg+xml"):
        yield image(f"base64 called {kind}", encoded, f"Content-Type: {kind}")
        yield image(f"JSON called {kind}", json.dumps({"image": encoded.decode()}).encode(), f"Content-Type: {kind}")
    yield image("a form of the web", b"image=" + encoded, "Content-Type: application/x-www-form-urlencoded")
    yield image(
        "a form called mixed", part("image", good) + b"--xyz--\r\n", "Content-Type: multipart/mixed; boundary=xyz"
    )
    yield image("gzip that says so", zlib.compress(good, wbits=31), "Content-Encoding: gzip")


def json_bodies() -> Iterator[Case]:
    good = base64.b64encode(picture()).decode()
    for name, body in {
        "nothing": b"", "null": b"null", "a number": b"7", "text": b'"image"', "a list": b"[]", "an object": b"{}",
        "cut short": b'{"image": "', "two of them": b"{}{}", "not UTF-8": b'{"image": "\xff\xfe"}', "NaN": b"NaN",
        "lists 300000 deep": b"[" * 300_000, "objects 100000 deep": b'{"image":' * 100_000,
        "lists 50000 deep that end": b'{"image": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "a list of three million": b'{"image": [' + b"[]," * 3_000_000 + b"[]]}",
        "a number of 100000 digits": b'{"image": ' + b"9" * 100_000 + b"}", "UTF-16 without an end": b"\xff\xfe{",
        "a deep option": b'{"image": "aGVsbG8=", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    }.items():  # fmt: skip
        yield as_json(f"JSON: {name}", body)
    for value in (None, 7, True, [], {}, [good], {"image": good}, 1.5):
        yield as_json(f"image of type {type(value).__name__}", {"image": value})
    for name, text in {
        "nothing": "", "spaces": "   ", "words": "hello world", "dashes": "----", "one letter": "a",
        "wrong padding": good + "=", "padding first": "=" + good, "the URL alphabet": "_-_-" + good,
        "cut in the middle": good[: len(good) // 2],
        "text": base64.b64encode(b"hello").decode(), "twice": base64.b64encode(good.encode()).decode(),
        "an address": "https://example.org/cat.png", "a file address": "file:///etc/passwd", "a path": "/etc/passwd",
        "an empty data address": "data:image/png;base64,", "a data address in words": "data:image/png,hello",
        "half a data address": "data:image/png;base64", "a surrogate": "\ud800", "NUL": "\0",
        "letters of elsewhere": "猫" * 99,
        "a megabyte of A": "A" * 1_000_000, "data addresses in each other": "data:," * 5000 + good,
    }.items():  # fmt: skip
        yield as_json(f"base64: {name}", {"image": text})
        yield as_json(f"inputs in base64: {name}", {"inputs": text}, "/models/small")
    for name, value in {"a list": [], "a number": 7}.items():
        yield as_json(f"inputs of {name}", {"inputs": value, "parameters": {}}, "/models/small")
    yield as_json("image where inputs are asked for", {"image": good}, "/models/small")


def parameters() -> Iterator[Case]:
    good = picture()
    encoded = base64.b64encode(good).decode()
    for value in (
        "0", "-1", "-99999999999999999999", "1001", "9" * 30, "9" * 5000, "1e400", "NaN", "nan", "inf", "-inf", "five",
        "1.5", "0x5", "5;5", "%00", "", "%F0%9F%90%88", "None", "[5]",
    ):  # fmt: skip
        yield Case(f"top_k={value[:30]}", request(f"/v1/classify?top_k={value}", good))
    for value in ("mine", "SAMPLE", "", "sample%00", "sample,population", "%2e%2e", "0", "null", "a" * 5000):
        yield Case(f"statistics={value[:30]}", request(f"/v1/classify?statistics={value}", good))
        yield Case(f"statistics={value[:30]} of Hugging Face", request(f"/models/small?statistics={value}", good))
    for text in (
        "NaN", "Infinity", "-Infinity", "-1", "0", "1.5", "1e400", "9" * 400, "[]", "{}", '"x"', "false", "10001",
    ):  # fmt: skip
        body = f'{{"image": "{encoded}", "top_k": {text}}}'.encode()
        yield as_json(f"top_k: {text[:30]}", body)
        inner = f'{{"inputs": "{encoded}", "parameters": {{"top_k": {text}}}}}'.encode()
        yield as_json(f"parameters.top_k: {text[:30]}", inner, "/models/small")
    for name in ("statistics", "model"):
        for value in (7, [], {}, True, "mine", "\0", "\ud800", "a" * 100_000, {"$ne": 1}):
            yield as_json(f"{name} of {str(value)[:20]!a}", {"image": encoded, name: value})
    for name in ("statistic", "topK", "model\ud800", "Model\r\n"):
        yield as_json(f"the name {name!a}", {"image": encoded, "parameters": {name: 1}})
    for value in (7, [], "", "sample", False):
        yield as_json(f"parameters of {value!a}", {"image": encoded, "parameters": value})


def models_and_paths() -> Iterator[Case]:
    good = picture()
    names = (
        "", "none", "SMALL", "small/", "/small", "small%00", "%00", "%0d%0aX-Injected:%201", "%F0%9F%90%88", "%ff%fe",
        "%ed%a0%80", "..", "../small", "..%2fsmall", "..%2f..%2f..%2fetc%2fpasswd", "../../../etc/passwd",
        "/etc/passwd",
        "%2fetc%2fpasswd", "....//....//etc/passwd", "..\\..\\windows", "C:%5cwindows", "file:%2f%2f%2fetc%2fpasswd",
        "https:%2f%2fexample.org%2fmodel", "owner/repository", "owner/repository@main", "small%20", "sma%6c%6c%2e",
        "~root",
        "$HOME", "{name}", "%25s%25n", "' OR 1=1 --".replace(" ", "%20"), "a" * 20_000,
    )  # fmt: skip
    for name in names:
        yield Case(f"/models/{name[:40]}", request(f"/models/{name}", good))
        yield Case(f"?model={name[:40]}", request(f"/v1/classify?model={quote(name, safe='%')}", good))
    for path in (
        "/static/../app.py", "/static/..%2fapp.py", "/static/%00", "/static/" + "a" * 5000, "/static//etc/passwd",
        "/static/%2e%2e/%2e%2e/pyproject.toml", "/v2/models", "/.env", "/health", "/health/live/", "/V1/CLASSIFY",
        "//example.org/..", "/static", "/docs/..%2f",
    ):  # fmt: skip
        yield Case(f"GET {path[:40]}", request(path, method="GET"))


def methods() -> Iterator[Case]:
    for path, allowed in {"/v1/classify": "POST", "/models/small": "POST", "/v1/models": "GET", "/health/live": "GET",
                          "/health/ready": "GET", "/metrics": "GET", "/": "GET"}.items():  # fmt: skip
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
            if method != allowed:
                yield Case(f"{method} {path}", request(path, b"abc", method=method))
    key = "Sec-WebSocket-Key: " + "A" * 22 + "=="
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    yield Case("a socket of the web", request("/v1/classify", b"", *upgrade, method="GET"))


FAMILIES = (
    truncations, bit_flips, wrong_beginnings, other_things, bombs, http_itself, forms, content_types, json_bodies,
    parameters, models_and_paths, methods,
)  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    with ServiceProcess(folder) as process:
        yield process


def wrong_with(case: Case, reply: Reply) -> str | None:
    """What an answer lacks, if anything."""
    if reply.status == 0 and case.gives_up:
        return None
    if reply.status == 200 and case.may_succeed:
        return None
    if not 400 <= reply.status < 500:
        return f"answered {reply.status} {reply.body[:200]!r}"
    if reply.headers["content-type"] != "application/json":
        return f"{reply.status}, as {reply.headers['content-type']}"
    answer = reply.json()
    problem = answer.get("error", {}) if isinstance(answer, dict) else {}
    if set(answer) != {"error"} or set(problem) != {"code", "message"}:
        return f"another shape: {reply.body[:200]!r}"
    if not re.fullmatch("[a-z_]+", problem["code"]) or not 20 < len(problem["message"]) < 500:
        return f"another kind of code or message: {reply.body[:600]!r}"
    # What the caller wrote is repeated in some; what the caller did not write must not be there.
    found = INTERNAL.search(problem["message"])
    if found and found.group().encode() not in case.data:
        return f"it shows what is inside: {problem['message']}"
    return None


def test_bad_requests_are_refused_at_once_without_a_trace(service: ServiceProcess) -> None:
    good = request("/v1/classify", picture())
    families = {family.__name__: list(family()) for family in FAMILIES}
    # Warm: every library that is loaded on first use is loaded, and every buffer is as large as it gets.
    for kind in FORMATS:
        assert send(service.port, request("/v1/classify", picture(kind))).status == 200
    for cases in families.values():
        for case in cases[:: max(1, len(cases) // 4)]:
            send(service.port, case.data, case.gives_up, 10)
    send(service.port, request("/v1/classify", bytes(10_000_001)))

    before, failures, sent, slow = service.memory(), [], 0, 0
    refused: Counter[str] = Counter()
    for family, cases in families.items():
        for case in cases:
            reply = send(service.port, case.data, case.gives_up, 10)
            if reply.seconds > 1:
                # Others may share the cores: what was slow once may try again, but not twice.
                slow += 1
                reply = send(service.port, case.data, case.gives_up, 10)
            problem = wrong_with(case, reply)
            if problem is None and reply.seconds > 1:
                problem = f"took {reply.seconds:.2f} s"
            if problem is not None:
                failures.append(f"{family}: {case.name}: {problem}")
            sent += 1
            refused[family] += 400 <= reply.status < 500
        assert send(service.port, good).status == 200, f"no good answer after {family}"
    grown = service.memory() - before
    text = send(service.port, request("/metrics", method="GET")).body.decode()

    flips = f"{refused['bit_flips']} of {len(families['bit_flips'])} bit flips"
    print(f"{sent} cases, {refused.total()} refused, among them {flips}; {slow} tried twice; {grown:+.1f} MB")
    assert not failures, "\n".join(failures)
    assert sent >= 300
    assert refused["bit_flips"] >= 10
    assert grown < 50
    assert not re.findall(r'bkn_requests_total\{[^}]*status="50[^3]"\}', text)  # 503 was /health/ready at the start
    assert "Traceback" not in service.log()


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_from_the_schema_meet_no_5xx(service: ServiceProcess, mode: str) -> None:
    import schemathesis  # here, since it takes seconds, and every process of the tests would wait for it
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis.errors import Unsatisfiable

    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/classify", "/models/{name}", "/v1/models", "/metrics"}
    statuses: Counter[int] = Counter()
    for operation in operations:

        @seed(7)
        @settings(
            max_examples=10 if operation.method == "post" else 3, deadline=None, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case: schemathesis.Case) -> None:
            response = case.call(timeout=20)
            statuses[response.status_code] += 1
            assert response.status_code < 500, response.text
            assert str(response.status_code) in case.operation.definition.raw["responses"]
            if response.status_code >= 400 and case.method != "HEAD":
                assert response.json()["error"].keys() == {"code", "message"}

        with contextlib.suppress(Unsatisfiable):  # a request that nothing can be wrong with has no bad examples
            ask()
    print(f"{mode}: {dict(statuses)}")
    assert statuses.total() >= 25
