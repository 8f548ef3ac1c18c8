"""Makes untrusted text (labels, file names, fields of a config) safe for a terminal."""

import unicodedata


def printable(text: object) -> str:
    """The text on one line, with escaped control characters.

    Control characters move the cursor, set the window's title, break lines, or invisibly change the order of other
    characters. Letters and spaces stay the same.
    """
    return "".join(
        letter if letter.isprintable() or unicodedata.category(letter) == "Zs" else _escaped(letter)
        for letter in str(text)
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
