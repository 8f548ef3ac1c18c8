"""The tables of docs/runs.md: every training that `bkn-zoo train` left in results/runs/."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.modes import MODES
from bkn_zoo.publishing.cards import DATASETS, Run
from bkn_zoo.training.recipes import Recipe, read_recipe
from studies.card_sections import gained
from studies.full_length import FullLength, full_lengths
from studies.records import batches, counted, measured, read_runs, read_twins
from studies.render import Content, frame


def runs_page(results: Path, checkpoints: Path, recipes: Path) -> dict[str, Content]:
    """The regions of docs/runs.md."""
    runs, trials = read_runs(results / "runs"), read_runs(results / "runs" / "trials")
    names = sorted(path.parent.name for path in checkpoints.glob("*/config.json"))
    comparisons = [row for row in full_lengths(read_twins(results)) if row.data == DATASETS["tiny_imagenet"].shown]
    return {
        **{
            dataset: frame(runs_table([run for run in runs if run["dataset"] == dataset], names))
            for dataset in sorted({run["dataset"] for run in runs})
        },
        "aim": frame(aim(comparisons)),
        "trials": frame(runs_table(trials, recipes=recipes)),
    }


def aim(rows: Sequence[FullLength]) -> list[dict[str, str]]:
    """BN with many images per group and BKN with few, on Tiny ImageNet."""
    return [
        {
            "network": f"`{row.network}`",
            f"BN, groups of {row.many}": f"{mean(row.bn_many):.2f}",
            f"BKN, groups of {row.few}": f"{mean(row.bkn):.2f}",
            "difference": gained(mean(row.bkn), mean(row.bn_many)),
            "runs": counted(*row.seeds[1:]),
        }
        for row in rows
    ]


def runs_table(runs: Iterable[Run], published: Sequence[str] = (), recipes: Path | None = None) -> list[dict[str, Any]]:
    """A row for each run, with published checkpoints in bold.

    Args:
        recipes: if given, the data set is shown, and how a run's recipe differs from the recipe of that name there.
    """
    return [
        ({"data": DATASETS[run["dataset"]].shown, "before": _differences(run, recipes)} if recipes else {})
        | {
            "model": f"**{run['model']}**" if run["name"] in published else run["model"],
            "options": ", ".join(f"{name} = {value}" for name, value in run["recipe"]["norm_options"].items()),
            "batches": batches(run),
            "epochs": run["epochs"],
            "lr": run["recipe"]["lr"],
            "seed": run["seed"],
            "held out": f"{run['recipe']['validation']:.0%}",
            "validation": _top1(measured(run, "validation")),
            "test": _top1(run["test"]),
            "minutes": round(run["seconds"] / 60),
        }
        for run in runs
    ]


def _top1(metrics: Mapping[str, Mapping[str, float]]) -> str:
    return " / ".join(f"{metrics[mode]['top1']:.2f}" for mode in MODES)


def _differences(run: Run, recipes: Path) -> str:
    now = _flat(read_recipe(recipes / f"{run['name'].partition('-')[0]}.toml"))
    then = _flat(read_recipe(None, run["recipe"]))
    columns = ("model", "norm_options", "gradient_batch", "statistics_batch", "epochs", "lr", "seed", "validation")
    return ", ".join(f"{n} = {v}" for n, v in then.items() if v != now[n] and n.partition(".")[0] not in columns)


def _flat(recipe: Recipe) -> dict[str, Any]:
    """Its fields by name, augmentation's with a dot."""
    fields = dataclasses.asdict(recipe)
    augmentation = fields.pop("augmentation")
    return fields | {f"augmentation.{name}": value for name, value in augmentation.items()}
