"""What config.json says about a checkpoint: enough to rebuild the network, preprocess its images and judge it."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.files import read_json
from bkn_zoo.errors import CheckpointError, InputError
from bkn_zoo.fields import check, check_choice, check_fields, is_count, is_number
from bkn_zoo.modes import MODES
from bkn_zoo.preprocessing import Preprocessing

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Config:
    """One checkpoint, described.

    Attributes:
        format_version: of the folder's layout.
        architecture: the network's name in the registry.
        norm: the last part of that name.
        norm_options: what the norm was made with, as `create_model` takes it.
        num_classes: outputs of the classifier.
        statistics_batch_size: images per statistics group in training; None means the whole batch.
        default_statistics: the mode that serves a call which does not choose one.
        label_names: one per class, in the order of the outputs.
        preprocessing: how an image becomes the network's input.
        training: recipe and data, free-form.
        accuracy: per statistics mode, percentages such as {"top1": 71.2, "top5": 90.1}, measured on the stored weights.
        versions: of the libraries that wrote the checkpoint.
        sha256: of each file of weights; empty if it is not known.
    """

    format_version: int
    architecture: str
    norm: str
    norm_options: dict[str, Any]
    num_classes: int
    statistics_batch_size: int | None
    default_statistics: str
    label_names: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    training: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(is_count(self.format_version), "format_version", self.format_version, "a whole number of at least 1")
        valid = isinstance(self.architecture, str) and bool(self.architecture)
        check(valid, "architecture", self.architecture, "the name of a network")  # whether it exists, building it shows
        norm = self.architecture.rpartition("_")[2]
        check(self.norm == norm, "norm", self.norm, f"{norm!r}, the norm of {self.architecture}")
        check(is_count(self.num_classes), "num_classes", self.num_classes, "a whole number of at least 1")
        group = self.statistics_batch_size
        check(group is None or is_count(group), "statistics_batch_size", group, "a whole number of at least 1, or null")
        check_choice("default_statistics", self.default_statistics, MODES)
        valid = self.preprocessing is None or isinstance(self.preprocessing, Preprocessing)
        check(valid, "preprocessing", self.preprocessing, "a Preprocessing")
        for name in ("norm_options", "training", "versions", "sha256"):
            value = getattr(self, name)
            valid = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            check(valid, name, value, "an object with strings as keys")
        valid = all(isinstance(version, str) for version in self.versions.values())
        check(valid, "versions", self.versions, "a string for each library")
        valid = all(isinstance(digest, str) for digest in self.sha256.values())
        check(valid, "sha256", self.sha256, "a string for each file")
        self._check_labels()
        self._check_accuracy()

    def _check_labels(self) -> None:
        names = self.label_names
        if names is None:
            return
        valid = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        check(valid, "label_names", names, "a list of strings")
        if len(names) != self.num_classes:
            raise InputError(
                f"label_names holds {len(names)} names, but num_classes is {self.num_classes}: give one name per class."
            )
        object.__setattr__(self, "label_names", tuple(names))

    def _check_accuracy(self) -> None:
        check(
            isinstance(self.accuracy, dict), "accuracy", self.accuracy, "an object with one entry per statistics mode"
        )
        for mode, metrics in self.accuracy.items():
            check_choice("a key of accuracy", mode, MODES)
            valid = isinstance(metrics, dict) and all(is_number(x) and 0 <= x <= 100 for x in metrics.values())
            check(valid, f"accuracy.{mode}", metrics, 'percentages by name, such as {"top1": 71.2, "top5": 90.1}')

    def to_json(self) -> str:
        """The text of config.json."""
        try:
            text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"config.json cannot hold what was given: {error}; keep to plain finite values.") from None
        return text + "\n"

    @classmethod
    def read(cls, path: Path) -> "Config":
        """The config in a file, which must say everything it has to and nothing else."""
        data = read_json(path)
        version = data.get("format_version")
        if is_count(version) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version}, but this bkn_zoo reads up to {FORMAT_VERSION}: upgrade bkn_zoo."
            )
        try:
            check_fields(cls, data)
            if data.get("preprocessing") is not None:
                data["preprocessing"] = _parse_preprocessing(data["preprocessing"])
            return cls(**data)
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None


def _parse_preprocessing(data: Any) -> Preprocessing:
    check(isinstance(data, dict), "preprocessing", data, "an object or null")
    check_fields(Preprocessing, data, "preprocessing.")
    return Preprocessing(**data)
