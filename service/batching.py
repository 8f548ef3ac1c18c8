"""A bounded queue for one model, and the threads that run its images."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from bkn_zoo.errors import BknZooError

from .errors import ServiceError, of_the_image
from .logs import request_id
from .metrics import Metrics

log = logging.getLogger("bkn_zoo.service")

FAILED = "the image could not be classified: try again; if it fails again, tell the operator of this service."


class Answer(NamedTuple):
    """The scores of one image, and its time in the queue and in the engine."""

    scores: Tensor
    queue_seconds: float
    inference_seconds: float


@dataclass(eq=False)
class Call:
    """One image in the queue."""

    image: Tensor
    statistics: str
    future: Future[Answer] = field(default_factory=Future)
    entered: float = field(default_factory=time.perf_counter)
    request: str | None = field(default_factory=request_id.get)


class ModelQueue:
    """The queue of one model. Images with different statistics modes never share a batch.

    Args:
        run: a function from images (n, 3, height, width) and a statistics mode to scores (n, classes).
        length: largest number of waiting requests, without those that are running.
        max_batch, max_wait: largest batch, and the seconds that its first image waits for others.
        threads: number of batches that run at once.
    """

    def __init__(
        self, name: str, run: Callable[[Tensor, str], Tensor], metrics: Metrics,
        length: int, max_batch: int = 1, max_wait: float = 0.0, threads: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.run, self.metrics = name, run, metrics
        self.length, self.max_batch, self.max_wait, self.threads = length, max_batch, max_wait, threads
        self._length = metrics.queue_length.labels(name)
        self.admitted = 0
        self.used = time.monotonic()
        self._calls: deque[Call] = deque()
        self._threads: set[threading.Thread] = set()
        self._change = threading.Condition()
        self._closing = False
        self._seconds_per_image = 0.0
        for _ in range(threads):
            self._start()

    @property
    def share(self) -> int:
        """How many images of one request are processed at once: one is decoded while others run."""
        return max(1 + self.threads, self.max_batch // 4)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserve a place in the queue for a request, from before decoding until its response."""
        if self.admitted >= self.length + self.max_batch * self.threads:
            wait = max(1, math.ceil(self.admitted * self._seconds_per_image))
            raise ServiceError(
                "overloaded", f"too many requests wait for {self.name} ({self.admitted}): try again in {wait} s.", wait
            )
        self.admitted += 1
        self.used = time.monotonic()
        try:
            yield
        finally:
            with self._change:
                self.admitted -= 1
                # Only then does the thread wait for places to be returned.
                if self._closing:
                    self._change.notify_all()

    def submit(self, image: Tensor, statistics: str) -> Future[Answer]:
        """Queue an image. Cancelling the future removes it."""
        call = Call(image, statistics)
        call.future.add_done_callback(lambda future: self._withdraw(call) if future.cancelled() else None)
        with self._change:
            self._calls.append(call)
            self._noted()
            # A request that got this queue just before it was closed is still served.
            if not self._threads:
                self._start()
        return call.future

    def close(self) -> None:
        """Let the threads end after every request with a place is served."""
        with self._change:
            self._closing = True
            self._noted()

    def join(self, seconds: float) -> None:
        """Wait for the threads to end, with a time limit."""
        until = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"engine of {self.name}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while batch := self._next_batch():
            waiting = [call for call in batch if call.future.set_running_or_notify_cancel()]
            if waiting:
                self._answer(waiting)

    def _next_batch(self) -> list[Call]:
        """Images of one mode, oldest first; none if the queue is closed and empty."""
        with self._change:
            while True:
                batch = [call for call in self._calls if call.statistics == self._calls[0].statistics][: self.max_batch]
                if not batch and self._closing and not self.admitted:
                    self._threads.remove(threading.current_thread())
                    return []
                left = batch[0].entered + self.max_wait - time.perf_counter() if batch else None
                if left is not None and (left <= 0 or len(batch) == self.max_batch or self._closing):
                    for call in batch:
                        self._calls.remove(call)
                    self._noted()
                    return batch
                self._change.wait(left)

    def _answer(self, batch: list[Call]) -> None:
        begun = time.perf_counter()
        statistics = batch[0].statistics
        try:
            images = torch.stack([call.image for call in batch]) if len(batch) > 1 else batch[0].image[None]
            scores = self.run(images, statistics)
        # Even SystemExit, which would end the thread.
        except BaseException as error:
            if len(batch) > 1:
                # One by one, so that one image does not affect the others.
                for call in batch:
                    self._answer([call])
            elif isinstance(error, BknZooError):
                batch[0].future.set_exception(of_the_image(error))
            else:
                log.exception("an image failed", extra={"model": self.name, "request_id": batch[0].request})
                batch[0].future.set_exception(ServiceError("internal", FAILED))
            return
        seconds = time.perf_counter() - begun
        self._seconds_per_image = 0.9 * self._seconds_per_image + 0.1 * seconds / (len(batch) * self.threads)
        self.metrics.inference_seconds.labels(self.name, statistics).observe(seconds)
        self.metrics.batch_size.labels(self.name).observe(len(batch))
        for call, row in zip(batch, scores, strict=True):
            self.metrics.confidence.labels(self.name, statistics).observe(row.max().item())
            self.metrics.queue_seconds.labels(self.name).observe(begun - call.entered)
            call.future.set_result(Answer(row, begun - call.entered, seconds))

    def _withdraw(self, call: Call) -> None:
        with self._change:
            if call in self._calls:
                self._calls.remove(call)
                self._noted()

    def _noted(self) -> None:
        self._length.set(len(self._calls))
        self._change.notify_all()
