"""Figures as PNG files that also store the plotted values, so that a test can compare them with the records."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def save_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write figures as PNG files. If a figure is None, an existing file is deleted.

    The file also stores the plotted values, so that a test can compare them with the results.
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
    """The content of a figure: its texts and, for each axes, texts and rounded values, without rendering."""
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
            words += getattr(axis.get_major_formatter(), "seq", [])  # ticks with names
        spreads = [each for each in axes.collections if isinstance(each, LineCollection | PolyCollection)]
        found.append({
            "texts": words,
            "lines": [[rounded(line.get_xdata()), rounded(line.get_ydata())] for line in axes.lines],
            # The corners of a band or bar, sorted, because their order depends on matplotlib.
            "spreads": [
                sorted(map(list, {tuple(corner) for path in each.get_paths() for corner in rounded(path.vertices)}))
                for each in spreads
            ],
            "maps": [rounded(image.get_array()) for image in axes.images if image.get_array().ndim == 2],
        })  # fmt: skip
    return found


def drawn(path: Path) -> list[dict[str, Any]]:
    """The values that a file was drawn from."""
    from PIL import Image

    return json.loads(Image.open(path).info["Description"])
