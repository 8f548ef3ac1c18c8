"""Signals that stop a training, after the current step or at once."""

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


@contextmanager
def noted(quiet: bool = False) -> Iterator[list[int]]:
    """Yields a list to which SIGINT and SIGTERM are added, so that the current step is done. A second SIGINT acts."""
    received: list[int] = []
    earlier = signal.getsignal(signal.SIGINT)
    at_once = earlier if callable(earlier) else signal.default_int_handler

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received[-1:] == [signal.SIGINT]:
            at_once(number, frame)
        received.append(number)
        if number == signal.SIGINT and not quiet:
            with suppress(OSError):  # not print, because the signal may have interrupted a print
                os.write(2, b"\nstopping after this step or validation; press Ctrl-C again to stop at once\n")

    with handled(note, signal.SIGINT, signal.SIGTERM):
        yield received


@contextmanager
def handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Send signals to the handler, except ignored ones, as in a background process."""
    before: dict[int, Any] = {}
    try:
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                with suppress(ValueError):  # only the main thread may set handlers
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave_signals_to_parent(_: int = 0) -> None:
    """Ignore Ctrl-C in a helper process. It also reaches the main process, which decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_group(_: int = 0) -> None:
    """Leave the process group of the main process, whose signals must not reach this helper. It ends by itself."""
    leave_signals_to_parent()
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)
