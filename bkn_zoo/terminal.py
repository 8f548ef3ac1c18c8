"""Text from strangers (labels, file names, fields of a config) as a terminal may show it."""

import unicodedata


def printable(text: object) -> str:
    """Text on one line, in which characters that a terminal would obey rather than show are escaped.

    These are control characters, such as those that move the cursor or set the window's title, line breaks, and
    invisible ones that change the order of others. All letters and spaces stay as they are.
    """
    return "".join(
        letter if letter.isprintable() or unicodedata.category(letter) == "Zs" else _escaped(letter)
        for letter in str(text)
    )


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
