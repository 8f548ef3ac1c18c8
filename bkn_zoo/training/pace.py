"""Estimates the time of a training: after its first steps, and every 30 seconds without a terminal."""

import sys
import time
from typing import Any

from bkn_zoo.progress import EVERY

FIRST_STEPS = 3  # after a first step that also prepares things
LONG = 300.0  # seconds after which a shorter training is suggested


class Pace:
    """Counts the steps of one process.

    Args:
        write: prints a line.
        start: the first step of this process.
        steps: number of steps of the whole training.
        extra: time of validation, as a share of the time of an epoch's steps.
        advice: how to shorten a long training; may be empty.
    """

    def __init__(self, write: Any, start: int, steps: int, extra: float, advice: str) -> None:
        self.write, self.steps, self.extra, self.advice = write, steps, extra, advice
        self.start = self.step = start
        self.begun = self.told = time.monotonic()

    def after_step(self, loss: str) -> None:
        """Count a step; `loss` is the last known loss."""
        self.step += 1
        now = time.monotonic()
        if self.step == self.start + 1:
            self.begun = now
        elif self.step == self.start + 1 + FIRST_STEPS:
            total = self._left(self.steps - self.start)
            if total > EVERY:
                self.write(f"about {shown(total)} for all epochs{self._advice(total)}")
        if not sys.stderr.isatty() and now > self.told + EVERY and self.step > self.start + 1:
            left = self._left(self.steps - self.step)
            told = f"step {self.step} of {self.steps}{loss and f', loss {loss}'}, about {shown(left)} to go"
            self.write(f"{told}{self._advice(left)}")
            self.told = now

    def _advice(self, seconds: float) -> str:
        """The advice, once and only for a long training. Slow steps are reported before the first estimate."""
        if not self.advice or seconds <= LONG:
            return ""
        advice, self.advice = self.advice, ""
        return f"; {advice}"

    def _left(self, steps: int) -> float:
        taken = time.monotonic() - self.begun
        return (1 + self.extra) * steps * taken / (self.step - self.start - 1)


def shown(seconds: float) -> str:
    """A duration as text."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
