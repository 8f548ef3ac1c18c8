"""What a command can find out before its work begins, rather than after hours."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from bkn_zoo.errors import InputError


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes one of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read


def make_folder(folder: Path) -> None:
    """Make one that results are to go to, and those above."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made for the results ({error.strerror}): name another place.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} may not be written to: name another place for the results.")


def lock(file: IO[bytes], taken: str) -> None:
    """Hold an open file until it is closed; where another process does, the error says `taken`."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(taken) from None
    except (ImportError, OSError):  # Windows, and file systems that have no locks
        pass
