"""Marked regions of a Markdown page, which scripts fill with tables and numbers. The rest of a page is written by hand.

    <!-- begin: name -->
    a table, between blank lines
    <!-- end: name -->

A region may also be inside a line: "trained on <!-- begin: runs -->12<!-- end: runs --> runs".
"""

import re
from collections.abc import Mapping
from pathlib import Path

from bkn_zoo.errors import InputError

MARKER = re.compile(r"<!-- (begin|end): ([\w.-]+) -->")


def fill(text: str, contents: Mapping[str, str], page: str = "the page") -> str:
    """The page with the content of every region replaced.

    Args:
        text: the text of the page.
        contents: the content of each region, by name.
        page: the name of the page, for errors.

    Raises:
        InputError: a region without content, content without a region, or a marker that is repeated or has no partner.
    """
    parts, rest, names = [], 0, []
    markers = list(MARKER.finditer(text))
    for begin, end in zip(markers[::2], [*markers[1::2], None], strict=False):
        name = begin[2]
        if begin[1] != "begin" or end is None or (end[1], end[2]) != ("end", name):
            raise InputError(
                f"{page}: marker {begin[0]} has no partner; a region is <!-- begin: x --> <!-- end: x -->."
            )
        if name in names:
            raise InputError(f"{page}: the region {name} occurs twice; rename one of them.")
        if name not in contents:
            raise InputError(f"{page}: no script fills the region {name}; remove it, or fill it in the page's script.")
        names.append(name)
        block = text[begin.end() :].startswith("\n")
        parts += [text[rest : begin.end()], f"\n\n{contents[name].strip()}\n\n" if block else contents[name]]
        rest = end.start()
    unused = [name for name in contents if name not in names]
    if unused:
        raise InputError(
            f"{page}: there is no region for {', '.join(unused)}; add <!-- begin: {unused[0]} --> and end."
        )
    return "".join([*parts, text[rest:]])


def filled(path: Path, contents: Mapping[str, str]) -> str:
    """The text of a page with the contents of its regions replaced."""
    return fill(path.read_text(encoding="utf-8"), contents, path.name)
