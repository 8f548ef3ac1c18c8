"""Draws docs/modes.png: what the three statistics modes do to one photograph, as it is and darkened.

python scripts/modes_figure.py
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageEnhance
from studies.figures import save_figures
from torch import Tensor

import bkn_zoo
from bkn_zoo.images import preprocess
from bkn_zoo.modes import MODES
from bkn_zoo.norms import BatchKalmanNorm2d

DOCS = Path(__file__).resolve().parent.parent / "docs"
CHECKPOINT = "inception_v2_bkn.tiny_imagenet"
LAYER, CHANNEL = 1, 5  # which norm and which of its channels to show
DARK = 0.3


def pass_through(model: Any, image: Image.Image, mode: str) -> tuple[Tensor, str]:
    """The normalized channel that is shown, and the likeliest label with its probability."""
    maps: list[Tensor] = []
    norm = [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d)][LAYER]
    hook = norm.register_forward_hook(lambda module, inputs, output: maps.append(output[0][0, CHANNEL]))
    config = model.config
    with torch.inference_mode():
        scores = model(preprocess(image, config.preprocessing)[None], statistics=mode)[0].softmax(0)
    hook.remove()
    best = int(scores.argmax())
    return maps[0], f"{config.label_names[best]}, {scores[best]:.2f}"


def figure() -> Any:
    """A row for each photograph: the photograph, then a channel of an early layer in each mode."""
    from matplotlib.figure import Figure

    model = bkn_zoo.from_pretrained(CHECKPOINT)
    photograph = Image.open(DOCS / "coffee.jpg").convert("RGB").crop((100, 0, 500, 400))
    rows = {"as it is": photograph, "darkened": ImageEnhance.Brightness(photograph).enhance(DARK)}
    drawn = Figure(figsize=(9, 5.2), layout="constrained")
    grid = drawn.subplots(2, 1 + len(MODES))
    for axes, (name, image) in zip(grid, rows.items(), strict=True):
        axes[0].imshow(image)
        axes[0].set_title(name, fontsize=11)
        for place, mode in zip(axes[1:], MODES, strict=True):
            features, answer = pass_through(model, image, mode)
            place.imshow(features.numpy(), cmap="gray", vmin=0, vmax=1.3)
            place.set_title(mode, fontsize=11)
            place.set_xlabel(answer, fontsize=11)
        for place in axes:
            place.set_xticks([])
            place.set_yticks([])
    return drawn


if __name__ == "__main__":
    save_figures({"modes": figure()}, DOCS)
