"""Where images are decoded: in threads, as many as there are cores, and in two lanes, so that a small one overtakes."""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from PIL.Image import Image
from torch import Tensor

from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import ImageError, ImageTooLargeError
from bkn_zoo.images import open_header
from bkn_zoo.inference.classifier import Classifier

from .errors import OverloadedError, ServiceError, of_the_image
from .settings import Settings

SMALL = 4_000_000  # pixels, which take a tenth of a second or so
PIXELS_PER_CORE = 12_500_000  # of large images at once; one takes up to 16 bytes for each
QUEUE = 4  # times as much as is decoded at once may wait for it

Result = TypeVar("Result")


class Decoders:
    """From bytes to what a network takes."""

    def __init__(self, settings: Settings) -> None:
        cores = usable_cores()
        self.max_pixels = settings.max_pixels
        self._small = Lane("decoder", cores, cores, math.inf)
        most = max(settings.max_pixels, cores * PIXELS_PER_CORE)
        # One core less, for all else; and half of the places of a queue, for small images.
        self._large = Lane("decoder of large images", max(1, cores - 1), most, settings.queue_length // 2)

    @property
    def busy(self) -> bool:
        return self._small.busy or self._large.busy

    async def within(self, images: list[bytes | ServiceError]) -> list[bytes | ServiceError]:
        """The same, with an error for those that are more pixels than allowed together with those before them."""
        return await self._small.run(1, self._within, images)

    def _within(self, images: list[bytes | ServiceError]) -> list[bytes | ServiceError]:
        found: list[bytes | ServiceError] = []
        left = self.max_pixels
        for image in images:
            try:
                pixels = 0 if isinstance(image, ServiceError) else _pixels(open_header(image, self.max_pixels))
                if pixels > left:
                    raise ImageTooLargeError(
                        f"the images of a request may have {self.max_pixels:,} pixels together, and this one has "
                        f"{pixels:,} where {left:,} are left: send it by itself."
                    )
                left -= pixels
                found.append(image)
            except ImageError as error:
                found.append(of_the_image(error))
        return found

    async def prepare(self, classifier: Classifier, image: bytes) -> Tensor:
        pixels, tensor = await self._small.run(1, self._prepare_if_small, classifier, image)
        if tensor is None:
            tensor = await self._large.run(pixels, classifier.prepare, image, self.max_pixels)
        return tensor

    def _prepare_if_small(self, classifier: Classifier, image: bytes) -> tuple[int, Tensor | None]:
        opened = open_header(image, self.max_pixels)
        pixels = _pixels(opened)
        return pixels, classifier.prepare(opened, self.max_pixels) if pixels <= SMALL else None

    def stop(self) -> None:
        self._small.stop()
        self._large.stop()


class Lane:
    """Threads, and so much work at once among them: first come, first served.

    Args:
        most: the weight of what runs at once.
        places: how many may wait, as long as they are not more than so many times what runs at once.
    """

    def __init__(self, name: str, threads: int, most: int, places: float) -> None:
        self.most, self.places = most, places
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._waiting, self._waiting_weight = most, 0, 0
        # Who waits, waits here, and not in the executor, which would keep the image of a client that has gone.
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @property
    def busy(self) -> bool:
        return self._free < self.most

    async def run(self, weight: int, work: Callable[..., Result], *arguments: Any) -> Result:
        full = self._waiting >= self.places or self._waiting_weight + weight > QUEUE * self.most
        if full and self.places < math.inf:
            raise OverloadedError(f"{self._waiting} large images wait: try again in 5 s, or with a smaller one.", 5)
        self._waiting += 1
        self._waiting_weight += weight
        try:
            async with self._turn:
                while self._free < weight:
                    self._freed.clear()
                    await self._freed.wait()
        finally:
            self._waiting -= 1
            self._waiting_weight -= weight
        self._free -= weight
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def leave(future: Future[Result]) -> None:
            with suppress(RuntimeError):  # where the loop has ended before the thread
                loop.call_soon_threadsafe(self._leave, weight, future, result)

        future = self._threads.submit(work, *arguments)
        # Whether or not anybody still waits for it: until it has ended it takes its share.
        future.add_done_callback(leave)
        try:
            return await result
        finally:
            future.cancel()  # if it has not begun

    def _leave(self, weight: int, future: Future[Result], result: asyncio.Future[Result]) -> None:
        self._free += weight
        self._freed.set()
        if future.cancelled() or result.done():
            result.cancel()
        elif (error := future.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(future.result())

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pixels(image: Image) -> int:
    return image.width * image.height
