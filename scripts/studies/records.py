"""Records of trainings, written by `bkn-zoo train` and by the studies of this repository."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import Recipe

Record = Mapping[str, Any]
NORMS = {"bkn": "BKN", "bn": "BN", "brn": "BRN", "gn": "GroupNorm", "evonorm": "EvoNorm-S0", "frn": "FRN"}

LAUNCHING = "graph", "compile"
"""Fields of a recipe that affect how it is launched, but not the result."""


def recipe_key(recipe: Recipe, width: float = 1.0, every: int = 1) -> str:
    """A key that is equal for recipes with the same result."""
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in LAUNCHING}
    return json.dumps([fields, float(width), every], sort_keys=True)


def read_run(path: Path) -> Record:
    """The record of a run; for a published network, with the later measurements of the study `published`."""
    record = json.loads(path.read_text())
    later = path.parent.parent / "evalnorm" / path.name
    if later.exists():
        record["rules"] = {"EvalNorm": json.loads(later.read_text())["rows"][0], **record.get("rules", {})}
    return record


def learned(top1: Sequence[float], classes: int) -> bool:
    """Whether each of several networks is clearly better than guessing."""
    return min(top1) >= 2 * 100 / classes


def chosen_statistics(records: Sequence[Record]) -> str:
    """The mode with the best mean accuracy on validation images, for runs that differ only in their seeds."""
    return best_mode([{mode: measured(each, "validation")[mode]["top1"] for mode in MODES} for each in records])


def best_mode(validation: Sequence[Mapping[str, float]]) -> str:
    """The mode with the largest mean accuracy; the first one if several are equal."""
    return max(validation[0], key=lambda mode: math.fsum(each[mode] for each in validation))


def measured(record: Record, images: str) -> Mapping[str, Mapping[str, float]]:
    """The metrics of a record by mode and, on test images, by other rules."""
    if images == "test":
        return {**record["test"], **record.get("rules", {})}
    return record.get("validation") or record["curve"][-1]["validation"]


def counted(*seeds: int) -> str:
    """The number of seeds as text, for one arm or several."""
    return "1 seed" if max(seeds) == 1 else f"{least_to_most(seeds)} seeds"


def least_to_most(numbers: Iterable[int]) -> str:
    least, most = min(numbers := list(numbers)), max(numbers)
    return str(most) if least == most else f"{least} to {most}"
