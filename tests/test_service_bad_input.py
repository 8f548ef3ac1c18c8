"""Hundreds of bad requests: the service refuses each of them in words and at once, and goes on as before."""

import base64
import json
import re
import zlib
from urllib.parse import quote

import numpy as np
import pytest
from attackers import encoded
from attackers import picture as make_picture
from http_client import chunked, form, request, send
from test_images import BOMBS, OTHERS

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
INTERNAL = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|/usr/|/tmp/|/home|<class|\bat 0x|\w(Error|Exception|Warning)\b|"
    r"pydantic|starlette|fastapi|uvicorn|torch|openvino|numpy|\bPIL\b",
    re.IGNORECASE,
)
AS_JSON, FORM = "Content-Type: application/json", "Content-Type: multipart/form-data; boundary=xyz"


def picture(kind="PNG"):
    return encoded(make_picture(side=48), kind)


GOOD = picture()
TEXT = base64.b64encode(GOOD).decode()


def image(body, *headers):
    return request("/v1/classify", body, *headers)


def as_json(body, target="/v1/classify"):
    return request(target, body if isinstance(body, bytes) else json.dumps(body).encode(), AS_JSON)


def files():
    random = np.random.default_rng(5)
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
    yield from map(image, (
        *OTHERS, b"", b"\0", bytes(1_000_000), b"https://example.org/cat.png", b"/etc/passwd", svg,
        b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file", zlib.compress(GOOD, wbits=31), bytes(10_000_001),
        *(data for _, data, _ in BOMBS),
    ))  # fmt: skip
    for data in map(bytearray, map(picture, FORMATS)):
        for number in range(16):
            # Half of them in the header, where they do most; some are good by chance.
            data[int(random.integers(0, 40 if number % 2 else len(data)))] ^= 1 << int(random.integers(0, 8))
            yield image(bytes(data))


def http_itself():
    yield image(GOOD, *(f"X-{k}: 1" for k in range(20_000)))
    yield b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 500_000
    yield request(f"/v1/classify?model={'a' * 200_000}", GOOD)
    yield from (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50), b"\0\1\2\3\r\n\r\n", b"POST /v1/classify\r\n\r\n")
    yield from (request(body=GOOD, method=method) for method in ("post", "CLASSIFY"))
    yield from (image(GOOD, header) for header in ("Nonsense", "A B: c", "A: b\0c", "Content-Length: 3"))
    for length in ("-1", "+5", "1e3", "0x10", "nan", "5, 6", "9" * 30, " ", 10**9, 10**18, 40):
        yield request(body=GOOD, length=length)
    for body in (b"\r\nabc\r\n", b"three\r\nabc\r\n", b"-3\r\nabc\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"0\r\n\r\n"):
        yield chunked() + body
    for path, allowed in {"/v1/classify": "POST", "/v1/models": "GET", "/health/live": "GET", "/": "GET"}.items():
        for method in {"GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - {allowed}:
            yield request(path, b"abc", method=method)


def forms():
    whole, _ = form(image=GOOD)
    for boundary in ("", "; boundary=", "; boundary=abc", '; boundary="', "; boundary=" + "x" * 300, "; boundary=\xe9"):
        yield image(whole, f"Content-Type: multipart/form-data{boundary}")
    for body in (
        b"", b"--xyz--\r\n", whole[:-9], b"hello", whole.replace(b"\r\n", b"\n"), b"--xyz\r\n" * 10_000,
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--xyz--\r\n", b"--xyz\r\n\r\nabc\r\n--xyz--\r\n",
        whole.replace(b"\r\n\r\n", b"\r\nA: b" * 5000 + b"\r\n\r\n", 1),
        *(form(**fields)[0] for fields in (
            {"file": GOOD}, {"image": "a" * 2_000_000}, {"image": b""}, {f"f{k}": "1" for k in range(1000)},
            {"image": GOOD, "top_k": "five"}, {"image": GOOD, "model": "../../secret"},
        )),
        form(("image", GOOD), ("image", GOOD))[0],
    ):  # fmt: skip
        yield image(body, FORM)
    yield from (image(GOOD, kind) for kind in (AS_JSON, FORM))
    yield from (image(TEXT.encode(), f"Content-Type: {kind}") for kind in ("image/png", "", "a/b/c;;;="))
    yield image(zlib.compress(GOOD, wbits=31), "Content-Encoding: gzip")


def json_bodies():
    yield from map(as_json, (
        b"", b"null", b"7", b"[]", b"{}", b'{"image": "', b"{}{}", b'{"image": "\xff\xfe"}', b"NaN", b"[" * 300_000,
        b'{"image": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"image": [' + b"[]," * 3_000_000 + b"[]]}",
        b'{"image": "aGVsbG8=", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    ))  # fmt: skip
    yield from (as_json({"image": value}) for value in (None, 7, True, [], {}, [TEXT], {"image": TEXT}))
    for text in (
        "", "   ", "hello world", "----", "a", TEXT + "=", "=" + TEXT, "_-_-" + TEXT, TEXT[: len(TEXT) // 2],
        base64.b64encode(TEXT.encode()).decode(), "https://example.org/cat.png", "file:///etc/passwd", "/etc/passwd",
        "data:image/png;base64,", "data:image/png,hello", "\ud800", "\0", "猫" * 99, "A" * 1_000_000,
    ):  # fmt: skip
        yield as_json({"image": text})
        yield as_json({"inputs": text}, "/models/first")


def parameters():
    for value in ("0", "-1", "1001", "9" * 5000, "1e400", "nan", "inf", "five", "1.5", "%00", "", "[5]"):
        yield request(f"/v1/classify?top_k={value}", GOOD)
    for value in ("mine", "SAMPLE", "", "sample%00", "sample,population", "a" * 5000):
        yield request(f"/models/first?statistics={value}", GOOD)
    for text in ("NaN", "Infinity", "-1", "1.5", "1e400", "9" * 400, "[]", "{}", '"x"', "false"):
        yield as_json(f'{{"inputs": "{TEXT}", "parameters": {{"top_k": {text}}}}}'.encode(), "/models/first")
    for value in (7, [], {}, True, "mine", "\0", "\ud800", "a" * 100_000):
        yield from (as_json({"image": TEXT, name: value}) for name in ("statistics", "model"))
    for inner in ({"statistic": 1}, {"topK": 1}, {"Model\r\n": 1}, 7, [], "", False):
        yield as_json({"image": TEXT, "parameters": inner})
    for name in (
        "", "none", "FIRST", "first/", "first%00", "%0d%0aX-Injected:%201", "%ff%fe", "%ed%a0%80", "..", "../first",
        "..%2f..%2f..%2fetc%2fpasswd", "~root", "%2fetc%2fpasswd", "https:%2f%2fexample.org%2fmodel", "owner/repo@main",
    ):  # fmt: skip
        yield request(f"/models/{name}", GOOD)
        yield request(f"/v1/classify?model={quote(name, safe='%')}", GOOD)
    for path in ("../app.py", "..%2fapp.py", "%00", "a" * 5000, "/etc/passwd", "%2e%2e/%2e%2e/pyproject.toml", ""):
        yield request(f"/static/{path}", method="GET")


def wrong_with(data, reply):
    """What an answer lacks, if anything."""
    if not 400 <= reply.status < 500 or reply.headers["content-type"] != "application/json":
        return f"answered {reply.status} {reply.body[:200]!r}"
    if reply.seconds > 2:
        return f"took {reply.seconds:.2f} s"
    problem = reply.json()["error"]
    if not re.fullmatch("[a-z_]+", problem["code"]) or not 20 < len(problem["message"]) < 500:
        return f"another kind of code or message: {reply.body[:600]!r}"
    # What the caller wrote is repeated in some; what the caller did not write must not be there.
    found = INTERNAL.search(problem["message"])
    if found and found.group().encode() not in data:
        return f"it shows what is inside: {problem['message']}"
    return None


@pytest.mark.parametrize("family", [files, http_itself, forms, json_bodies, parameters])
def test_bad_requests_are_refused_at_once_without_a_trace(service, family):
    for kind in FORMATS:
        assert service.ask(body=picture(kind)).status == 200
    cases, before, failures = list(family()), service.memory(), []
    for data in cases:
        reply = send(service.port, data, timeout=10)
        problem = wrong_with(data, reply)
        if problem is not None and not (family is files and reply.status == 200):
            failures.append(f"{problem}: {data[:300]!r}")
    assert not failures, "\n".join(failures)
    assert service.ask(body=GOOD).status == 200
    print(f"{len(cases)} cases, {service.memory() - before:+.1f} MB")
    assert service.memory() - before < 150
    faults = re.findall(r'bkn_requests_total\{[^}]*status="50[^3]"\}', service.ask("/metrics").body.decode())
    assert not faults
    assert "Traceback" not in service.log()
