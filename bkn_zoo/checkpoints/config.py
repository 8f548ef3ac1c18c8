"""What config.json says about a checkpoint: enough to rebuild the network, preprocess its images and judge it."""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from bkn_zoo.errors import CheckpointError, InputError
from bkn_zoo.models.registry import list_models
from bkn_zoo.norms.statistics import MODES

FORMAT_VERSION = 1
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the network's input.

    Attributes:
        size: height and width of the input.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, by which the difference is divided.
        native_size: height and width to which an image is brought first, where the training data had fewer pixels than
            the network's input; None means that it goes to `size` at once.
        interpolation: of every resize; one of `INTERPOLATIONS`.
    """

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    native_size: int | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("size", "native_size"):
            value = getattr(self, name)
            optional = value is None and name == "native_size"
            _check(optional or _is_count(value), f"preprocessing.{name}", value, "a whole number of at least 1")
        for name in ("mean", "std"):
            value = getattr(self, name)
            valid = isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))
            _check(valid, f"preprocessing.{name}", value, "three numbers")
            object.__setattr__(self, name, tuple(map(float, value)))
        _check(min(self.std) > 0, "preprocessing.std", self.std, "positive")
        _check_choice("preprocessing.interpolation", self.interpolation, INTERPOLATIONS)


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
        _check(_is_count(self.format_version), "format_version", self.format_version, "a whole number of at least 1")
        _check_choice("architecture", self.architecture, list_models())
        norm = self.architecture.rpartition("_")[2]
        _check(self.norm == norm, "norm", self.norm, f"{norm!r}, the norm of {self.architecture}")
        _check(_is_count(self.num_classes), "num_classes", self.num_classes, "a whole number of at least 1")
        group = self.statistics_batch_size
        _check(
            group is None or _is_count(group), "statistics_batch_size", group, "a whole number of at least 1, or null"
        )
        _check_choice("default_statistics", self.default_statistics, MODES)
        valid = self.preprocessing is None or isinstance(self.preprocessing, Preprocessing)
        _check(valid, "preprocessing", self.preprocessing, "a Preprocessing")
        for name in ("norm_options", "training", "versions", "sha256"):
            value = getattr(self, name)
            valid = isinstance(value, dict) and all(isinstance(key, str) for key in value)
            _check(valid, name, value, "an object with strings as keys")
        valid = all(isinstance(version, str) for version in self.versions.values())
        _check(valid, "versions", self.versions, "a string for each library")
        valid = all(isinstance(digest, str) for digest in self.sha256.values())
        _check(valid, "sha256", self.sha256, "a string for each file")
        self._check_labels()
        self._check_accuracy()

    def _check_labels(self) -> None:
        names = self.label_names
        if names is None:
            return
        valid = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        _check(valid, "label_names", names, "a list of strings")
        if len(names) != self.num_classes:
            raise InputError(
                f"label_names holds {len(names)} names, but num_classes is {self.num_classes}: give one name per class."
            )
        object.__setattr__(self, "label_names", tuple(names))

    def _check_accuracy(self) -> None:
        _check(
            isinstance(self.accuracy, dict), "accuracy", self.accuracy, "an object with one entry per statistics mode"
        )
        for mode, metrics in self.accuracy.items():
            _check_choice("a key of accuracy", mode, MODES)
            valid = isinstance(metrics, dict) and all(_is_number(x) and 0 <= x <= 100 for x in metrics.values())
            _check(valid, f"accuracy.{mode}", metrics, 'percentages by name, such as {"top1": 71.2, "top5": 90.1}')

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
        if _is_count(version) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version}, but this bkn_zoo reads up to {FORMAT_VERSION}: upgrade bkn_zoo."
            )
        try:
            _check_fields(cls, data)
            if data.get("preprocessing") is not None:
                data["preprocessing"] = _parse_preprocessing(data["preprocessing"])
            return cls(**data)
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file."""
    remedy = "restore it from the original checkpoint"
    try:
        data = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, so its folder is no complete checkpoint: {remedy}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {remedy}.") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a JSON {type(data).__name__} instead of an object: {remedy}.")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _parse_preprocessing(data: Any) -> Preprocessing:
    _check(isinstance(data, dict), "preprocessing", data, "an object or null")
    _check_fields(Preprocessing, data, "preprocessing.")
    return Preprocessing(**data)


def _check_fields(cls: type, data: dict[str, Any], prefix: str = "") -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, known in fields.items():
        required = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise InputError(f"the field {prefix}{name} is missing: add it, as save_pretrained writes it.")
    for name in data:
        if name not in fields:
            raise InputError(
                f"the field {prefix}{name} is unknown: remove it, or upgrade bkn_zoo if a newer one wrote it."
            )


def _check(valid: bool, name: str, value: Any, wanted: str) -> None:
    if not valid:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InputError(f"{name} is {shown}, but must be {wanted}.")


def _check_choice(name: str, value: Any, choices: list[str] | tuple[str, ...]) -> None:
    _check(isinstance(value, str) and value in choices, name, value, f"one of {', '.join(choices)}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
