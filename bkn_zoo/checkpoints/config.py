"""config.json of a checkpoint: everything needed to rebuild the network, preprocess images and judge its accuracy."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from bkn_zoo.checkpoints.files import read_json
from bkn_zoo.errors import CheckpointError, InputError, counted
from bkn_zoo.fields import Count, Rule, check_fields, is_number, make, one_of, refuse
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.modes import MODES

FORMAT_VERSION = 1

Mode = Annotated[str, one_of(*MODES)]
Percentage = Annotated[float, Rule(lambda value: 0 <= value <= 100, "a percentage, 0 to 100")]
Probability = Annotated[float, Rule(lambda value: 0 <= value <= 1, "a probability, 0 to 1")]


def norm_of(architecture: str) -> str:
    """The norm in the name of a network."""
    return "bkn" if ":" in architecture else architecture.rpartition("_")[2]


@dataclass(frozen=True)
class Config:
    """The description of one checkpoint.

    Attributes:
        norm: the last part of the architecture's name; "bkn" for a converted network.
        norm_options: options of the norm, or of the library's network, as in `create_model`.
        statistics_batch_size: images per statistics group in training; None means the whole batch.
        default_statistics: the mode of calls that do not choose one.
        label_names: one per class, in the order of the outputs.
        accuracy: per statistics mode, percentages such as {"top1": 71.2, "top5": 90.1}, measured on the stored weights.
        uncertain_below: per statistics mode, the probability that 95 % of the correct answers on held-out images reach.
        sha256: SHA-256 of each file of weights; empty if unknown.
    """

    format_version: Count
    architecture: str  # checked when the network is built
    norm: str
    norm_options: dict[str, Any]
    num_classes: Count
    statistics_batch_size: Count | None
    default_statistics: Mode
    label_names: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    training: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[Mode, dict[str, Percentage]] = field(default_factory=dict)
    uncertain_below: dict[Mode, Probability] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        norm = norm_of(self.architecture)
        if self.norm != norm:
            refuse("norm", self.norm, f"{norm!r}, the norm of {self.architecture}")
        if self.label_names is not None:
            if len(self.label_names) != self.num_classes:
                raise InputError(
                    f"label_names has {counted(len(self.label_names), 'name')}, but num_classes is {self.num_classes}: "
                    "give one name per class."
                )
            object.__setattr__(self, "label_names", tuple(self.label_names))

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the training; empty if `training`, which is free-form, has none."""
        recipe = self.training.get("recipe")
        return recipe if isinstance(recipe, dict) else {}

    @property
    def top1(self) -> float | None:
        """The accuracy in the default mode; None if it was not measured."""
        return self.accuracy.get(self.default_statistics, {}).get("top1")

    @property
    def on_validation(self) -> bool:
        """Whether the accuracy was measured on the validation images, because there were no others."""
        return self.training.get("test_images") == "validation"

    @property
    def measured_on(self) -> str | None:
        """The images of the accuracy, if they are not the test images of the data set."""
        if self.on_validation:
            return "validation images, which also chose the epoch and the mode"
        return self.training.get("measured_on")

    @property
    def dataset(self) -> Any:
        """The data set of the training, as its recipe names it; None if nothing is said of it."""
        return self.recipe.get("dataset", self.training.get("dataset"))

    def for_classes(self, num_classes: int) -> "Config":
        """The config of the same network with a new classifier: without labels, training, accuracy and weights."""
        empty: dict[str, Any] = {name: {} for name in ("training", "accuracy", "uncertain_below", "sha256")}
        return dataclasses.replace(self, num_classes=num_classes, label_names=None, **empty)

    def to_json(self) -> str:
        """The text of config.json."""
        try:
            text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"config.json cannot store these values ({error}): use plain, finite values.") from None
        return text + "\n"

    @classmethod
    def read(cls, path: Path) -> "Config":
        """Read and check the config in a file. Unknown fields cause a warning."""
        data = read_json(path)
        version = data.get("format_version")
        if is_number(version) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version}, but this bkn_zoo reads up to {FORMAT_VERSION}: upgrade bkn_zoo."
            )
        try:
            return make(cls, data, newer=str(path))
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None
