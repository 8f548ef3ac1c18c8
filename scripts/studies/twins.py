"""Twins: runs with the same network and recipe that differ only in the norm, the statistics batch and the seed."""

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
    """The runs that can be compared with published ones: with the original width, on all images.

    A diverged run has `failed` instead of measurements. Of two runs with the same recipe, the one in results/runs/ is
    used. They are sorted by seed.
    """
    runs = [*read_runs(results / "reproduce"), *read_runs(results / "runs")]
    whole = [run for run in runs if run.get("width", 1) == run.get("every", 1) == 1]
    once = {recipe_key(read_recipe(None, run["recipe"])): run for run in whole}
    return sorted(once.values(), key=lambda run: (run["seed"], run["name"]))


def to_the_end(runs: Iterable[Record]) -> list[Record]:
    """The runs that did not diverge."""
    return [run for run in runs if "failed" not in run]


def chosen_top1(runs: Sequence[Record]) -> list[float]:
    """Top-1 on the test images, in the mode that was best on the validation images."""
    mode = chosen_statistics(runs)
    return [run["test"][mode]["top1"] for run in runs]


def batches(run: Record) -> str:
    """Gradient and statistics batch of a run as text."""
    return ", ".join(map(str, sizes(run)))


def sizes(run: Record) -> tuple[int, int]:
    return run["gradient_batch"], run["statistics_batch"] or run["gradient_batch"]


def but_for_twins(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that twins share, without fields at their defaults, because older records lack newer fields."""
    own = "model", "norm_options", "statistics_batch", "statistics_batch_size", "seed", *LAUNCHING
    defaults = {field.name: field.default for field in fields(Recipe)}
    return {name: value for name, value in recipe.items() if name not in own and value != defaults.get(name, MISSING)}


def is_plain(run: Record, recipe: Mapping[str, Any]) -> bool:
    """Whether the norm has only the options of `recipe`; BRN must also have its schedule."""
    options = recipe.get("norm_options", {}) if run["model"] == recipe.get("model") else {}
    return run["norm"] == "brn" or run["recipe"].get("norm_options", {}) == options
