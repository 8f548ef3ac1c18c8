"""Twins: runs of one network by one recipe, but for the norm, the statistics batch and the seed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from bkn_zoo.training.recipes import Recipe, read_recipe
from studies.records import LAUNCHING, Record, chosen_statistics, read_run, recipe_key


def read_runs(folder: Path) -> list[Record]:
    """The records of all runs, by name."""
    return sorted(map(read_run, folder.glob("*.json")), key=lambda run: run["name"])


def read_twins(results: Path) -> list[Record]:
    """The runs that can be compared with published ones: of the whole network, on all images.

    One that diverged has `failed` in place of what was measured. Of two by the same recipe, that of results/runs/; in
    the order of their seeds.
    """
    runs = [*read_runs(results / "reproduce"), *read_runs(results / "runs")]
    whole = [run for run in runs if run.get("width", 1) == run.get("every", 1) == 1]
    once = {recipe_key(read_recipe(None, run["recipe"])): run for run in whole}
    return sorted(once.values(), key=lambda run: (run["seed"], run["name"]))


def to_the_end(runs: Iterable[Record]) -> list[Record]:
    """Those that did not diverge."""
    return [run for run in runs if "failed" not in run]


def chosen_top1(runs: Sequence[Record]) -> list[float]:
    """On the test images, in the mode that was best on the validation images."""
    mode = chosen_statistics(runs)
    return [run["test"][mode]["top1"] for run in runs]


def batches(run: Record) -> str:
    """Its gradient and statistics batch, to show."""
    return ", ".join(map(str, sizes(run)))


def sizes(run: Record) -> tuple[int, int]:
    return run["gradient_batch"], run["statistics_batch"] or run["gradient_batch"]


def but_for_twins(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What twins have in common; without the fields at their defaults, since older records lack the younger fields."""
    own = "model", "norm_options", "statistics_batch", "seed", *LAUNCHING
    defaults = {field.name: field.default for field in fields(Recipe)}
    return {name: value for name, value in recipe.items() if name not in own and value != defaults.get(name, MISSING)}


def is_plain(run: Record, recipe: Mapping[str, Any]) -> bool:
    """Whether its norm has no options of its own but those of `recipe`, and BRN its schedule, which it must have."""
    options = recipe.get("norm_options", {}) if run["model"] == recipe.get("model") else {}
    return run["norm"] == "brn" or run["recipe"].get("norm_options", {}) == options
