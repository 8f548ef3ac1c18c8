"""The recipe of a training on one's own images, where no recipe file is given."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bkn_zoo.training.origin import LIBRARY_SIZE, Origin
from bkn_zoo.training.recipes import Recipe

FINE_TUNING = {
    "dataset": "folder", "epochs": 5, "gradient_batch": 16, "optimizer": "adamw", "lr": 1e-4, "label_smoothing": 0.1,
    "ema": 0.97, "precision": "float32", "keep": "best", "patience": 3, "augmentation.crop": 0.1,
}  # fmt: skip
"""Defaults to fine-tune with; the checkpoint to start from and the number of images change some of them."""

FROM_SCRATCH = {
    "dataset": "folder", "epochs": 60, "gradient_batch": 16, "statistics_batch": 2, "lr": 0.05, "label_smoothing": 0.1,
    "augmentation.crop": 0.125,
}  # fmt: skip
"""Defaults for new weights: those of the CIFAR recipes, with a batch and a learning rate for fewer images."""

LEAST_STEPS, MOST_EPOCHS = 80, 25
"""A small data set is passed more often, until there are this many steps, but no more often than this.

With a handful of images an epoch is a single step, and its validation half as long.
"""

LEAST_STEPS_FROM_SCRATCH, MOST_EPOCHS_FROM_SCRATCH = 1000, 200
"""The same for new weights, which need more steps."""


def like(source: Origin, model: str | None) -> dict[str, Any]:
    """The fields of the recipe that the checkpoint to start from decides, given the `model` that the caller named."""
    config = source.config
    if config is None:
        return {"model": source.init, "size": LIBRARY_SIZE, "statistics_batch": None}
    size = {"size": config.preprocessing.size} if config.preprocessing else {}
    options = {f"norm_options.{name}": value for name, value in config.norm_options.items()}
    same = model in (None, config.architecture)
    groups = {"statistics_batch": config.statistics_batch_size}
    return {"model": config.architecture, **groups, **size, **(options if same else {})}


CPU_FREEZE = 0.67
"""Share of the layers that stay as they are on a CPU: those that see many pixels, which take most of the time."""


def fitted(recipe: Recipe, images: int, given: Mapping[str, Any], pretrained: bool = True, cpu: bool = False) -> Recipe:
    """The recipe for this many images: batches that they fill, groups that divide these, and enough steps.

    Fields in `given` stay as they are. On a CPU the lower layers of a pretrained network are frozen. The classifier of
    a frozen network is fitted before the first epoch: it needs no epochs.
    """
    batch = min(recipe.gradient_batch, 1 << images.bit_length() - 1)
    batch = recipe.gradient_batch if "gradient_batch" in given else batch
    fields: dict[str, Any] = {"gradient_batch": batch}
    least, most = (LEAST_STEPS, MOST_EPOCHS) if pretrained else (LEAST_STEPS_FROM_SCRATCH, MOST_EPOCHS_FROM_SCRATCH)
    enough = math.ceil(least / max(images // batch, 1))
    fields["freeze"] = CPU_FREEZE if cpu and pretrained else recipe.freeze
    fields["epochs"] = 0 if recipe.freeze is True and pretrained else max(recipe.epochs, min(enough, most))
    if recipe.statistics_batch is not None:
        fields["statistics_batch"] = math.gcd(recipe.statistics_batch, batch)
    return dataclasses.replace(recipe, **{name: value for name, value in fields.items() if name not in given})
