"""Records of trainings, written by `bkn-zoo train` and by the studies of this repository.

Twins are runs with the same network and recipe that differ only in the norm, the statistics batch and the seed.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import Augmentation, Recipe, read_recipe

Record = Mapping[str, Any]
NORMS = {
    "bkn": "BKN",
    "bn": "BN",
    "brn": "BRN",
    "gn": "GroupNorm",
    "evonorm": "EvoNorm-S0",
    "frn": "FRN",
    "bnplain": "BN, plain scale and shift before the pooling",
}
CLASSES = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200, "imagenet": 1000}
"""The number of classes of a data set, by its name in a recipe."""
LAUNCHING = "graph", "compile"
"""Fields of a recipe that affect how it is launched, but not the result."""


def recipe_key(recipe: Recipe, width: float = 1.0, every: int = 1) -> str:
    """A key that is equal for recipes with the same result."""
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in LAUNCHING}
    return json.dumps([fields, float(width), every], sort_keys=True)


def read_run(path: Path) -> Record:
    """The record of a run; for a published network, with its accuracy by EvalNorm's rule, measured later."""
    record = json.loads(path.read_text()) | {"name": path.stem}
    later = path.parent.parent / "evalnorm" / path.name
    if later.exists():
        record["rules"] = {"EvalNorm": json.loads(later.read_text())["rows"][0], **record.get("rules", {})}
    return record


def read_runs(folder: Path) -> list[Record]:
    """The records of all runs, by name."""
    return sorted(map(read_run, folder.glob("*.json")), key=lambda run: run["name"])


def read_twins(results: Path) -> list[Record]:
    """The runs that can be compared with published ones: with the original width, on all images.

    A diverged run has `failed` instead of measurements. Of two runs with the same recipe, the one in results/runs/ is
    used. They are sorted by seed.
    """
    runs = [*read_runs(results / "reproduce"), *read_runs(results / "runs")]
    whole = [run for run in runs if run.get("width", 1) == run.get("every", 1) == 1]
    once = {recipe_key(read_recipe(None, run["recipe"])): run for run in whole}
    return sorted(once.values(), key=lambda run: (run["seed"], run["name"]))


def but_for_twins(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that twins share, without fields at their defaults, because older records lack newer fields."""
    own = "model", "norm_options", "statistics_batch", "statistics_batch_size", "seed", *LAUNCHING
    shared = {name: value for name, value in recipe.items() if name not in own}
    return _changed(Recipe, shared) | {"augmentation": _changed(Augmentation, shared.get("augmentation", {}))}


def _changed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not the defaults of a dataclass."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value != defaults.get(name, dataclasses.MISSING)}


def is_plain(run: Record, recipe: Mapping[str, Any]) -> bool:
    """Whether the norm has only the options of `recipe`; BRN must also have its schedule."""
    options = recipe.get("norm_options", {}) if run["model"] == recipe.get("model") else {}
    return run["norm"] == "brn" or run["recipe"].get("norm_options", {}) == options


def sizes(run: Record) -> tuple[int, int]:
    """Gradient and statistics batch of a run."""
    return run["gradient_batch"], run["statistics_batch"] or run["gradient_batch"]


def batches(run: Record) -> str:
    """Gradient and statistics batch of a run as text."""
    return ", ".join(map(str, sizes(run)))


def to_the_end(runs: Iterable[Record]) -> list[Record]:
    """The runs that did not diverge."""
    return [run for run in runs if "failed" not in run]


def learned(top1: Sequence[float], classes: int) -> bool:
    """Whether each of several networks is clearly better than guessing."""
    return min(top1) >= 2 * 100 / classes


def measured(record: Record, images: str) -> Mapping[str, Mapping[str, float]]:
    """The metrics of a record by mode and, on test images, by other rules."""
    if images == "test":
        return {**record["test"], **record.get("rules", {})}
    return record.get("validation") or record["curve"][-1]["validation"]


def best_mode(validation: Sequence[Mapping[str, float]]) -> str:
    """The mode with the largest mean accuracy; the first one if several are equal."""
    return max(validation[0], key=lambda mode: math.fsum(each[mode] for each in validation))


def chosen_statistics(records: Sequence[Record]) -> str:
    """The mode with the best mean accuracy on validation images, for runs that differ only in their seeds."""
    found = [measured(each, "validation") for each in records]
    modes = [mode for mode in MODES if all(mode in metrics for metrics in found)]
    return best_mode([{mode: metrics[mode]["top1"] for mode in modes} for metrics in found])


def chosen_top1(runs: Sequence[Record]) -> list[float]:
    """Top-1 on the test images, in the mode that was best on the validation images."""
    mode = chosen_statistics(runs)
    return [run["test"][mode]["top1"] for run in runs]


def counted(*seeds: int) -> str:
    """The number of seeds as text, for one arm or several."""
    return "1 seed" if max(seeds) == 1 else f"{least_to_most(seeds)} seeds"


def least_to_most(numbers: Iterable[int]) -> str:
    least, most = min(numbers := list(numbers)), max(numbers)
    return str(most) if least == most else f"{least} to {most}"
