"""Shows progress on standard error: a bar in a terminal after two seconds, otherwise a line every half minute."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

PATIENCE = 2.0  # seconds before a bar appears
TICK = 0.2  # seconds between updates
EVERY = 30.0  # seconds between lines without a terminal


@contextmanager
def bar(total: int | None, what: str | None, unit: str, lines: bool = False) -> Iterator[Callable[[int], object]]:
    """Progress of work in parts. Yields a function to call with the number of parts done since the last call.

    Args:
        what: a description; None shows nothing.
        lines: whether a line is printed every half minute if there is no terminal.
    """
    count = 0

    def done(more: int) -> None:
        nonlocal count
        count += more

    with nullcontext() if what is None else _shown(lambda: count, lines, desc=what, total=total, unit=unit):
        yield done


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Progress of work without parts: shows the elapsed seconds."""
    with _shown(lambda: 0, False, desc=what, bar_format="{desc}: {elapsed}"):
        yield


def has_screen() -> bool:
    """Whether standard error is a terminal in which a bar fits. The size of some is 0 x 0."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # it has no size
        return True


def speaks() -> bool:
    """Whether this is the first process of torchrun, which prints for all of them."""
    return int(os.environ.get("RANK", "0")) == 0


def say(line: str) -> None:
    """Print a line on standard error, above any bars."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


@contextmanager
def _shown(count: Callable[[], int], lines: bool, **looks: Any) -> Iterator[None]:
    if not sys.stderr.isatty() and not (lines and speaks()):
        yield
        return
    over = threading.Event()
    # A thread, because one part may take any time.
    show = _show if has_screen() else _tell
    thread = threading.Thread(target=show, args=(count, over, looks), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(count: Callable[[], int], over: threading.Event, looks: dict[str, Any]) -> None:
    """Print lines of progress, for a file, a pipe or a log."""
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
