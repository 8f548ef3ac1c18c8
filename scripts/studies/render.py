"""Fills marked regions of Markdown pages with text and tables, and gives every table as CSV under results/tables/, too.

    <!-- begin: name -->
    a table, between blank lines
    <!-- end: name -->

A region may also be inside a line: "trained on <!-- begin: runs -->12<!-- end: runs --> runs". A single number names
the cell of a CSV file that it is rounded from, by the file, some cells of the row and the column:

    BN ends at <!--=results/headline|BN;60|2-->69.2<!--/--> %

Inside a table, ^ takes the place of |, which would end the cell.
The rest of a page is written by hand.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bkn_zoo.errors import InputError
from studies.base import DOCS, RESULTS, ROOT

MARKER = re.compile(r"<!-- (begin|end): ([\w.-]+) -->")
MARKS = re.compile(r"\*\*|`|\[(?=[^\]]*\]\()|\]\([^)]*\)")  # bold, code, and what surrounds the text of a link
NUMBER = re.compile(r"(<!--=([^|^>]+)[|^]([^|^>]+)[|^]([^|^>]+)-->)([^<]*)(?=<!--/-->)")
TABLES = RESULTS / "tables"

Part = str | pd.DataFrame
Content = Part | Sequence[Part]
"""What a region shows: text, a table, or several of them below each other."""


def frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table that keeps their values as they are."""
    return pd.DataFrame(list(rows), dtype=object)


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """A table as text: floats with three decimals, missing values as a dash."""

    def cell(value: Any) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and value != value):
            return "-"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    return table.map(cell)


def markdown(table: pd.DataFrame | Iterable[Mapping[str, Any]]) -> str:
    """A table in Markdown, without padding."""
    shown = cells(table if isinstance(table, pd.DataFrame) else frame(table))
    lines = [list(map(str, shown.columns)), ["---"] * len(shown.columns), *shown.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def comma_separated(table: pd.DataFrame) -> str:
    """A table as CSV, without the marks of Markdown."""
    plain = cells(table).replace(MARKS, "", regex=True).rename(columns=lambda name: MARKS.sub("", str(name)))
    return plain.to_csv(index=False, lineterminator="\n")


def rendered(pages: Mapping[Path, Mapping[str, Content]]) -> dict[Path, str]:
    """The text of every page and of the CSV file of every table.

    Args:
        pages: the content of each region by name, for each page. A path without .md stands for tables that no page
            shows, only CSV files do.
    """
    found: dict[Path, str] = {}
    for path, contents in pages.items():
        texts = {}
        for name, content in contents.items():
            parts = [content] if isinstance(content, str | pd.DataFrame) else list(content)
            texts[name] = "\n\n".join(markdown(part) if isinstance(part, pd.DataFrame) else part for part in parts)
            for number, table in enumerate((part for part in parts if isinstance(part, pd.DataFrame)), start=1):
                file = f"{name}.{number}.csv" if number > 1 else f"{name}.csv"
                found[TABLES / path.stem / file] = comma_separated(table)
        if path.suffix == ".md":
            found[path] = fill(path.read_text(encoding="utf-8"), texts, path.name)
    return found


def write(files: Mapping[Path, str]) -> None:
    """Write pages and CSV files, then the numbers of all pages."""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in pages():
        path.write_text(numbered(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")


def pages() -> list[Path]:
    """The pages that may contain numbers of records."""
    return [ROOT / "README.md", ROOT / "MODEL_CARD.md", *sorted(DOCS.glob("*.md"))]


def numbered(text: str, page: str = "the page") -> str:
    """The page with its numbers taken from the CSV files, with as many decimals as before.

    A number without a sign is the absolute value.

    Raises:
        InputError: a marker that fits no cell, or several.
    """

    def number(marker: re.Match[str]) -> str:
        file, row, column, shown = marker.group(2, 3, 4, 5)
        with (TABLES / f"{file}.csv").open(encoding="utf-8", newline="") as lines:
            found = [line for line in csv.DictReader(lines) if {*row.split(";")} <= {*line.values()}]
        if len(found) != 1 or not (value := re.match(r"[-+]?\d[\d,]*\.?\d*", found[0].get(column) or "")):
            raise InputError(f"{page}: {marker[1]} names {len(found)} rows, or a cell without a number.")
        exact, decimals = float(value[0].replace(",", "")), len(shown.partition(".")[2])
        return marker[1] + (f"{exact:+.{decimals}f}" if shown[:1] in "+-" else f"{abs(exact):.{decimals}f}")

    return NUMBER.sub(number, text)


def fill(text: str, contents: Mapping[str, str], page: str = "the page") -> str:
    """The page with the content of regions replaced; those that other scripts fill stay as they are.

    Args:
        text: the text of the page.
        contents: the content of each region, by name.
        page: the name of the page, for errors.

    Raises:
        InputError: content without a region, or a marker that is repeated or has no partner.
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
        names.append(name)
        if name not in contents:
            continue
        block = text[begin.end() :].startswith("\n")
        parts += [text[rest : begin.end()], f"\n\n{contents[name].strip()}\n\n" if block else contents[name]]
        rest = end.start()
    unused = [name for name in contents if name not in names]
    if unused:
        raise InputError(
            f"{page}: there is no region for {', '.join(unused)}; add <!-- begin: {unused[0]} --> and end."
        )
    return "".join([*parts, text[rest:]])
