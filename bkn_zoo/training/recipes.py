"""All that a training depends on beside the data, read from a file and checked."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.training.augmentation import Augmentation


@dataclass(frozen=True)
class Recipe:
    """All that a training depends on, beside the data. One TOML file each under recipes/.

    Attributes:
        model, norm_options: as `create_model` takes them.
        dataset, size, validation: as `load_data` takes them.
        train_size: side of the network's input in training, where it is not `size`. Random parts are enlarged more than
            whole images are; a smaller one makes up for that (Touvron et al. 2019), and is faster.
        gradient_batch: images per optimizer step, over all processes.
        statistics_batch: images per statistics group; None is all that a process holds at a time.
        micro_batch: images per forward pass, where the gradient batch does not fit; None is all at once.
        optimizer: "sgd" (with Nesterov momentum) or "adamw".
        schedule: "one_cycle" (linear up, linear down) or "cosine" (linear up, cosine down).
        warmup: share of the steps that go up.
        ema: decay per step of the averaged weights that are evaluated and saved; 0 for none.
        kalman_lr: learning rate of A, R and q relative to the others'.
        precision: "bfloat16" (autocast) or "float32".
        graph: replay steps from a CUDA graph.
        compile: run the network through torch.compile.
    """

    model: str
    dataset: str
    epochs: int
    gradient_batch: int
    statistics_batch: int | None = None
    micro_batch: int | None = None
    size: int | None = None
    train_size: int | None = None
    validation: float = 0.1
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "one_cycle"
    warmup: float = 0.2
    label_smoothing: float = 0.0
    ema: float = 0.0
    kalman_lr: float = 1.0
    clip: float = 0.0
    precision: str = "bfloat16"
    graph: bool = False
    compile: bool = False
    seed: int = 0
    norm_options: dict[str, Any] = field(default_factory=dict)
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        _check_types(self)
        _check_types(self.augmentation, "augmentation.")
        choices = {"optimizer": ("sgd", "adamw"), "schedule": ("one_cycle", "cosine")}
        choices |= {"precision": ("bfloat16", "float32")}
        for name, allowed in choices.items():
            _check(getattr(self, name) in allowed, name, getattr(self, name), " or ".join(allowed))
        for name in ("epochs", "gradient_batch", "statistics_batch", "micro_batch", "size", "train_size"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "at least 1")
        for name in ("validation", "momentum"):
            _check(0 < getattr(self, name) < 1, name, getattr(self, name), "between 0 and 1")
        for name in ("label_smoothing", "ema"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        _check(0 <= self.warmup <= 1, "warmup", self.warmup, "a share of the steps, 0 to 1")
        for name in ("lr", "weight_decay", "kalman_lr", "clip", "seed"):
            _check(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "a number of at least 0")
        for name, value in dataclasses.asdict(self.augmentation).items():
            _check(0 <= value < math.inf, f"augmentation.{name}", value, "a number of at least 0")
        _check(self.augmentation.crop <= 0.5, "augmentation.crop", self.augmentation.crop, "at most half of the side")
        _check(self.augmentation.erase < 1, "augmentation.erase", self.augmentation.erase, "below 1, the whole side")
        _check(0 < self.augmentation.scale <= 1, "augmentation.scale", self.augmentation.scale, "above 0, up to 1")


def _check_types(settings: Any, prefix: str = "") -> None:
    instances: dict[Any, Any] = {float: int | float, dict[str, Any]: dict}  # for which isinstance has to ask
    for known in dataclasses.fields(settings):
        value = getattr(settings, known.name)
        valid = isinstance(value, instances.get(known.type, known.type))
        valid = valid and (known.type is bool or not isinstance(value, bool))  # which Python counts as a whole number
        kind = known.type.__name__ if isinstance(known.type, type) else str(known.type)
        _check(valid, prefix + known.name, value, f"of type {kind}")


def _check(valid: bool, name: str, value: Any, wanted: str) -> None:
    if not valid:
        raise InputError(f"recipe: {name} is {value!r}, but must be {wanted}.")


def read_recipe(path: str | Path | None, overrides: dict[str, Any] | None = None) -> Recipe:
    """A recipe from its file, with `overrides` (augmentation's and norm_options' by dotted names) on top."""
    fields: dict[str, Any] = {}
    if path is not None:
        try:
            fields = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}): name a recipe file.") from None
        except ValueError as error:  # of TOML, or of UTF-8
            raise InputError(f"{path} is not a recipe: {error}.") from None
    for name, value in (overrides or {}).items():
        table, _, key = name.rpartition(".")
        (fields.setdefault(table, {}) if table else fields)[key] = value
    try:
        augmentation = Augmentation(**fields.pop("augmentation", {}))
        return Recipe(**fields, augmentation=augmentation)
    except TypeError as error:
        raise InputError(f"recipe {path or ''}: {str(error).split('__init__() ')[-1]}.") from None
