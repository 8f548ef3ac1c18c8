"""Where images are decoded: cheap ones in threads, as many as there are cores, and all others in processes."""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from bkn_zoo.cores import usable_cores
from bkn_zoo.errors import ImageError, ImageTooLargeError
from bkn_zoo.inference.classifier import Classifier

from .costs import Cost, Kind, estimate
from .errors import ServiceError, of_the_image
from .settings import Settings
from .slow_decoder import SlowDecoder

# Of slow images at once; one takes up to 16 bytes for each.
PIXELS_PER_CORE = 12_500_000
# Times as much as is decoded at once may wait for it.
BACKLOG = 4
# Seconds that a later, smaller input may overtake, for each byte and for each estimated second of an image.
HANDICAP_PER_BYTE, HANDICAP_PER_SECOND = 5e-7, 10
# Of the processes, by the kind of their images: small images come first, photographs second.
NICENESS = {Kind.PHOTOGRAPH: 5, Kind.SLOW: 10}

Result = TypeVar("Result")


class Decoders:
    """From bytes to what a network takes."""

    def __init__(self, settings: Settings) -> None:
        cores = usable_cores()
        self.max_pixels, self._deadline = settings.max_pixels, settings.deadline
        self._small = PriorityThreads("decoder", cores, cores, math.inf)
        # One, since it competes with the event loop for Python's lock.
        self._texts = PriorityThreads("parser", 1, 1, math.inf)
        # One core less, for everything else; and half of the places of a queue, for small images.
        most, places = max(settings.max_pixels, cores * PIXELS_PER_CORE), settings.queue_length // 2
        self._large = {kind: PriorityThreads(f"{kind.name.lower()} decoder", max(1, cores - 1), most, places)
                       for kind in NICENESS}  # fmt: skip
        self._idle: dict[Kind, list[SlowDecoder]] = {kind: [] for kind in NICENESS}

    @property
    def _threads(self) -> "list[PriorityThreads]":
        return [self._small, self._texts, *self._large.values()]

    @property
    def busy(self) -> bool:
        return any(threads.busy for threads in self._threads)

    async def parse_text(self, size: int, parse: Callable[..., Result], *arguments: Any) -> Result:
        """Parse so many bytes of text in a thread, small texts first."""
        return await self._texts.run(1, HANDICAP_PER_BYTE * size, parse, *arguments)

    async def within(self, images: list[bytes | ServiceError]) -> list[bytes | ServiceError]:
        """The same, with an error for those that are more pixels than allowed together with those before them."""
        size = sum(len(image) for image in images if isinstance(image, bytes))
        return await self._small.run(1, HANDICAP_PER_BYTE * size, self._within, images)

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
        found = await self._small.run(1, HANDICAP_PER_BYTE * len(image), self._prepare_if_cheap, classifier, image)
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
        for idle in self._idle.values():
            while idle:
                idle.pop().stop()


class PriorityThreads:
    """Threads that do a limited amount of work at once, and small work first.

    Args:
        most: the weight of the work that runs at once.
        places: how many may wait, as long as they weigh no more than `BACKLOG` times what runs at once.
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
        """Do some work when it is its turn.

        Args:
            handicap: seconds; later work with a smaller handicap may overtake within the difference.
        """
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

    def _leave(self, weight: int, running: asyncio.Future[Any]) -> None:
        self._give_back(weight)
        if not running.cancelled():
            # Otherwise asyncio would log the error of an image whose client has gone.
            running.exception()

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

    def stop(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
