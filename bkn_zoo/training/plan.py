"""The plan of a training, made before data are read and before PyTorch is imported: recipe, start, name and folders."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bkn_zoo.checkpoints.builders import of_library
from bkn_zoo.checkpoints.card import check_license
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import default_checkpoint, is_folder, locate
from bkn_zoo.errors import CheckpointError, InputError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.modes import MODES
from bkn_zoo.progress import speaks
from bkn_zoo.training.recipes import Recipe, find_recipe, read_recipe, renamed

# Valid names of runs, which are also names of folders, checkpoints and repositories
NAME = re.compile(r"[^\W_][\w.=-]*")
# Side of the images for a library's network, unless the recipe sets another size
LIBRARY_SIZE = 224
# Defaults to fine-tune with; the checkpoint to start from and the number of images change some of them
FINE_TUNING = {
    "dataset": "folder", "epochs": 5, "gradient_batch": 16, "optimizer": "adamw", "lr": 1e-4, "label_smoothing": 0.1,
    "ema": 0.97, "precision": "float32", "keep": "best", "patience": 3, "augmentation.crop": 0.1,
}  # fmt: skip
# Defaults for new weights: those of the CIFAR recipes, with a batch and a learning rate for fewer images
FROM_SCRATCH = {
    "dataset": "folder", "epochs": 60, "gradient_batch": 16, "statistics_batch_size": 2, "lr": 0.05,
    "label_smoothing": 0.1, "augmentation.crop": 0.125,
}  # fmt: skip
# A small data set is passed more often, until there are this many steps, but no more often than this
ENOUGH_STEPS = {"pretrained": (80, 25), "new": (1000, 200)}
# Share of the layers that stay as they are on a CPU: those that see many pixels, which take most of the time
CPU_FREEZE = 0.67


class Origin(NamedTuple):
    """A start: `init` is what the caller passed, `name` has no paths of this machine, and libraries have no config."""

    init: str
    name: str
    config: Config | None
    preprocessing: Preprocessing | None

    def fields(self, model: str | None) -> dict[str, Any]:
        """The fields of the recipe that the start decides, given the `model` that the caller named."""
        config = self.config
        if config is None:
            return {"model": self.init, "size": LIBRARY_SIZE, "statistics_batch_size": None}
        fields = {"model": config.architecture, "statistics_batch_size": config.statistics_batch_size}
        if config.preprocessing:
            fields["size"] = config.preprocessing.size
        if model in (None, config.architecture):
            fields |= {f"norm_options.{name}": value for name, value in config.norm_options.items()}
        return fields


def find_origin(init: str) -> Origin:
    """Find the start called `init`: a folder, a checkpoint's name, "owner/repo", "torchvision:NAME" or "timm:NAME"."""
    if of_library(init):
        from bkn_zoo.conversion.libraries import preprocessing_of

        return Origin(init, init, None, preprocessing_of(init, LIBRARY_SIZE))
    location = locate(init)
    config = Config.read(location.folder / CONFIG)
    name = location.folder.resolve().name if is_folder(init) else init
    if location.revision is not None:
        name = f"{init.partition('@')[0]}@{location.revision}"
    return Origin(init, name, config, config.preprocessing)


@dataclass(frozen=True)
class TrainingPlan:
    """A training that `bkn_zoo.training.run.carry_out` can start. Other fields are arguments of `bkn_zoo.train`.

    `given` are overrides by the caller, which `recipe` contains. With `fine_tuning` there was no recipe, so the number
    of images determines some fields. `source` is the start of the weights; None for new ones.
    """

    recipe: Recipe
    given: Mapping[str, Any]
    fine_tuning: bool
    source: Origin | None
    data: Path
    name: str
    output: Path
    results: Path
    device: str
    resume: bool = False
    workers: int = 0
    quiet: bool = False
    license: str | None = None
    statistics: Sequence[str] = MODES
    labels: Path | None = None
    log: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.output / self.name

    @property
    def record(self) -> Path:
        return self.results / f"{self.name}.json"

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)

    def introduce(self) -> None:
        start = f"starting from {self.source.name}" if self.source else "with new weights"
        self.say(f"training {self.recipe.model} on {self.data}, {start}")


def plan_training(
    recipe: str | os.PathLike[str] | Recipe | None,
    data: str | os.PathLike[str],
    overrides: Mapping[str, Any],
    *,
    init: str | os.PathLike[str] | None = None,
    name: str | None = None,
    output: str | os.PathLike[str] | None = None,
    results: str | os.PathLike[str] | None = None,
    device: Any = None,
    quiet: bool = False,
    license: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    log: str | None = None,
    **options: Any,
) -> TrainingPlan:
    """Read the recipe, find the start, and choose name and folders. Nothing is written.

    Without a recipe, `FINE_TUNING` or, if only a model is given, `FROM_SCRATCH` has the fields. `overrides` of nested
    fields have dotted names or are dictionaries. `options` are further fields of `TrainingPlan`.
    """
    check_license(license)
    if log not in (None, "tensorboard"):
        raise InputError(f"the logger {log!r} is unknown: choose tensorboard.")
    if log and find_spec(log) is None:
        raise InputError(f"{log} is not installed: run pip install {log}, or omit --log.")
    given = renamed(_flat(overrides))
    if recipe is None and init is None and "model" not in given:
        try:
            init = default_checkpoint()
        except CheckpointError:
            start = "add --checkpoint NAME (or a folder, or owner/repo on the Hub) to start from"
            raise InputError(
                f"there is nothing to train: {start}, --model NAME for new weights, or a recipe."
            ) from None
    source = None if init is None else find_origin(os.fspath(init))
    path = None
    if isinstance(recipe, Recipe):
        fields = _flat(dataclasses.asdict(recipe))
    elif recipe is not None:
        path, fields = find_recipe(recipe), {}
    else:
        fields = FINE_TUNING | source.fields(given.get("model")) if source else FROM_SCRATCH
    chosen = read_recipe(path, fields | given)
    if path is not None and "model" in given:
        chosen = _without_other_norms(chosen, given)
    root = Path(data)
    if not name:
        # The overrides are part of it, so that a variant does not replace the original run.
        told = (item for item in sorted(given.items()) if path is not None or item[0] != "model")
        base = f"{chosen.model}.{root.resolve().name}" if path is None else path.stem
        name = re.sub(r"[^\w.-]+", "_", base + "".join(f"-{field}_{value}" for field, value in told))
    if not NAME.fullmatch(name) or name == "results":
        rules = "use letters, digits and -_.=, begin with a letter or digit, and do not use results"
        raise InputError(f"{name!r} is not a valid name of a run: {rules}.")
    folder = Path("runs") / name if output is None else Path(output)
    return TrainingPlan(
        chosen, given, recipe is None, source, root, name, folder,
        results=folder / "results" / "runs" if results is None else Path(results),
        device="auto" if device is None else str(device), quiet=quiet or not speaks(), license=license,
        labels=None if labels is None else Path(labels), log=log, **options,
    )  # fmt: skip


def _without_other_norms(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """The recipe without options that it has for another norm than that of its model."""
    from bkn_zoo.models.registry import list_models, options_of

    if recipe.model not in list_models():
        return recipe
    known = options_of(recipe.model)
    kept = {k: v for k, v in recipe.norm_options.items() if k in known or f"norm_options.{k}" in given}
    return dataclasses.replace(recipe, norm_options=kept)


def adapted(
    recipe: Recipe, images: int, given: Mapping[str, Any], pretrained: bool = True, cpu: bool = False
) -> Recipe:  # fmt: skip
    """The recipe for this many images, except for fields in `given`: batches that they fill, groups, enough steps."""
    batch, group = recipe.gradient_batch, recipe.statistics_batch_size
    batch = batch if "gradient_batch" in given else min(batch, 1 << images.bit_length() - 1)
    least, most = ENOUGH_STEPS["pretrained" if pretrained else "new"]
    epochs = max(recipe.epochs, min(math.ceil(least / max(images // batch, 1)), most))
    fields: dict[str, Any] = {
        "gradient_batch": batch,
        "statistics_batch_size": group and math.gcd(group, batch),
        "freeze": CPU_FREEZE if cpu and pretrained else recipe.freeze,
        # The classifier of a frozen network is fitted before the first epoch.
        "epochs": 0 if recipe.freeze is True and pretrained else epochs,
    }
    return dataclasses.replace(recipe, **{name: value for name, value in fields.items() if name not in given})


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace dictionaries by dotted names, so that they override field by field."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
