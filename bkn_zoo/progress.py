"""Shows progress on standard error: a bar in a terminal after two seconds, otherwise a line every half minute."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

PATIENCE = 2.0  # seconds before a bar appears
TICK = 0.2  # seconds between updates
EVERY = 30.0  # seconds between lines without a terminal


@contextmanager
def bar(total: int | None, what: str | None, unit: str = "", lines: bool = False) -> Iterator[Callable[..., None]]:
    """Progress of work in parts. Yields a function to call with the number of parts done since, and perhaps a note.

    Without a `total` only the elapsed time is shown, without `what` nothing, without a terminal `lines`, if true.
    """
    count, note, over = 0, "", threading.Event()

    def done(more: int, about: str = "") -> None:
        nonlocal count, note
        count, note = count + more, about

    def show() -> None:
        begun = time.monotonic()
        if not has_screen():
            while not over.wait(EVERY):
                spent = time.monotonic() - begun
                parts = f"{count:,} of {total:,}, {note}{note and ', '}" if total else ""
                left = f", about {spent * (total - count) / count:.0f} s to go" if total and count else ""
                print(f"{what}: {parts}{spent:.0f} s{left}", file=sys.stderr, flush=True)
        elif not over.wait(PATIENCE):
            from tqdm import tqdm

            form = None if total else "{desc}: {elapsed}"
            with tqdm(desc=what, total=total, unit=unit, bar_format=form, leave=False) as shown:
                shown.start_t -= PATIENCE
                while not over.wait(TICK):
                    shown.n = count
                    shown.set_postfix_str(note)

    # A thread, because one part may take any time.
    thread = threading.Thread(target=show, daemon=True)
    if what is not None and (sys.stderr.isatty() or (lines and speaks())):
        thread.start()
    try:
        yield done
    finally:
        over.set()
        if thread.ident:
            thread.join()


def waiting(what: str) -> AbstractContextManager[object]:
    """Progress of work without parts: shows the elapsed seconds."""
    return bar(None, what)


def has_screen() -> bool:
    """Whether standard error is a terminal in which a bar fits. The size of some is 0 x 0."""
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # it has no size
        return True


def speaks() -> bool:
    """Whether this is the first process of torchrun, which prints for all of them."""
    return int(os.environ.get("RANK", "0")) == 0


def say(line: str) -> None:
    """Print a line on standard error, above any bars."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
