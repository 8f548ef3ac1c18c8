"""Where images are decoded: cheap ones in threads, as many as there are cores, and all others in processes."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import ImageError, ImageTooLargeError
from bkn_zoo.inference.classifier import Classifier

from .costs import Cost, estimate
from .errors import OverloadedError, ServiceError, of_the_image
from .settings import Settings
from .slow_decoder import SlowDecoder

PIXELS_PER_CORE = 12_500_000  # of slow images at once; one takes up to 16 bytes for each
QUEUE = 4  # times as much as is decoded at once may wait for it
BYTE = 5e-7  # seconds by which each byte of input lets others go first
SLOWNESS = 10  # the same for each estimated second of a slow image

Result = TypeVar("Result")


class Decoders:
    """From bytes to what a network takes."""

    def __init__(self, settings: Settings) -> None:
        cores = usable_cores()
        self.max_pixels, self._deadline = settings.max_pixels, settings.deadline
        self._small = Lane("decoder", cores, cores, math.inf)
        self._texts = Lane("parser", 1, 1, math.inf)  # one, since it competes with the event loop for Python's lock
        most = max(settings.max_pixels, cores * PIXELS_PER_CORE)
        # One core less, for everything else; and half of the places of a queue, for small images.
        self._slow = Lane("decoder of slow images", max(1, cores - 1), most, settings.queue_length // 2)
        self._idle: list[SlowDecoder] = []  # processes

    @property
    def busy(self) -> bool:
        return any(lane.busy for lane in (self._small, self._texts, self._slow))

    async def parse(self, size: int, parse: Callable[..., Result], *arguments: Any) -> Result:
        """Parse so many bytes of text in a thread, small texts first."""
        return await self._texts.run(1, BYTE * size, parse, *arguments)

    async def within(self, images: list[bytes | ServiceError]) -> list[bytes | ServiceError]:
        """The same, with an error for those that are more pixels than allowed together with those before them."""
        size = sum(len(image) for image in images if isinstance(image, bytes))
        return await self._small.run(1, BYTE * size, self._within, images)

    def _within(self, images: list[bytes | ServiceError]) -> list[bytes | ServiceError]:
        found: list[bytes | ServiceError] = []
        left = self.max_pixels
        for image in images:
            try:
                pixels = 0 if isinstance(image, ServiceError) else estimate(image, self.max_pixels).pixels
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
        found = await self._small.run(1, BYTE * len(image), self._prepare_if_cheap, classifier, image)
        if isinstance(found, Tensor):
            return found
        pixels, wait = min(found.pixels, self.max_pixels), SLOWNESS * min(found.seconds, 1.0)
        return await self._slow.run(pixels, wait, self._prepare_slowly, classifier, image)

    def _prepare_if_cheap(self, classifier: Classifier, image: bytes) -> Tensor | Cost:
        cost = estimate(image, self.max_pixels)
        return cost if cost.image is None else classifier.prepare(cost.image, self.max_pixels)

    def _prepare_slowly(self, classifier: Classifier, image: bytes) -> Tensor:
        try:
            decoder = self._idle.pop()
        except IndexError:
            decoder = SlowDecoder(self._deadline)
        try:
            square = decoder.decode(image, classifier.preprocessing, self.max_pixels)
        finally:
            if decoder.is_alive:
                self._idle.append(decoder)
        return classifier.prepare_square(square)

    def stop(self) -> None:
        for lane in (self._small, self._texts, self._slow):
            lane.stop()
        while self._idle:
            self._idle.pop().stop()


class Lane:
    """Threads that do a limited amount of work at once.

    Args:
        most: the weight of the work that runs at once.
        places: how many may wait, as long as they weigh no more than `QUEUE` times what runs at once.
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

    async def run(self, weight: int, wait: float, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do some work when it is its turn.

        Args:
            wait: by how many seconds later work may overtake it if that has less to wait.
        """
        full = self._waiting >= self.places or self._waiting_weight + weight > QUEUE * self.most
        if full and self.places < math.inf:
            raise OverloadedError(f"{self._waiting} large images wait: try again in 5 s, or with a smaller one.", 5)
        await self._turn(weight, wait)
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

    async def _turn(self, weight: int, wait: float) -> None:
        """Wait until work of this weight may begin."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._turns, (loop.time() + wait, next(self._count), weight, turn))
        self._waiting += 1
        self._waiting_weight += weight
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was its turn already
                self._give_back(weight)
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

    def _give_back(self, weight: int) -> None:
        self._free += weight
        self._begin()

    def _leave(self, weight: int, future: Future[Result], result: asyncio.Future[Result]) -> None:
        self._give_back(weight)
        if future.cancelled() or result.done():
            result.cancel()
        elif (error := future.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(future.result())

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
