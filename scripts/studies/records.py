"""Records of trainings, as `bkn-zoo train` and the studies of this repository leave them."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import Recipe

Record = Mapping[str, Any]
NORMS = {"bkn": "BKN", "bn": "BN", "brn": "BRN", "gn": "GroupNorm"}

LAUNCHING = "graph", "compile"
"""Fields of a recipe that say how it is launched, and nothing about what is trained."""


def recipe_key(recipe: Recipe, width: float = 1.0, every: int = 1) -> str:
    """The same for the same training, however it is launched."""
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in LAUNCHING}
    return json.dumps([fields, float(width), every], sort_keys=True)


def read_run(path: Path) -> Record:
    """What a run left; with that of a published network, what it was asked later by the study `published`."""
    record = json.loads(path.read_text())
    later = path.parent.parent / "evalnorm" / path.name
    if later.exists():
        record["rules"] = {"EvalNorm": json.loads(later.read_text())["rows"][0], **record.get("rules", {})}
    return record


def learned(top1: Sequence[float], classes: int) -> bool:
    """Whether each of several networks is better than guessing, and not by a little."""
    return min(top1) >= 2 * 100 / classes


def chosen_statistics(records: Sequence[Record]) -> str:
    """The mode that was best on the validation images of runs that differ by their seeds, on the mean."""
    return best_mode([{mode: measured(each, "validation")[mode]["top1"] for mode in MODES} for each in records])


def best_mode(validation: Sequence[Mapping[str, float]]) -> str:
    """The mode whose accuracies have the largest mean; of equal ones, the first."""
    return max(validation[0], key=lambda mode: math.fsum(each[mode] for each in validation))


def measured(record: Record, images: str) -> Mapping[str, Mapping[str, float]]:
    """A record's metrics by mode and, on its test images, by other rules."""
    if images == "test":
        return {**record["test"], **record.get("rules", {})}
    return record.get("validation") or record["curve"][-1]["validation"]


def counted(*seeds: int) -> str:
    """Of one arm, or of several that are shown together."""
    return "1 seed" if max(seeds) == 1 else f"{least_to_most(seeds)} seeds"


def least_to_most(numbers: Iterable[int]) -> str:
    least, most = min(numbers := list(numbers)), max(numbers)
    return str(most) if least == most else f"{least} to {most}"
