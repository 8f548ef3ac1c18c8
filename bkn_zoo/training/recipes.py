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

# Short names of precisions, as in inference
PRECISIONS = {"bf16": "bfloat16", "f32": "float32"}
# Names of fields in recipes of earlier versions
EARLIER_NAMES = {"statistics_batch": "statistics_batch_size"}
BetweenZeroAndOne = Annotated[float, Rule(lambda value: 0 < value < 1, "a number between 0 and 1")]
BelowOne = Annotated[float, Rule(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")]


@dataclass(frozen=True)
class Augmentation:
    """How training images are augmented. Every range is symmetric, and zero disables it.

    Attributes:
        crop: shift by up to this share of the side (the padded random crop of CIFAR)
        scale: smallest share of the area that a random part keeps; 1 keeps all
        rotate: degrees
        colour: brightness, contrast and saturation, each by a factor within 1 +- this
        flip: mirror half of the images
        erase: side of a square that is blanked, as a share of the image's side
        mixup: alpha of its Beta distribution; with cutmix, each is used for half of the batches
        cutmix: alpha of its Beta distribution
        policy: RandAugment or TrivialAugment (wide) of torchvision, before all of the above; None is neither
    """

    crop: Annotated[float, Rule(lambda value: 0 <= value <= 0.5, "a number from 0 to 0.5, half of the side")] = 0.0
    scale: Annotated[float, Rule(lambda value: 0 < value <= 1, "a number above 0, up to 1")] = 1.0
    rotate: Amount = 0.0
    colour: Amount = 0.0
    flip: bool = True
    erase: Annotated[float, Rule(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")] = 0.0
    mixup: Amount = 0.0
    cutmix: Amount = 0.0
    policy: Annotated[str, one_of("randaugment", "trivialaugment")] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "augmentation.")


@dataclass(frozen=True)
class Recipe:
    """Everything that a training depends on except the data. recipes/ has one TOML file per recipe.

    Attributes:
        model: the network: one of bkn_zoo.list_models(), torchvision:NAME or timm:NAME
        dataset: the kind of data set: folder (a folder of images for each class), cifar10, cifar100, tiny_imagenet
        epochs: passes over the training images; to fine-tune, 0 fits only the classifier, and without a recipe there
            are more if there are few images
        gradient_batch: images per optimizer step, over all processes
        statistics_batch_size: images per statistics group (the images that are normalized together); None is all that
            a process holds at a time
        micro_batch: images per forward pass, if a batch does not fit; None is all at once
        size: side of the network's input in pixels; None is the data set's or the checkpoint's
        train_size: the same in training, if different; random crops enlarge objects, a smaller input compensates for
            that (Touvron et al. 2019)
        validation: share of the training images to hold out for validation, if the data set has no validation images
        optimizer: how weights are updated; sgd has Nesterov momentum
        lr: highest learning rate
        momentum: of sgd
        weight_decay: of the weights, not of norms and biases
        schedule: how the learning rate falls after the warm-up: linearly or by a cosine
        warmup: share of the steps in which the learning rate rises
        label_smoothing: share of the target that is spread over all classes
        balance: weigh images in the loss so that all classes count the same, however many images they have
        ema: decay per step of averaged weights, which are evaluated and saved; 0 is none
        kalman_lr: learning rate of the transition A, process noise R and gain q, relative to the others'
        clip: largest norm of the gradient; 0 is no limit
        precision: of the network's arithmetic: f32 or bf16 (autocast); float32 and bfloat16 mean the same; a CPU
            without bf16 uses f32
        keep: weights of the last epoch, or of the best: the last whose validation loss is about the lowest
        patience: epochs without a lower validation loss after which the training ends, but not before half of the
            steps and the warm-up are done, and without counting the classifier's first phase; None is never
        freeze: train the classifier only (true), or keep this share of the layers, from the input on, as they are
        graph: replay steps from a CUDA graph
        compile: run the network through torch.compile
        seed: of weights, order and augmentation
        norm_options: options of the network's norms, as bkn_zoo.create_model takes them
        augmentation: how training images are augmented
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
    balance: bool = False
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


def renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe with today's names."""
    return {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}


def find_recipe(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe, by its path or, in a checkout, by its name in recipes/."""
    named = SOURCE_TREE / f"{os.fspath(recipe)}.toml"
    return named if named.is_file() and not Path(recipe).is_file() else Path(recipe)


def read_recipe(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Recipe:
    """A recipe from its file, with `overrides` (augmentation's and norm_options' by dotted names) on top."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = tomllib.loads(Path(path).read_text())
        except OSError as error:
            close = did_you_mean(Path(path).stem, (file.stem for file in SOURCE_TREE.glob("*.toml")))
            remedy = f"pass a recipe file, or the name of one in recipes/{close}"
            raise InputError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
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
