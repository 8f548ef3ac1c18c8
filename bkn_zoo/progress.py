"""Tells those who wait how far a thing is: on standard error, after two seconds, and only where that is a terminal."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0  # seconds that anybody waits without being told


@contextmanager
def bar(total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
    """For what has parts; gives what to call with the number of those that were done since the last call."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from tqdm import tqdm

    scaled = unit == "B"
    with tqdm(total=total, desc=what, unit=unit, unit_scale=scaled, delay=PATIENCE, leave=False) as shown:
        yield shown.update


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
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(what: str, over: threading.Event) -> None:
    if over.wait(PATIENCE):
        return
    from tqdm import tqdm

    with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False) as shown:
        shown.start_t -= PATIENCE
        while not over.wait(0.5):
            shown.refresh()
