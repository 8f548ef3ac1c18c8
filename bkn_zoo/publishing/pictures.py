"""Pictures of an evaluation: a confusion matrix, and the most confident mistakes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.images import open_image
from bkn_zoo.training.datasets import FileImages, Images
from bkn_zoo.training.evaluation import measure_accuracy, show_top1

MOST_CLASSES = 30  # so that names are readable
SHEET = (4, 6)  # rows and columns of mistakes
LETTERS = 20  # most letters of a label


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("pictures need matplotlib: install it with pip install 'bkn-zoo[train]'.") from None


def draw(
    folder: Path, images: Images, logits: Tensor, labels: Tensor, names: Sequence[str], title: str
) -> tuple[Path, Path]:
    """Write confusion.png and mistakes.png. Files that could not be read have no row in `logits` and `labels`."""
    scores, found = logits.softmax(1).cpu().max(1)
    accuracy, labels = show_top1(measure_accuracy(logits, labels)), labels.cpu()
    right = int((found == labels).sum())
    title = f"{title}\n{right:,} of {len(labels):,} right: {accuracy}"
    paths = folder / "confusion.png", folder / "mistakes.png"
    counts = (labels * len(names) + found).bincount(minlength=len(names) ** 2).view(len(names), -1)
    confusion(counts.numpy(), names, title).savefig(paths[0], dpi=130, bbox_inches="tight")
    sure = scores.masked_fill(found == labels, -1.0).argsort(descending=True, stable=True)
    wrong = sure[: min(SHEET[0] * SHEET[1], len(labels) - right)].tolist()
    sheet = [(*_picture(images, k), names[int(labels[k])], names[int(found[k])], float(scores[k])) for k in wrong]
    mistakes(sheet, title).savefig(paths[1], dpi=130, bbox_inches="tight")
    return paths


def confusion(counts: np.ndarray, names: Sequence[str], title: str) -> Any:
    """A confusion matrix, in percent of each row; of many classes those with most mistakes, and all other classes."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    chosen = np.sort(np.argsort(-errors, kind="stable")[:MOST_CLASSES])
    percent = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    shown = percent[np.ix_(chosen, chosen)]
    columns = [_label_text(names[k]) for k in chosen]
    if len(chosen) < len(names):
        shown = np.concatenate([shown, 100 - shown.sum(1, keepdims=True)], axis=1)
        columns.append("any other")
        title += f"\nthe {len(chosen)} of {len(names)} classes that are confused most"
    side = 2.5 + 0.3 * max(len(chosen), 8)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    # The square root makes a confusion of a few percent visible beside a diagonal of a hundred.
    drawn = axes.imshow(shown, cmap="Blues", norm=PowerNorm(0.5, 0, 100), aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.set_yticks(range(len(chosen)), columns[: len(chosen)])
    axes.set(xlabel="taken for", ylabel="is")
    figure.suptitle(title, fontsize=10)
    figure.colorbar(drawn, label="percent of the class", ticks=[0, 1, 5, 10, 25, 50, 75, 100], shrink=0.8)
    return figure


def mistakes(shown: Sequence[tuple[Image.Image, str, str, str, float]], title: str) -> Any:
    """A contact sheet with image, file name, true class, predicted class and its probability."""
    from matplotlib.figure import Figure

    rows = max(1, -(-len(shown) // SHEET[1]))
    figure = Figure(figsize=(2.0 * SHEET[1], 0.6 + 2.5 * rows), layout="constrained")
    told = "the most confident mistakes: true class in green, predicted class in red"
    figure.suptitle(f"{title}\n{told if shown else 'no mistakes'}", fontsize=11)
    for axes in figure.subplots(rows, SHEET[1], squeeze=False).flat:
        axes.axis("off")
    for axes, (image, file, name, taken_for, score) in zip(figure.axes, shown, strict=False):
        axes.imshow(image, interpolation="nearest")
        axes.set_title(f"{_label_text(name)}\n", fontsize=9, color="darkgreen")
        look: dict[str, Any] = {"transform": axes.transAxes, "ha": "center"}
        axes.text(0.5, 1.03, f"{_label_text(taken_for)}, {100 * score:.0f} %", fontsize=9, color="firebrick", **look)
        axes.text(0.5, -0.04, _label_text(file), va="top", fontsize=7, color="grey", **look)
    return figure


def _picture(images: Images, row: int) -> tuple[Image.Image, str]:
    """A small version of the image of a row of the logits, and its file name."""
    if isinstance(images, FileImages):
        path = [path for path in images.paths if path not in images.unreadable][row]
        image = open_image(path)
        image.thumbnail((256, 256))
        return image, path.name
    return Image.fromarray(images.images[row].permute(1, 2, 0).cpu().numpy()), f"number {row}"


def _label_text(text: str) -> str:
    """Shortened text, escaped so that matplotlib does not parse it as mathematics."""
    text = text if len(text) <= LETTERS else f"{text[: LETTERS // 2]}…{text[-LETTERS // 2 + 1 :]}"
    return text.replace("$", r"\$")
