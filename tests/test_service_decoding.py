"""Bodies and images that cost much: where they are parsed and decoded, and who goes first."""

import asyncio
import base64
import json
import os
import signal
import sys

import attackers
import pytest
from attackers import encoded, noise, picture
from PIL import Image

from bkn_zoo.errors import BrokenImageError, ImageTooLargeError
from bkn_zoo.images import Preprocessing, open_image, preprocess, preprocess_square
from service import uploads
from service.decoding import CHEAP, Kind, PriorityThreads, estimate
from service.errors import ServiceError
from service.slow_decoder import SlowDecoder

ABOUT = Preprocessing(32, (0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    "text", ["QQ==QQ==", "A" * 65_534 + "==" + "AAAA", "A" * 65_536 + "!AAA", "=AAA", "A===", "AAAAA", "A" * 300 + "é"]
)
def test_base64_with_padding_or_letters_out_of_place_is_refused(text):
    with pytest.raises(ServiceError, match="not base64"):
        uploads.decode_base64(text)


@pytest.mark.parametrize("size", [0, 1, 2, 193, 49_151, 49_152, 200_003])
@pytest.mark.parametrize("letter", ["/", "+", "A", "\n"])
def test_base64_with_escapes_is_read_at_any_length(size, letter):
    image = os.urandom(size)
    text = base64.encodebytes(image).decode() if letter == "\n" else base64.b64encode(image).decode()
    body = json.dumps({"x\\": '"', "image": f"data:image/png;base64,{text}"})
    escaped = body.replace(letter, f"\\u{ord(letter):04x}") if letter in "/+" else body
    data = uploads.parse_body(escaped.encode())
    assert data["x\\"] == '"'
    assert uploads.decode_base64(data["image"]) == image


# Images


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: encoded(picture(side=600), "JPEG"), Kind.CHEAP),
        (lambda: encoded(picture(side=700), "PNG"), Kind.CHEAP),
        (lambda: encoded(picture().convert("RGBA"), "WEBP"), Kind.CHEAP),
        (lambda: encoded(picture(side=900), "BMP"), Kind.CHEAP),
        (lambda: encoded(noise(600), "JPEG", progressive=True), Kind.CHEAP),
        (lambda: encoded(picture(side=3500), "JPEG"), Kind.PHOTOGRAPH),
        (lambda: encoded(picture(side=1500).convert("RGBA"), "PNG"), Kind.PHOTOGRAPH),
        (lambda: encoded(picture(side=1500), "WEBP"), Kind.SLOW),
        (lambda: encoded(picture(), "WEBP", lossless=True), Kind.SLOW),
        (lambda: encoded(Image.new("RGBA", (50, 50)), "WEBP"), Kind.SLOW),
        (attackers.progressive, Kind.SLOW),
        (attackers.large_webp, Kind.SLOW),
        (attackers.png_of_empty_blocks, Kind.SLOW),
        (attackers.strips, Kind.SLOW),
        (lambda: encoded(picture(), "GIF"), Kind.SLOW),
        (lambda: attackers.png(9, 9, *[(b"eXIf", b"")] * 300, pixels=bytes(90)), Kind.SLOW),
        (lambda: encoded(picture(side=3500), "JPEG").replace(b"\xff\xc0", b"\xff\xc9"), Kind.SLOW),
    ],
)  # fmt: skip
def test_costly_images_are_known_by_their_header(make, kind):
    cost = estimate(make(), 50_000_000)
    assert cost.kind == kind
    assert (cost.image is not None) == (cost.seconds <= CHEAP) == (kind == Kind.CHEAP)


def test_pixels_are_counted_without_opening_the_file():
    sizes = {"strips": 8 * 32_768, "planar": 4000 * 4000, "large_webp": 49_000_000, "large_png": 49_000_000}
    assert {name: estimate(getattr(attackers, name)(), 50_000_000).pixels for name in sizes} == sizes


@pytest.fixture(scope="module")
def decoder():
    decoder = SlowDecoder(60, 0)
    yield decoder
    decoder.stop()


def test_slow_decoder_gives_the_same_pixels_and_survives_errors(decoder):
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encoded(picture(side=90).resize((90, 70)), kind)
        square = decoder.decode(data, 6300, ABOUT, 10_000)
        assert preprocess_square(square, ABOUT).equal(preprocess(open_image(data), ABOUT))
    with pytest.raises(BrokenImageError, match="cannot be decoded"):
        decoder.decode(encoded(picture())[:200], 1600, ABOUT, 10_000)
    with pytest.raises(ImageTooLargeError, match="40 x 40 pixels, but 1,000 are allowed"):
        decoder.decode(encoded(picture()), 1600, ABOUT, 1000)
    assert decoder.decode(encoded(picture()), 1600, ABOUT, 10_000).size == (32, 32)


@pytest.mark.parametrize(("sent", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 0.5)])
def test_slow_decoder_that_dies_or_hangs_refuses_its_image(sent, seconds):
    decoder = SlowDecoder(seconds, 0)
    os.kill(decoder._process.pid, sent)
    with pytest.raises(BrokenImageError, match="crashes the decoder or takes too long"):
        decoder.decode(encoded(picture()), 1600, ABOUT, 10_000)
    assert not decoder.is_alive


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
def test_slow_decoder_has_limited_time_and_memory(decoder):
    with pytest.raises(BrokenImageError, match="cannot be decoded"):
        decoder.decode(attackers.lossless_webp(), 996 * 996, ABOUT, 10_000_000)
    assert decoder.is_alive
    # Of 7 s if nobody stopped it.
    blocks = attackers.png_of_empty_blocks(70_000_000)
    with pytest.raises(BrokenImageError, match="takes too long"):
        decoder.decode(blocks, 64 * 64, ABOUT, 10_000_000)
    assert not decoder.is_alive


def test_small_input_overtakes_and_a_cancelled_one_gives_way():
    async def run():
        threads, order, gate = PriorityThreads("it", 1, 1, 10), [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(name):
            order.append(name)
            if name == "first":
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

        tasks = [asyncio.create_task(threads.run(1, wait, work, name))
                 for name, wait in (("first", 0), ("large", 5), ("gone", 0.5), ("small", 0.001))]  # fmt: skip
        await asyncio.sleep(0.05)
        tasks[2].cancel()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not threads.busy
        threads.stop()
        return order

    assert asyncio.run(run()) == ["first", "small", "large"]
