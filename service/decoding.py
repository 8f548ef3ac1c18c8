"""Where images are decoded: cheap ones in threads, as many as there are cores, and all others in processes.

What an image costs is estimated from its first bytes. The times are those of one slow core, measured for each class of
file.
"""

import asyncio
import heapq
import itertools
import math
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from PIL.ImageFile import ImageFile
from torch import Tensor

from bkn_zoo.cores import usable_cores
from bkn_zoo.images.formats import find_format, tiff_size, webp_size
from bkn_zoo.images.reading import open_header
from bkn_zoo.inference.classifier import Classifier

from .errors import ServiceError
from .settings import Settings
from .slow_decoder import SlowDecoder

# Seconds; above it an image is decoded in a process.
CHEAP = 0.06
# Seconds up to which a plain JPEG or PNG is a photograph.
PHOTOGRAPH = 0.6
# Of a JPEG, or chunks of a PNG; Pillow takes Python microseconds for each.
MAX_SEGMENTS = 256
# Seconds per pixel.
PNG, PNG_WITH_ALPHA, BMP, WEBP, JPEG = 40e-9, 80e-9, 5e-9, 60e-9, 15e-9
# Seconds per pixel and scan of a progressive JPEG.
JPEG_SCAN = 2.5e-9
# Seconds per byte. A PNG may consist of empty deflate blocks.
JPEG_BYTE, PROGRESSIVE_BYTE, PNG_BYTE = 20e-9, 45e-9, 100e-9
# Of a JPEG: frames of the usual kind, which are neither progressive nor arithmetically coded.
USUAL_FRAMES = {b"\xff\xc0", b"\xff\xc1"}
# Of slow images at once; one takes up to 16 bytes for each.
PIXELS_PER_CORE = 12_500_000
# Times as much as is decoded at once may wait for it.
BACKLOG = 4
# Handicap in seconds, by which later inputs may overtake: per byte, and per second that decoding is estimated to take.
HANDICAP_PER_BYTE, HANDICAP_PER_SECOND = 5e-7, 10
# The largest handicap in seconds before the cost is estimated, so that a large photograph does not wait long for that.
MOST_HANDICAP = 0.2

Result = TypeVar("Result")


class Kind(IntEnum):
    """Which images an image may have to wait for: those of its own kind."""

    CHEAP = 0
    PHOTOGRAPH = 1
    SLOW = 2


# Of the processes: small images come first, photographs second.
NICENESS = {Kind.PHOTOGRAPH: 5, Kind.SLOW: 10}


class Cost(NamedTuple):
    """What decoding takes. The image is opened if the file is cheap."""

    kind: Kind
    # How many the file says it has; 0 if it does not say.
    pixels: int
    # Infinite for formats whose structure can hide work.
    seconds: float = math.inf
    image: ImageFile | None = None


def estimate(data: bytes, max_pixels: int) -> Cost:
    """The cost of a file; raises ImageError where its header shows that it cannot be used."""
    name = find_format(data, "the image")
    pixels = _pixels(name, data)
    # Lossless WebP and its transparency may have a code for each tile, which takes long and hundreds of megabytes.
    hides_work = name in ("GIF", "TIFF") or (name == "WebP" and (b"VP8L" in data or b"ALPH" in data))
    markers = _markers(name, data)
    if hides_work or len(markers) > MAX_SEGMENTS:
        return Cost(Kind.SLOW, pixels)
    if name == "WebP" and CHEAP < WEBP * pixels <= WEBP * max_pixels:
        # Opening it would allocate all pixels.
        return Cost(Kind.SLOW, pixels, WEBP * pixels)
    image = open_header(data, max_pixels)
    pixels, is_usual = image.width * image.height, False
    if name == "JPEG" and USUAL_FRAMES & {*markers}:
        seconds, is_usual = JPEG * pixels + JPEG_BYTE * len(data), True
    elif name == "JPEG":
        seconds = (JPEG + JPEG_SCAN * data.count(b"\xff\xda")) * pixels + PROGRESSIVE_BYTE * len(data)
    elif name == "PNG":
        is_plain = image.mode in ("1", "L", "P", "RGB") and "transparency" not in image.info
        seconds, is_usual = (PNG if is_plain else PNG_WITH_ALPHA) * pixels + PNG_BYTE * len(data), True
    else:
        seconds = {"BMP": BMP, "WebP": WEBP}[name] * pixels
    if seconds <= CHEAP:
        return Cost(Kind.CHEAP, pixels, seconds, image)
    return Cost(Kind.PHOTOGRAPH if is_usual and seconds <= PHOTOGRAPH else Kind.SLOW, pixels, seconds)


def _pixels(name: str, data: bytes) -> int:
    """The pixels of formats that are costly to open; 0 for others, and where they are missing."""
    sizes = {"TIFF": tiff_size, "WebP": webp_size, "GIF": lambda data: struct.unpack_from("<HH", data, 6)}
    try:
        return math.prod(sizes[name](data))
    except (struct.error, KeyError, ValueError):
        return 0


def _markers(name: str, data: bytes) -> list[bytes]:
    """The first segments of a JPEG up to its pixels, or chunks of a PNG; where it is damaged, opening it says so."""
    found: list[bytes] = []
    place = {"PNG": 8, "JPEG": 2}.get(name, len(data))
    while len(found) <= MAX_SEGMENTS and not {b"IEND", b"\xff\xda"} & {*found[-1:]}:
        try:
            if name == "PNG":
                length, marker = struct.unpack_from(">I4s", data, place)
                place += 12 + length
            else:
                marker, length = struct.unpack_from(">2sH", data, place)
                place += 2 + length
        except struct.error:
            break
        found.append(marker)
    return found


class Decoders:
    """From bytes to what a network takes."""

    def __init__(self, settings: Settings) -> None:
        cores = usable_cores()
        self.max_pixels, self._deadline = settings.max_pixels, settings.deadline
        self._small = PriorityThreads("decoder", cores, cores, math.inf)
        # One, since it competes with the event loop for Python's lock.
        self._texts = PriorityThreads("parser", 1, 1, math.inf)
        # One core less, for everything else; and half of the places of a queue, for small images.
        threads, places = max(1, cores - 1), settings.queue_length // 2
        most = max(settings.max_pixels, cores * PIXELS_PER_CORE)
        self._large = {kind: PriorityThreads(f"{kind.name} decoder", threads, most, places) for kind in NICENESS}
        self._idle: dict[Kind, list[SlowDecoder]] = {kind: [] for kind in NICENESS}
        self._threads = [self._small, self._texts, *self._large.values()]

    @property
    def busy(self) -> bool:
        return any(threads.busy for threads in self._threads)

    async def parse_text(self, size: int, parse: Callable[..., Result], *arguments: Any) -> Result:
        """Parse so many bytes of text in a thread, small texts first."""
        return await self._texts.run(1, HANDICAP_PER_BYTE * size, parse, *arguments)

    async def prepare(self, classifier: Classifier, image: bytes) -> Tensor:
        handicap = min(HANDICAP_PER_BYTE * len(image), MOST_HANDICAP)
        found = await self._small.run(1, handicap, self._prepare_if_cheap, classifier, image)
        if isinstance(found, Tensor):
            return found
        pixels, handicap = min(found.pixels, self.max_pixels), HANDICAP_PER_SECOND * min(found.seconds, 1.0)
        return await self._large[found.kind].run(
            pixels, handicap, self._prepare_large, classifier, image, found.kind, pixels
        )

    def _prepare_if_cheap(self, classifier: Classifier, image: bytes) -> Tensor | Cost:
        cost = estimate(image, self.max_pixels)
        return cost if cost.image is None else classifier.prepare(cost.image, self.max_pixels)

    def _prepare_large(self, classifier: Classifier, image: bytes, kind: Kind, pixels: int) -> Tensor:
        idle = self._idle[kind]
        try:
            decoder = idle.pop()
        except IndexError:
            decoder = SlowDecoder(self._deadline, NICENESS[kind])
        try:
            square = decoder.decode(image, pixels, classifier.preprocessing, self.max_pixels)
        finally:
            if decoder.is_alive:
                idle.append(decoder)
        return classifier.prepare_square(square)

    def stop(self) -> None:
        for threads in self._threads:
            threads.stop()
        for decoder in itertools.chain(*self._idle.values()):
            decoder.stop()


class PriorityThreads:
    """Threads that do work of a limited weight at once, and small work first.

    So many `places` may wait, as long as they weigh no more than `BACKLOG` times what runs at once.
    """

    def __init__(self, name: str, threads: int, most: int, places: float) -> None:
        self.most, self.places = most, places
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._waiting, self._waiting_weight = most, 0, 0
        # Not in the executor, which would keep the image of a client that has gone.
        self._turns: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    @property
    def busy(self) -> bool:
        return self._free < self.most

    async def run(self, weight: int, handicap: float, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do some work when it is its turn. Later work may overtake if its handicap, in seconds, is so much smaller."""
        full = self._waiting >= self.places or self._waiting_weight + weight > BACKLOG * self.most
        if full and self.places < math.inf:
            raise ServiceError(
                "overloaded", f"{self._waiting} large images wait: try again in 5 s, or with a smaller one.", 5
            )
        await self._turn(weight, handicap)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        # Whether or not anybody still waits for it: until it has ended it takes its share.
        running.add_done_callback(partial(self._leave, weight))
        return await asyncio.shield(running)

    async def _turn(self, weight: int, handicap: float) -> None:
        """Wait until work of this weight may begin."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._turns, (loop.time() + handicap, next(self._count), weight, turn))
        self._waiting += 1
        self._waiting_weight += weight
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            # It was its turn already.
            if not turn.cancelled():
                self._leave(weight, turn)
            raise
        finally:
            self._waiting -= 1
            self._waiting_weight -= weight

    def _begin(self) -> None:
        while self._turns and (self._turns[0][3].cancelled() or self._turns[0][2] <= self._free):
            _, _, weight, turn = heapq.heappop(self._turns)
            if not turn.cancelled():
                self._free -= weight
                turn.set_result(None)

    def _leave(self, weight: int, done: asyncio.Future[Any]) -> None:
        self._free += weight
        self._begin()
        # Otherwise asyncio would log the error of an image whose client has gone.
        if not done.cancelled():
            done.exception()

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
