"""Draws the curves of a training."""

import math
import sys
from pathlib import Path
from typing import Any

from bkn_zoo.training.state import validation_loss


def draw_curves(path: Path, history: list[dict[str, Any]], kept: int, title: str) -> None:
    """Draw loss and accuracy of each epoch, and mark the epoch that is kept. Without matplotlib, print a line."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("no curves.png: install matplotlib with pip install 'bkn-zoo[train]'", file=sys.stderr)
        return
    epochs = [line["epoch"] for line in history]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    # The loss of epoch 0, a classifier alone, is without augmentation and smoothing: it does not compare.
    losses = [line["loss"] if line["epoch"] > 0 else math.nan for line in history]
    held = [validation_loss(line) for line in history]
    left.plot(epochs, losses, "o-", color="black", markersize=4, label="training")
    left.plot(epochs, held, "o--", color="C3", markersize=4, label="validation")
    highest = max((loss for loss in (*losses, *held) if math.isfinite(loss)), default=0) or 1
    left.set(ylabel="loss", ylim=(0, 1.05 * highest))  # space for the marker at the top
    left.legend(loc="upper right")
    # Modes often agree, so lower lines are drawn wider.
    looks = zip(history[-1]["validation"], ("C0", "C1", "C2"), (7, 4, 1.5), (11, 7, 4), strict=True)
    for mode, colour, width, marker in looks:
        lines = [line["validation"][mode] for line in history]
        right.plot(
            epochs, [m["top1"] for m in lines], "o-", color=colour, linewidth=width, markersize=marker, label=mode,
            solid_capstyle="round",
        )  # fmt: skip
        if all("top1_low" in m for m in lines):
            right.fill_between(
                epochs, [m["top1_low"] for m in lines], [m["top1_high"] for m in lines], color=colour, alpha=0.1
            )
    right.set(ylabel="validation top-1 (%), with 95 % intervals", ylim=(0, 104))
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.axvline(kept, color="grey", linestyle=":")
        axes.set(xlabel=f"epoch (dotted: {kept}, whose weights are kept)", xlim=(epochs[0] - 0.5, epochs[-1] + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
