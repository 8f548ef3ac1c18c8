"""Hundreds of bad requests: the service refuses each of them in words and at once, and goes on as before."""

import base64
import contextlib
import json
import re
import zlib
from collections import Counter
from functools import partial
from urllib.parse import quote

import numpy as np
import pytest
from attackers import encoded
from attackers import picture as make_picture
from http_client import request, send
from service_process import ServiceProcess, save_small_checkpoint
from test_images import BOMBS, OTHERS

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
INTERNAL = re.compile(
    r"Traceback|File \"|\.py\b|site-packages|/usr/|/tmp/|/home|<class|\bat 0x|\w(Error|Exception|Warning)\b|"
    r"pydantic|starlette|fastapi|uvicorn|torch|openvino|numpy|\bPIL\b",
    re.IGNORECASE,
)
OCTETS, AS_JSON = "Content-Type: application/octet-stream", "Content-Type: application/json"
FORM = "Content-Type: multipart/form-data; boundary=xyz"
CHUNKED = b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def picture(kind="PNG"):
    return encoded(make_picture(side=48), kind)


GOOD = picture()
TEXT = base64.b64encode(GOOD).decode()


def image(body, *headers):
    return request("/v1/classify", body, *(headers or (OCTETS,)))


def as_json(body, target="/v1/classify"):
    return request(target, body if isinstance(body, bytes) else json.dumps(body).encode(), AS_JSON)


def bit_flips():
    """Some of these may be good by chance."""
    random = np.random.default_rng(5)
    for kind in FORMATS:
        for number in range(16):
            data = bytearray(picture(kind))
            # Half of them in the header, where they do most.
            place = int(random.integers(0, 40 if number % 2 else len(data)))
            data[place] ^= 1 << int(random.integers(0, 8))
            yield image(bytes(data))


def other_things():
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
    entity = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]>' + svg
    yield from map(image, (
        *OTHERS, b"", b"\0", bytes(1_000_000), b"https://example.org/cat.png", b"http://127.0.0.1:22/", b"/etc/passwd",
        b"file:///etc/passwd", svg, entity, b"<!doctype html><script>alert(1)</script>", "a cat".encode("utf-16"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file", zlib.compress(GOOD, wbits=31),
        np.random.default_rng(1).bytes(5000), b"PK\x03\x04" + bytes(243), b"\x80\x04\x95" + bytes(243), b"\x7fELF",
    ))  # fmt: skip


def bombs():
    yield from (image(data) for _, data, _ in BOMBS)
    yield from (image(bytes(size)) for size in (10_000_001, 25_000_000))


def http_itself():
    yield image(GOOD, "X-Long: " + "a" * 1_000_000)
    yield image(GOOD, *(f"X-{k}: 1" for k in range(20_000)))
    yield b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 500_000
    yield b"POST /" + b"a" * 500_000
    yield request(f"/v1/classify?model={'a' * 200_000}", GOOD)
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)  # TLS
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50)
    yield from (b"\0\1\2\3\r\n\r\n", b"POST /v1/classify\r\n\r\n", b"EHLO example.org\r\n\r\n")
    for version in (b"HTTP/9.9", b"HTTP/1.2", b"HTTP/0.9", b"HTTP/2.0"):
        yield image(GOOD).replace(b"HTTP/1.1", version)
    yield from (request(body=GOOD, method=method) for method in ("post", "CLASSIFY"))
    yield from (image(GOOD, header) for header in ("Nonsense", "A B: c", "A: b\0c", "Content-Length: 3"))
    yield request("/models/\xff\xfe", GOOD)
    for length in ("-1", "+5", "1e3", "0x10", "nan", "abc", "5, 6", "9" * 30, " ", 10**9, 10**12, 10**18, 40):
        yield request(body=GOOD, length=length)
    yield image(GOOD, "Transfer-Encoding: chunked")  # and a length
    chunks = (b"\r\nabc\r\n", b"three\r\nabc\r\n", b"-3\r\nabc\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"0\r\n\r\n",
              b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")  # fmt: skip
    yield from (CHUNKED + body for body in chunks)
    yield CHUNKED + (b"%x\r\n" % 2_000_000 + bytes(2_000_000) + b"\r\n") * 6 + b"0\r\n\r\n"
    yield CHUNKED.replace(b"chunked", b"gzip, zebra") + GOOD


def unfinished():
    """The client stops in the middle of what it announced, so that no answer is due."""
    yield request(body=GOOD, length=len(GOOD) + 100)
    yield from (CHUNKED + body for body in (b"f" * 20 + b"\r\nabc\r\n", b"ff\r\nabc"))
    yield b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nContent-"


def part(name, data, filename="a.png", *headers):
    file = "" if filename is None else f'; filename="{filename}"'
    lines = [f'Content-Disposition: form-data; name="{name}"{file}', *headers, "", ""]
    return b"--xyz\r\n" + "\r\n".join(lines).encode("latin-1") + data + b"\r\n"


def forms():
    end, mixed = b"--xyz--\r\n", "Content-Type: multipart/mixed; boundary=in"
    whole = part("image", GOOD) + end
    inner = b'--in\r\nContent-Disposition: form-data; name="image"; filename="b"\r\n\r\n' + GOOD + b"\r\n--in--\r\n"
    yield from (image(part("image", inner, name, mixed) + end, FORM) for name in (None, "a"))
    nested = GOOD
    for _ in range(30):
        nested = part("image", nested) + end
    yield image(nested, FORM)
    for boundary in ("", "; boundary=", "; boundary=abc", '; boundary="', "; boundary=" + "x" * 300, "; boundary=\xe9",
                     "; boundary=   ", "; boundary=----"):  # fmt: skip
        yield image(whole, f"Content-Type: multipart/form-data{boundary}")
    nameless, headless = b"--xyz\r\nContent-Disposition: form-data\r\n\r\nabc\r\n", b"--xyz\r\n\r\nabc\r\n"
    for body in (b"", end, part("image", GOOD), b"hello", whole.replace(b"\r\n", b"\n"), b"--xyz\r\n" * 10_000 + end,
                 nameless + end, headless + end):  # fmt: skip
        yield image(body, FORM)
    for parts in (
        part("file", GOOD), part("image", b"abc", None), part("image", b"a" * 2_000_000, None), part("image", b""),
        part("image", b"hello"), part("image", GOOD) * 2, part("\xff\xfe\0", GOOD),
        b"".join(part(f"f{k}", b"1", None) for k in range(1000)) + part("image", GOOD),
        part("image", GOOD, "a", *["A: b"] * 5000), part("image", GOOD, "a", "A: " + "b" * 1_000_000),
    ):  # fmt: skip
        yield image(parts + end, FORM)
    for name, value in (("statistics", b"mine"), ("top_k", b"0"), ("top_k", b"five"), ("model", b"../../secret"),
                        ("model", b"a\0b"), ("model", b"\xff\xfe")):  # fmt: skip
        yield image(part(name, value, None) + whole, FORM)


def content_types():
    yield from (image(GOOD, kind) for kind in (AS_JSON, FORM))
    for kind in ("image/png", "text/plain", "application/xml", "", "nonsense", "a/b/c;;;=", "image/svg+xml"):
        yield image(TEXT.encode(), f"Content-Type: {kind}")
        yield image(json.dumps({"image": TEXT}).encode(), f"Content-Type: {kind}")
    yield image(f"image={TEXT}".encode(), "Content-Type: application/x-www-form-urlencoded")
    yield image(part("image", GOOD) + b"--xyz--\r\n", "Content-Type: multipart/mixed; boundary=xyz")
    yield image(zlib.compress(GOOD, wbits=31), "Content-Encoding: gzip")


def json_bodies():
    yield from map(as_json, (
        b"", b"null", b"7", b'"image"', b"[]", b"{}", b'{"image": "', b"{}{}", b'{"image": "\xff\xfe"}', b"NaN",
        b"[" * 300_000, b'{"image":' * 100_000, b'{"image": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"image": [' + b"[]," * 3_000_000 + b"[]]}", b'{"image": ' + b"9" * 100_000 + b"}", b"\xff\xfe{",
        b'{"image": "aGVsbG8=", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    ))  # fmt: skip
    yield from (as_json({"image": value}) for value in (None, 7, True, [], {}, [TEXT], {"image": TEXT}, 1.5))
    for text in (
        "", "   ", "hello world", "----", "a", TEXT + "=", "=" + TEXT, "_-_-" + TEXT, TEXT[: len(TEXT) // 2],
        base64.b64encode(b"hello").decode(), base64.b64encode(TEXT.encode()).decode(), "https://example.org/cat.png",
        "file:///etc/passwd", "/etc/passwd", "data:image/png;base64,", "data:image/png,hello", "data:image/png;base64",
        "\ud800", "\0", "猫" * 99, "A" * 1_000_000, "data:," * 5000 + TEXT,
    ):  # fmt: skip
        yield as_json({"image": text})
        yield as_json({"inputs": text}, "/models/small")
    yield from (as_json({"inputs": value, "parameters": {}}, "/models/small") for value in ([], 7))
    yield as_json({"image": TEXT}, "/models/small")


def parameters():
    for value in (
        "0", "-1", "-99999999999999999999", "1001", "9" * 30, "9" * 5000, "1e400", "NaN", "nan", "inf", "-inf", "five",
        "1.5", "0x5", "5;5", "%00", "", "%F0%9F%90%88", "None", "[5]",
    ):  # fmt: skip
        yield request(f"/v1/classify?top_k={value}", GOOD)
    for value in ("mine", "SAMPLE", "", "sample%00", "sample,population", "%2e%2e", "0", "null", "a" * 5000):
        yield from (request(f"{path}?statistics={value}", GOOD) for path in ("/v1/classify", "/models/small"))
    for text in (
        "NaN", "Infinity", "-Infinity", "-1", "0", "1.5", "1e400", "9" * 400, "[]", "{}", '"x"', "false", "10001",
    ):  # fmt: skip
        yield as_json(f'{{"image": "{TEXT}", "top_k": {text}}}'.encode())
        yield as_json(f'{{"inputs": "{TEXT}", "parameters": {{"top_k": {text}}}}}'.encode(), "/models/small")
    for name in ("statistics", "model"):
        for value in (7, [], {}, True, "mine", "\0", "\ud800", "a" * 100_000, {"$ne": 1}):
            yield as_json({"image": TEXT, name: value})
    for inner in ({"statistic": 1}, {"topK": 1}, {"model\ud800": 1}, {"Model\r\n": 1}, 7, [], "", "sample", False):
        yield as_json({"image": TEXT, "parameters": inner})


def models_and_paths():
    for name in (
        "", "none", "SMALL", "small/", "/small", "small%00", "%00", "%0d%0aX-Injected:%201", "%F0%9F%90%88", "%ff%fe",
        "%ed%a0%80", "..", "../small", "..%2fsmall", "..%2f..%2f..%2fetc%2fpasswd", "../../../etc/passwd", "~root",
        "/etc/passwd", "%2fetc%2fpasswd", "....//....//etc/passwd", "..\\..\\windows", "C:%5cwindows",
        "file:%2f%2f%2fetc%2fpasswd", "https:%2f%2fexample.org%2fmodel", "owner/repository", "owner/repository@main",
        "small%20", "sma%6c%6c%2e", "$HOME", "{name}", "%25s%25n", "'%20OR%201=1%20--", "a" * 20_000,
    ):  # fmt: skip
        yield request(f"/models/{name}", GOOD)
        yield request(f"/v1/classify?model={quote(name, safe='%')}", GOOD)
    for path in (
        "/static/../app.py", "/static/..%2fapp.py", "/static/%00", "/static/" + "a" * 5000, "/static//etc/passwd",
        "/static/%2e%2e/%2e%2e/pyproject.toml", "/v2/models", "/.env", "/health", "/health/live/", "/V1/CLASSIFY",
        "//example.org/..", "/static", "/docs/..%2f",
    ):  # fmt: skip
        yield request(path, method="GET")


def methods():
    for path, allowed in {"/v1/classify": "POST", "/models/small": "POST", "/v1/models": "GET", "/health/live": "GET",
                          "/health/ready": "GET", "/metrics": "GET", "/": "GET"}.items():  # fmt: skip
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - {allowed}:
            yield request(path, b"abc", method=method)
    key = "Sec-WebSocket-Key: " + "A" * 22 + "=="
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    yield request("/v1/classify", b"", *upgrade, method="GET")


FAMILIES = (
    bit_flips, other_things, bombs, http_itself, unfinished, forms, content_types, json_bodies, parameters,
    models_and_paths, methods,
)  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "small")
    with ServiceProcess(folder) as process:
        yield process


def wrong_with(family, data, reply):
    """What an answer lacks, if anything."""
    if (reply.status == 0 and family is unfinished) or (reply.status == 200 and family is bit_flips):
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
    if found and found.group().encode() not in data:
        return f"it shows what is inside: {problem['message']}"
    return None


def test_bad_requests_are_refused_at_once_without_a_trace(service):
    families = {family: list(family()) for family in FAMILIES}
    ask = {family: partial(send, service.port, ends=family is unfinished, timeout=10) for family in FAMILIES}
    # Warm: every library that is loaded on first use is loaded, and every buffer is as large as it gets.
    for kind in FORMATS:
        assert service.ask(body=picture(kind)).status == 200
    for mode in ("population", "sample"):  # which the service prepares by itself, too
        assert service.ask(f"/v1/classify?statistics={mode}", picture(next(iter(FORMATS)))).status == 200
    for family, cases in families.items():
        list(map(ask[family], cases[:: max(1, len(cases) // 4)]))
    before, failures, slow = service.memory(), [], 0
    refused = Counter()
    for family, cases in families.items():
        for data in cases:
            reply = ask[family](data)
            if reply.seconds > 1:
                # Others may share the cores: what was slow once may try again, but not twice.
                slow += 1
                reply = ask[family](data)
            problem = wrong_with(family, data, reply)
            if problem is None and reply.seconds > 1:
                problem = f"took {reply.seconds:.2f} s"
            if problem is not None:
                failures.append(f"{family.__name__}: {problem}: {data[:300]!r}")
            refused[family] += 400 <= reply.status < 500
        assert service.ask(body=GOOD).status == 200, f"no good answer after {family.__name__}"
    grown, sent = service.memory() - before, sum(map(len, families.values()))
    print(f"{sent} cases, {refused.total()} refused; {slow} tried twice; {grown:+.1f} MB")
    assert not failures, "\n".join(failures)
    assert sent >= 500
    assert refused[bit_flips] >= 10
    assert grown < 50
    faults = re.findall(r'bkn_requests_total\{[^}]*status="50[^3]"\}', service.ask("/metrics").body.decode())
    assert not faults  # 503 was /health/ready at the start
    assert "Traceback" not in service.log()


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_requests_made_from_the_schema_meet_no_5xx(service, mode):
    import schemathesis  # here, since it takes seconds, and every process of the tests would wait for it
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis.errors import Unsatisfiable

    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/classify", "/models/{name}", "/v1/models", "/metrics"}
    statuses = Counter()
    for operation in operations:

        @seed(7)
        @settings(
            max_examples=10 if operation.method == "post" else 3, deadline=None, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case):
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
