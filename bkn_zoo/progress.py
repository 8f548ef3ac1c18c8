"""Tells those who wait how far a thing is, on standard error: at a terminal after two seconds, or in rare lines."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0  # seconds that anybody waits without being told
TICK = 0.2  # and between what they are told
EVERY = 30.0  # seconds between lines, where no terminal shows a bar


@contextmanager
def bar(total: int | None, what: str, unit: str, lines: bool = False) -> Iterator[Callable[[int], object]]:
    """For what has parts; gives what to call with the number of those that were done since the last call.

    With `lines`, a line is printed every half minute where there is no terminal.
    """
    count = 0

    def done(more: int) -> None:
        nonlocal count
        count += more

    with _shown(lambda: count, lines, desc=what, total=total, unit=unit, unit_scale=unit == "B"):
        yield done


@contextmanager
def bars_like(theirs: Any) -> Iterator[Any]:
    """For a library that takes a class of bars, given its own: they are as patient as ours, and gone in the end."""
    made: list[Any] = []

    class Patient(theirs):
        def __init__(self, *args: Any, **options: Any) -> None:
            hidden = options.pop("disable", False) or not sys.stderr.isatty()
            super().__init__(*args, **options, disable=hidden, delay=PATIENCE, leave=False)
            made.append(self)

        def display(self, *args: Any, **options: Any) -> None:
            if time.monotonic() >= begun + PATIENCE:  # which the library may ask for at any time
                super().display(*args, **options)

    begun = time.monotonic()
    try:
        yield Patient
    finally:
        for shown in made:
            shown.close()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For what has no parts: the seconds that it has taken."""
    with _shown(lambda: 0, False, desc=what, bar_format="{desc}: {elapsed}"):
        yield


def speaks() -> bool:
    """Whether this process says what all know that torchrun started together: the first of them."""
    return int(os.environ.get("RANK", "0")) == 0


def say(line: str) -> None:
    """A line of its own on standard error, above whatever bars there are."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


@contextmanager
def _shown(count: Callable[[], int], lines: bool, **looks: Any) -> Iterator[None]:
    if not sys.stderr.isatty() and not (lines and speaks()):
        yield
        return
    over = threading.Event()
    # A thread, since one part may take as long as it likes.
    show = _show if sys.stderr.isatty() else _tell
    thread = threading.Thread(target=show, args=(count, over, looks), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(count: Callable[[], int], over: threading.Event, looks: dict[str, Any]) -> None:
    """Lines in a file, a pipe or a log."""
    begun = time.monotonic()
    while not over.wait(EVERY):
        done = f"{count():,} of {looks['total']:,}, " if looks.get("total") else ""
        print(f"{looks['desc']}: {done}{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _show(count: Callable[[], int], over: threading.Event, looks: dict[str, Any]) -> None:
    begun = time.monotonic()
    if over.wait(PATIENCE) and time.monotonic() < begun + PATIENCE:
        return
    from tqdm import tqdm

    with tqdm(**looks, leave=False) as shown:
        shown.start_t -= PATIENCE
        while True:
            shown.n = count()
            shown.refresh()
            if over.wait(TICK):
                return
