"""The tables of docs/runs.md (trainings by `bkn-zoo train`), MODEL_CARD.md and README.md (all checkpoints)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.checkpoints.card import DATASETS, Run, dataset_name, duration
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.modes import MODES
from studies.card_sections import gained
from studies.full_length import FullLength, full_lengths, parameters
from studies.records import batches, counted, measured, read_runs, read_twins
from studies.render import Content, frame

POWER_LIMIT = {"NVIDIA H200": 700}
"""Power limit of GPU boards in watts, by PyTorch's name, for an upper bound of the energy of a run."""


def runs_page(results: Path, published: Sequence[str]) -> dict[str, Content]:
    """The regions of docs/runs.md, with the names of published checkpoints in bold."""
    runs = read_runs(results / "runs")
    comparisons = [row for row in full_lengths(read_twins(results)) if row.data == DATASETS["tiny_imagenet"].shown]
    return {
        **{
            dataset: frame(_runs([run for run in runs if run["dataset"] == dataset], published))
            for dataset in sorted({run["dataset"] for run in runs})
        },
        "aim": frame(_aim(comparisons)),
    }


def _aim(rows: Sequence[FullLength]) -> list[dict[str, str]]:
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


def _runs(runs: Iterable[Run], published: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
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


def zoo_card(checkpoints: Mapping[str, Config], results: Path) -> dict[str, Content]:
    """The regions of MODEL_CARD.md, from the configs of all checkpoints by name and the records."""
    rows = []
    for name, config in sorted(checkpoints.items()):
        about = {"checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config)}
        about |= {"classes": config.num_classes, "group": config.statistics_batch_size or "whole batch"}
        sizes = [_size(config), _size(config, transition_rank=None)]
        about["parameters"] = f"{sizes[0]} ({sizes[1]})" if sizes[0] != sizes[1] else sizes[0]
        top1 = {mode: _accuracy(name, config, mode, results, "**") for mode in MODES}
        rows.append(about | top1)
    return {"checkpoints": frame(rows), "training": frame(_training(results))}


def short_list(checkpoints: Mapping[str, Config], results: Path) -> list[dict[str, Any]]:
    """The README's table: for each checkpoint, accuracy with its default statistics."""
    return [
        {
            "checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config),
            "top-1 (%)": _accuracy(name, config, config.default_statistics, results),
            "classes": config.num_classes,
            "image size": f"{config.preprocessing.size} px" if config.preprocessing else None,
            "parameters": _size(config),
            "default statistics": f"`{config.default_statistics}`",
        }
        for name, config in sorted(checkpoints.items())
    ]  # fmt: skip


def _size(config: Config, **changes: Any) -> str:
    return f"{parameters(config.architecture, config.num_classes, **config.norm_options | changes) / 1e6:.1f}M"


def _accuracy(name: str, config: Config, mode: str, results: Path, bold: str = "") -> str | None:
    """Top-1 in a mode; the default mode in bold and, if other images were measured, after the authors' accuracy."""
    value = config.accuracy.get(mode, {}).get("top1")
    if value is None:
        return None
    is_default, footnote = mode == config.default_statistics, " ¹" if config.measured_on else ""
    shown = f"{bold}{value:.2f}{bold}" if is_default else f"{value:.2f}"
    if is_default and footnote:
        reported = json.loads((results / "imported" / f"{name}.json").read_text())["reported_top1"]
        shown = f"{reported} (authors); {shown} on other photographs"
    return shown + footnote


def _training(results: Path) -> list[dict[str, Any]]:
    """Runs, time and energy of `bkn-zoo train` and of the studies."""
    arms = [json.loads(path.read_text()) for path in sorted((results / "pretrained").glob("*.json"))]
    folders = {
        "the zoo, comparisons, trials": ["runs", "runs/trials"], "replication": ["reproduce"],
        "standardized weights": ["standardized"],
    }  # fmt: skip
    parts = {what: [run for folder in of for run in read_runs(results / folder)] for what, of in folders.items()}
    trainings = ((arm["hardware"], each) for arm in arms for each in arm.get("trainings", ()))
    parts["pretrained networks"] = [each | {"hardware": hardware} for hardware, each in trainings]
    parts["CamVid, one image per batch"] = [json.loads(path.read_text()) for path in (results / "dense").glob("*.json")]
    parts["all five"] = [run for runs in parts.values() for run in runs]
    rows = []
    for what, runs in parts.items():
        for hardware in sorted({run["hardware"] for run in runs}):
            seconds = [run["seconds"] for run in runs if run["hardware"] == hardware]
            power = POWER_LIMIT.get(hardware)
            energy = f"{sum(seconds) / 3600 * power / 1000:.1f} kWh" if power else "not known"
            about = {"what": what, "hardware": hardware, "runs": len(seconds), "time": duration(sum(seconds))}
            rows.append(about | {"energy, at most": energy})
    return rows
