"""Types of options that several commands share."""

import argparse
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes one of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return read
