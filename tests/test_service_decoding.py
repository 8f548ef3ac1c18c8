"""Bodies and images that cost much: where they are parsed and decoded, and who goes first."""

import asyncio
import base64
import binascii
import json
import os
import signal
import time
from unittest.mock import Mock, patch

import attackers
import pytest
from attackers import encoded, noise, picture

from bkn_zoo.errors import BrokenImageError, ImageTooLargeError
from bkn_zoo.images import Preprocessing
from service import base64_json, uploads
from service.costs import CHEAP, estimate
from service.decoding import Lane
from service.errors import BadParameterError, MalformedRequestError
from service.slow_decoder import SlowDecoder

ABOUT = Preprocessing(32, (0.5,) * 3, (0.25,) * 3)


def test_large_json_is_parsed_in_a_thread_and_small_is_not():
    sizes = []

    async def work(size, parse, *arguments):
        sizes.append(size)
        return parse(*arguments)

    def read(image):
        body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        message = {"type": "http.request", "body": body}
        asked = Mock(headers={"content-type": "application/json"}, query_params={}, scope={"query_string": b""})
        asked.stream = lambda: _parts(message["body"])
        return asyncio.run(uploads.read_upload(asked, "image", work))[0]

    large = os.urandom(300_001)
    assert (read(b"small"), sizes) == (b"small", [])
    assert (read(large), len(sizes)) == (large, 1)


async def _parts(body):
    yield body


@pytest.mark.parametrize(
    "text", ["QQ==QQ==", "A" * 65_534 + "==" + "AAAA", "A" * 65_536 + "!AAA", "=AAA", "A===", "AAAAA", "A" * 300 + "é"]
)
def test_base64_with_padding_or_letters_out_of_place_is_refused(text):
    data, strings = base64_json.parse(json.dumps(text).encode())
    assert len(strings) == (len(text) > base64_json.LONG)
    with pytest.raises(MalformedRequestError, match="not base64"):
        base64_json.decode_base64(data, strings)


@pytest.mark.parametrize("size", [0, 1, 2, 191, 192, 193, 194, 49_151, 49_152, 200_003])
@pytest.mark.parametrize("letter", ["/", "+", "A", "\n"])
def test_base64_with_escapes_is_read_at_any_length(size, letter):
    image = os.urandom(size)
    text = base64.encodebytes(image).decode() if letter == "\n" else base64.b64encode(image).decode()
    body = json.dumps({"x\\": '"', "image": f"data:image/png;base64,{text}", "images": [text]})
    escaped = body.replace(letter, f"\\u{ord(letter):04x}") if letter in "/+" else body
    data, strings = base64_json.parse(escaped.encode())
    assert data.keys() == {"x\\", "image", "images"}
    assert data["x\\"] == '"'
    assert [base64_json.decode_base64(one, strings) for one in (data["image"], *data["images"])] == [image] * 2


@pytest.mark.parametrize(
    "body",
    [
        b" " * 10**7,
        b'"' * 10**7,
        b'["' + b'\\"' * 10**6,
        b"[" + b"{}," * 10**5,
        b"[" + b'"' + b"a" * 300 + b'",' * 10**5,
    ],
)
def test_json_of_many_parts_is_refused_without_parsing(body):
    with patch("service.base64_json.json.loads") as loads, pytest.raises(MalformedRequestError, match="too many parts"):
        base64_json.parse(body)
    loads.assert_not_called()


def test_json_and_base64_are_read_in_small_steps():
    """Every call that holds Python's lock gets a slice."""
    body = json.dumps({"image": "A" * 9_900_000, "more": "\n" * 40_000}).encode()
    sizes = []

    def counted(function):
        return lambda data, **options: (sizes.append(len(data)), function(data, **options))[1]

    with (
        patch("service.base64_json.json.loads", counted(json.loads)),
        patch("service.base64_json.binascii.a2b_base64", counted(binascii.a2b_base64)),
    ):
        data, strings = base64_json.parse(body)
        assert len(base64_json.decode_base64(data["image"], strings)) == 9_900_000 * 3 // 4
    assert max(sizes) < 70_000
    assert sum(sizes) > 2 * 9_900_000


def test_parameter_names_are_limited_before_they_are_compared():
    with patch("service.uploads.get_close_matches") as compare:
        with pytest.raises(BadParameterError, match="more than 32 parameters"):
            uploads._chosen({f"modal{k}": 1 for k in range(33)})
        with pytest.raises(BadParameterError, match="more than 32 parameters"):
            uploads._query(Mock(scope={"query_string": b"&".join([b"modal=1"] * 33)}))
    compare.assert_not_called()


# Images


@pytest.mark.parametrize(
    ("make", "is_cheap"),
    [
        (lambda: encoded(picture(side=600), "JPEG"), True),
        (lambda: encoded(noise(900), "PNG"), True),
        (lambda: encoded(picture(side=900), "WEBP"), True),
        (lambda: encoded(picture(side=900), "BMP"), True),
        (lambda: encoded(noise(600), "JPEG", progressive=True), True),
        (lambda: encoded(picture(side=1500).convert("RGBA"), "PNG"), False),
        (lambda: encoded(picture(side=1500), "WEBP"), False),
        (attackers.progressive, False),
        (attackers.large_webp, False),
        (attackers.large_png, False),
        (attackers.strips, False),
        (attackers.planar, False),
        (lambda: encoded(picture(), "TIFF"), False),
        (lambda: encoded(picture(), "GIF"), False),
        (lambda: attackers.png(9, 9, *[(b"eXIf", b"")] * 300, pixels=bytes(90)), False),
    ],
)  # fmt: skip
def test_costly_images_are_known_by_their_header(make, is_cheap):
    data = make()
    begun = time.process_time()
    cost = estimate(data, 50_000_000)
    assert time.process_time() - begun < CHEAP
    assert (cost.image is not None, cost.seconds <= CHEAP) == (is_cheap, is_cheap)


def test_pixels_are_counted_without_opening_the_file():
    sizes = {"strips": 8 * 32_768, "planar": 4000 * 4000, "large_webp": 49_000_000, "large_png": 49_000_000}
    assert {name: estimate(getattr(attackers, name)(), 50_000_000).pixels for name in sizes} == sizes
    with pytest.raises(ImageTooLargeError):
        estimate(attackers.large_webp(), 1_000_000)


@pytest.fixture(scope="module")
def decoder():
    decoder = SlowDecoder(60)
    yield decoder
    decoder.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_slow_decoder_gives_the_same_pixels(decoder, kind):
    from bkn_zoo.images import open_image, preprocess

    data, about = encoded(picture(side=90).resize((90, 70)), kind), ABOUT
    square = decoder.decode(data, about, 10_000)
    assert preprocess(square, about).equal(preprocess(open_image(data), about))


def test_slow_decoder_passes_errors_on_and_survives_them(decoder):
    with pytest.raises(BrokenImageError, match="cannot be decoded"):
        decoder.decode(encoded(picture())[:200], ABOUT, 10_000)
    with pytest.raises(ImageTooLargeError, match="40 x 40 pixels, but 1,000 are allowed"):
        decoder.decode(encoded(picture()), ABOUT, 1000)
    assert decoder.decode(encoded(picture()), ABOUT, 10_000).size == (32, 32)


@pytest.mark.parametrize(("sent", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 0.5)])
def test_slow_decoder_that_dies_or_hangs_refuses_its_image(sent, seconds):
    decoder = SlowDecoder(seconds)
    os.kill(decoder._process.pid, sent)
    with pytest.raises(BrokenImageError, match="crashes the decoder or takes too long"):
        decoder.decode(encoded(picture()), ABOUT, 10_000)
    assert not decoder.is_alive


def test_small_input_overtakes_and_a_cancelled_one_gives_way():
    async def run():
        lane, order, gate = Lane("it", 1, 1, 10), [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(name):
            order.append(name)
            if name == "first":
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

        tasks = [asyncio.create_task(lane.run(1, wait, work, name))
                 for name, wait in (("first", 0), ("large", 5), ("gone", 0.5), ("small", 0.001))]  # fmt: skip
        await asyncio.sleep(0.05)
        tasks[2].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not lane.busy
        lane.stop()
        return order

    assert asyncio.run(run()) == ["first", "small", "large"]
