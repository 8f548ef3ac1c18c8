"""Recipes: everything that a training depends on except the data. This module does not import PyTorch."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bkn_zoo.errors import InputError, did_you_mean
from bkn_zoo.fields import Amount, Count, Rule, check_fields, make, one_of
from bkn_zoo.images.preprocessing import Side

SOURCE_TREE = Path(__file__).resolve().parents[2] / "recipes"

PRECISIONS = {"bf16": "bfloat16", "f32": "float32"}
"""Short names of precisions, as in inference."""

EARLIER_NAMES = {"statistics_batch": "statistics_batch_size"}
"""Names of fields in recipes and states of earlier versions."""

BetweenZeroAndOne = Annotated[float, Rule(lambda value: 0 < value < 1, "a number between 0 and 1")]
BelowOne = Annotated[float, Rule(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")]


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented. Every range is symmetric, and zero disables it.

    Attributes:
        crop: shift by up to this share of the side (the padded random crop of CIFAR).
        scale: smallest share of the area of a random crop; 1 disables it.
        rotate: degrees.
        colour: brightness, contrast and saturation, each by a factor within 1 +- this.
        flip: mirror half of the images.
        erase: side of a blank square, as a share of the image's side.
        mixup, cutmix: the alphas of their Beta distributions; if both are set, each is used for half of the batches.
    """

    crop: Annotated[float, Rule(lambda value: 0 <= value <= 0.5, "a number from 0 to 0.5, half of the side")] = 0.0
    scale: Annotated[float, Rule(lambda value: 0 < value <= 1, "a number above 0, up to 1")] = 1.0
    rotate: Amount = 0.0
    colour: Amount = 0.0
    flip: bool = True
    erase: Annotated[float, Rule(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")] = 0.0
    mixup: Amount = 0.0
    cutmix: Amount = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")


@dataclass(frozen=True)
class Recipe:
    """Everything that a training depends on except the data. recipes/ has one TOML file per recipe.

    Attributes:
        model, norm_options: arguments of `create_model`.
        dataset, size, validation: arguments of `load_data`.
        train_size: side of the network's input in training, if it is not `size`. Random crops enlarge objects; a
            smaller input compensates for that (Touvron et al. 2019), and is faster.
        epochs: passes over the training images. For fine-tuning, 0 trains only the classifier, on features that are
            computed once.
        gradient_batch: images per optimizer step, over all processes.
        statistics_batch_size: images per statistics group; None is all images of a pass.
        micro_batch: images per forward pass, if the gradient batch does not fit; None is all at once.
        optimizer: "sgd" (with Nesterov momentum) or "adamw".
        schedule: "one_cycle" (linear up, linear down) or "cosine" (linear up, cosine down).
        warmup: share of the steps in which the learning rate rises.
        ema: decay per step of the averaged weights that are evaluated and saved; 0 for none. Their running averages are
            averaged as well. At the end these are recomputed, if that is better on the validation images.
        kalman_lr: learning rate of A, R and q, relative to the other parameters.
        precision: "bfloat16" (autocast) or "float32"; "bf16" and "f32" are accepted, too.
        keep: the weights of the "last" epoch, or of the "best" one: the last epoch whose validation loss is within a
            standard error of the lowest. If the learning rate falls to zero over many epochs, the last weights are as
            good, and the choice adds no noise.
        patience: number of epochs without a lower validation loss after which a training ends; None is never.
        freeze: true trains only the classifier; a number is the share of layers, from the input on, that are frozen.
            In both cases, images are normalized as in the checkpoint.
        graph: replay steps from a CUDA graph.
        compile: run the network through torch.compile.
    """

    model: str
    dataset: str
    epochs: Annotated[int, Rule(lambda value: value >= 0, "a whole number of at least 0")]
    gradient_batch: Count
    statistics_batch_size: Count | None = None
    micro_batch: Count | None = None
    size: Side | None = None
    train_size: Side | None = None
    validation: BetweenZeroAndOne = 0.1
    optimizer: Annotated[str, one_of("sgd", "adamw")] = "sgd"
    lr: Amount = 0.1
    momentum: BetweenZeroAndOne = 0.9
    weight_decay: Amount = 5e-4
    schedule: Annotated[str, one_of("one_cycle", "cosine")] = "one_cycle"
    warmup: Annotated[float, Rule(lambda value: 0 <= value <= 1, "a share of the steps, 0 to 1")] = 0.2
    label_smoothing: BelowOne = 0.0
    ema: BelowOne = 0.0
    kalman_lr: Amount = 1.0
    clip: Amount = 0.0
    precision: Annotated[str, one_of("bfloat16", "float32")] = "bfloat16"
    keep: Annotated[str, one_of("last", "best")] = "last"
    patience: Count | None = None
    freeze: bool | BelowOne = False
    graph: bool = False
    compile: bool = False
    seed: Annotated[int, Rule(lambda value: value >= 0, "a whole number of at least 0")] = 0
    norm_options: dict[str, Any] = field(default_factory=dict)
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", PRECISIONS.get(self.precision, self.precision))
        check_fields(self)

    @property
    def statistics_batch(self) -> int | None:
        """The earlier name of `statistics_batch_size`."""
        return self.statistics_batch_size


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe with today's names."""
    return {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}


def find_recipe(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe, by its path or, in a checkout, by its name in recipes/."""
    named = SOURCE_TREE / f"{os.fspath(recipe)}.toml"
    return named if named.is_file() and not Path(recipe).is_file() else Path(recipe)


def read_recipe(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Recipe:
    """A recipe from its file, with `overrides` (augmentation's and norm_options' by dotted names) on top.

    In both, `statistics_batch` is the earlier name of `statistics_batch_size`.
    """
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = tomllib.loads(Path(path).read_text())
        except OSError as error:
            close = did_you_mean(Path(path).stem, (file.stem for file in SOURCE_TREE.glob("*.toml")))
            raise InputError(
                f"{path} cannot be read ({error.strerror}): pass a recipe file, or the name of one in recipes/{close}."
            ) from None
        except ValueError as error:  # invalid TOML or UTF-8
            raise InputError(f"{path} is not a recipe: {error}.") from None
    fields = renamed(fields)
    for name, value in renamed(overrides or {}).items():
        table, _, key = name.rpartition(".")
        (fields.setdefault(table, {}) if table else fields)[key] = value
    try:
        return make(Recipe, fields)
    except InputError as error:
        raise InputError(f"recipe{f' {path}' if path else ''}: {error}") from None
