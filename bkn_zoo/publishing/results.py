"""What every file under results/ says about itself: the command, the hardware, the versions, the seed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.provenance import environment


def write_record(path: Path, text: str) -> None:
    """A run's file, whole or not at all: whoever finds it takes the run for done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text + "\n")
    os.replace(scratch, path)


def save_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """As PNG files; what has no figure (None) has no file either, nor keeps one of before.

    What is plotted is in the file, too, so that a test can hold the picture against the results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        figure.savefig(path, dpi=130, metadata={"Software": None, "Description": json.dumps(plotted(figure))})
        drawn.append(path)
    return drawn


def plotted(figure: Any) -> list[dict[str, Any]]:
    """What a figure shows: its words and, of each of its axes, words and values, rounded. Nothing is rendered."""
    import numpy as np
    from matplotlib.collections import LineCollection, PolyCollection

    def rounded(values: Any) -> Any:
        values = np.ma.filled(values)
        return (np.round(values, 3) if values.dtype.kind == "f" else values).tolist()

    found: list[dict[str, Any]] = [{"texts": [text.get_text() for text in figure.texts]}]
    for axes in figure.axes:
        words = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *axes.get_legend_handles_labels()[1]]
        words += [text.get_text() for text in axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            words += getattr(axis.get_major_formatter(), "seq", [])  # ticks that were given names
        spreads = [each for each in axes.collections if isinstance(each, LineCollection | PolyCollection)]
        found.append({
            "texts": words,
            "lines": [[rounded(line.get_xdata()), rounded(line.get_ydata())] for line in axes.lines],
            # Of a band or bar, its corners: in which order they are drawn is matplotlib's.
            "spreads": [
                sorted(map(list, {tuple(corner) for path in each.get_paths() for corner in rounded(path.vertices)}))
                for each in spreads
            ],
            "maps": [rounded(image.get_array()) for image in axes.images if image.get_array().ndim == 2],
        })  # fmt: skip
    return found


def write_results(path: Path, rows: list[dict[str, Any]], seed: int | None = None, **more: Any) -> None:
    """Write rows and the environment they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(seed), **more, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a Markdown table; floats with three decimals, missing fields as a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
