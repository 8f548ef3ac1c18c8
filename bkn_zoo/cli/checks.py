"""What a command can find out before its work begins, rather than after hours."""

import argparse
from collections.abc import Callable
from pathlib import Path

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
