"""Signals that stop a training: after the step that is under way, or at once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Stopped(SystemExit):
    """A training that a signal stopped, with its state saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Interruption:
    """SIGINT and SIGTERM, noted, to be acted on after the step that is under way; a second SIGINT is not put off.

    Attributes:
        received: the signal; 0 for none.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.received = 0

    def note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            self.before(number, frame)
        self.received = number
        if number == signal.SIGINT and not self.quiet:
            with suppress(OSError):  # not print, whose buffer may be in use where the signal came
                os.write(2, b"\nstopping after this step, or this validation; Ctrl-C once more stops at once\n")

    @contextmanager
    def awaited(self) -> Iterator[None]:
        earlier = signal.getsignal(signal.SIGINT)
        self.before = earlier if callable(earlier) else signal.default_int_handler
        with handled(self.note, signal.SIGINT, signal.SIGTERM):
            yield


@contextmanager
def handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Within it, signals go to the handler, but for those that are ignored, as of a process in the background."""
    before: dict[int, Any] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                with suppress(ValueError):  # not the main thread, which alone may set handlers
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave_signals_to_parent(_: int = 0) -> None:
    """For a process that helps another: Ctrl-C goes to both, and the other says when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_group(_: int = 0) -> None:
    """For one that ends by itself once the other is gone: no signal to the other's whole group reaches it."""
    leave_signals_to_parent()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)
