"""Bodies and images that cost much: where they are parsed and decoded, and who goes first."""

import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import attackers
import pytest
from attackers import encoded, noise, picture

from bkn_zoo.errors import BrokenImageError, ImageTooLargeError
from bkn_zoo.images import Preprocessing
from service import base64_json, uploads
from service.costs import CHEAP, estimate
from service.decoding import Lane
from service.errors import BadParameterError
from service.slow_decoder import SlowDecoder

ABOUT = Preprocessing(32, (0.5,) * 3, (0.25,) * 3)


def test_large_json_is_parsed_in_a_thread_and_small_is_not() -> None:
    sizes = []

    async def work(size: int, parse: Any, *arguments: Any) -> Any:
        sizes.append(size)
        return parse(*arguments)

    def read(image: bytes) -> bytes:
        body = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        message = {"type": "http.request", "body": body}
        asked = Mock(headers={"content-type": "application/json"}, query_params={}, scope={"query_string": b""})
        asked.stream = lambda: _parts(message["body"])
        return asyncio.run(uploads.read_upload(asked, "image", work))[0]

    large = os.urandom(300_001)
    assert (read(b"small"), sizes) == (b"small", [])
    assert (read(large), len(sizes)) == (large, 1)


async def _parts(body: bytes) -> Any:
    yield body


@pytest.mark.parametrize(
    "text", ["QQ==QQ==", "A" * 65_534 + "==" + "AAAA", "A" * 65_536 + "!AAA", "=AAA", "A===", "AAAAA"]
)
def test_base64_with_padding_or_letters_out_of_place_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="not base64"):
        base64_json.decode_base64(text, {})
    with pytest.raises(Exception, match="not base64"):
        base64_json.decode_base64(*base64_json.parse(f'"{text:300}"'.encode()))


def test_parameter_names_are_limited_before_they_are_compared() -> None:
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
def test_costly_images_are_known_by_their_header(make: Callable[[], bytes], is_cheap: bool) -> None:
    data = make()
    begun = time.process_time()
    cost = estimate(data, 50_000_000)
    assert time.process_time() - begun < CHEAP
    assert cost.is_cheap is is_cheap
    assert (cost.image is not None) or not is_cheap


def test_pixels_are_counted_without_opening_the_file() -> None:
    sizes = {"strips": 8 * 32_768, "planar": 4000 * 4000, "large_webp": 49_000_000, "large_png": 49_000_000}
    assert {name: estimate(getattr(attackers, name)(), 50_000_000).pixels for name in sizes} == sizes
    with pytest.raises(ImageTooLargeError):
        estimate(attackers.large_webp(), 1_000_000)


@pytest.fixture(scope="module")
def decoder() -> Iterator[SlowDecoder]:
    decoder = SlowDecoder(60)
    yield decoder
    decoder.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_slow_decoder_gives_the_same_pixels(decoder: SlowDecoder, kind: str) -> None:
    from bkn_zoo.images import open_image, preprocess

    data, about = encoded(picture(side=90).resize((90, 70)), kind), ABOUT
    square = decoder.decode(data, about, 10_000)
    assert preprocess(square, about).equal(preprocess(open_image(data), about))


def test_slow_decoder_passes_errors_on_and_survives_them(decoder: SlowDecoder) -> None:
    with pytest.raises(BrokenImageError, match="cannot be decoded"):
        decoder.decode(encoded(picture())[:200], ABOUT, 10_000)
    with pytest.raises(ImageTooLargeError, match="40 x 40 pixels, but 1,000 are allowed"):
        decoder.decode(encoded(picture()), ABOUT, 1000)
    assert decoder.decode(encoded(picture()), ABOUT, 10_000).size == (32, 32)


@pytest.mark.parametrize(("sent", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 0.5)])
def test_slow_decoder_that_dies_or_hangs_refuses_its_image(sent: signal.Signals, seconds: float) -> None:
    decoder = SlowDecoder(seconds)
    os.kill(decoder._process.pid, sent)
    with pytest.raises(BrokenImageError, match="crashes the decoder or takes it too long"):
        decoder.decode(encoded(picture()), ABOUT, 10_000)
    assert not decoder.is_alive


def test_small_input_overtakes_and_a_cancelled_one_gives_way() -> None:
    async def run() -> list[str]:
        lane, order, gate = Lane("it", 1, 1, 10), [], asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(name: str) -> None:
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
