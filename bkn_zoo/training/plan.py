"""The plan of a training, made before data are read and before PyTorch is imported."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bkn_zoo.checkpoints.card import check_license
from bkn_zoo.checkpoints.preferred import default_checkpoint
from bkn_zoo.errors import CheckpointError, InputError
from bkn_zoo.progress import speaks
from bkn_zoo.training.fine_tuning import FINE_TUNING, FROM_SCRATCH, like
from bkn_zoo.training.origin import Origin, find_origin
from bkn_zoo.training.recipes import Recipe, find_recipe, read_recipe

NAME = re.compile(r"[^\W_][\w.=-]*")
"""Valid names of runs, which are also names of folders, checkpoints and repositories."""


@dataclass(frozen=True)
class Plan:
    """A training that `bkn_zoo.training.run.carry_out` can start.

    Attributes:
        recipe: the recipe with all overrides; `given` are those of the caller.
        fine_tuning: whether there was no recipe, so that the number of images determines some fields.
        source: the start of the weights; None for new weights.
        output: folder of the run. The checkpoint goes to `output / name`.
        results: folder of the record, `results / NAME.json`.
        device: "auto" is a GPU if available.
        license: the licence that the card names; None for none.
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
    save_minutes: float = 5.0
    quiet: bool = False
    license: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.output / self.name

    def say(self) -> None:
        """Print what will be trained, unless the plan is quiet or another process prints."""
        if speaks() and not self.quiet:
            start = f"starting from {self.source.name}" if self.source else "with new weights"
            print(f"training {self.recipe.model} on {self.data}, {start}", flush=True)


def make_plan(
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
    **options: Any,
) -> Plan:
    """Read the recipe, find the start, and choose name and folders. Nothing is written.

    Args:
        recipe: None to use `FINE_TUNING` as the recipe, or `FROM_SCRATCH` if only a model is given.
        overrides: fields of the recipe; nested fields by dotted names, or as dictionaries.
        options: further fields of `Plan`. All other arguments are those of `bkn_zoo.train`.
    """
    check_license(options.get("license"))
    given = _flat(overrides)
    fine_tuning = recipe is None
    if fine_tuning and init is None and "model" not in given:
        init = _default_init()
    source = None if init is None else find_origin(os.fspath(init))
    path = find_recipe(recipe) if isinstance(recipe, str | os.PathLike) else None
    if isinstance(recipe, Recipe):
        fields = _flat(dataclasses.asdict(recipe)) | given
    elif fine_tuning:
        defaults = FINE_TUNING | like(source, given.get("model")) if source else FROM_SCRATCH
        fields = defaults | given
    else:
        fields = given
    chosen = read_recipe(path, fields)
    root = Path(data)
    name = _checked(name) if name else _derived_name(path, root, given, chosen)
    folder = Path("runs") / name if output is None else Path(output)
    return Plan(
        chosen, given, fine_tuning, source, root, name, folder,
        results=folder / "results" / "runs" if results is None else Path(results),
        device="auto" if device is None else str(device), quiet=quiet, **options,
    )  # fmt: skip


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replace dictionaries by dotted names, so that they override field by field."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _default_init() -> str:
    """The default checkpoint to start from."""
    try:
        return default_checkpoint()
    except CheckpointError:
        raise InputError(
            "there is nothing to train: add --checkpoint NAME (or a folder, or owner/repo on the Hub) to start from, "
            "--model NAME for new weights, or a recipe."
        ) from None


def _checked(name: str) -> str:
    if not NAME.fullmatch(name) or name == "results":
        raise InputError(
            f"{name!r} is not a valid name of a run: use letters, digits and -_.=, begin with a letter or digit, "
            "and do not use results."
        )
    return name


def _derived_name(path: Path | None, data: Path, given: Mapping[str, Any], recipe: Recipe) -> str:
    """A name that contains the overrides, so that a variant does not replace the original run."""
    told = dict(given)
    if path is None:
        name = f"{recipe.model}.{data.resolve().name}"
        told.pop("model", None)
    else:
        name = path.stem
    name += "".join(f"-{field}_{value}" for field, value in sorted(told.items()))
    return re.sub(r"[^\w.-]+", "_", name)
