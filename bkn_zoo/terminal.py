"""What every command needs: a parser of options, and text that is safe for a terminal."""

import argparse
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn

from bkn_zoo.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """Keeps line breaks in examples, accepts underscores instead of dashes in options, and suggests close matches."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse these words. An error prints the usage and ends the process."""
        found, unknown = self.parse_known_intermixed_args([with_dashes(word) for word in words])
        if unknown:
            close = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")
        return found

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        choices = [str(choice) for action in self._actions for choice in action.choices or ()]
        super().error(message + (did_you_mean(wrong[1], choices) if wrong else ""))


def with_dashes(word: str) -> str:
    """Replace underscores in the name of an option by dashes; other words, and the value after "=", stay the same."""
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else word


def printable(text: object) -> str:
    """The text on one line, with escaped control characters, which could change or hide what a terminal shows."""
    kept = (letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in str(text))
    return "".join(letter if keep else ascii(letter)[1:-1] for letter, keep in zip(str(text), kept, strict=True))
