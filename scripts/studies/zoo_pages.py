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
    rows = (_checkpoint(name, config) for name, config in sorted(checkpoints.items()))
    return {"checkpoints": frame(rows), "training": frame(_training(results))}


def short_list(checkpoints: Mapping[str, Config]) -> list[dict[str, Any]]:
    """The README's table: for each checkpoint, accuracy with its default statistics."""
    rows = []
    for name, config in sorted(checkpoints.items()):
        top1 = config.accuracy.get(config.default_statistics, {}).get("top1")
        rows.append({
            "checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config),
            "top-1 (%)": None if top1 is None else _top1_of(config, f"{top1:.2f}"),
            "classes": config.num_classes,
            "image size": f"{config.preprocessing.size} px" if config.preprocessing else None,
            "parameters": f"{parameters(config.architecture, config.num_classes) / 1e6:.1f}M",
            "default statistics": f"`{config.default_statistics}`",
        })  # fmt: skip
    return rows


def _top1_of(config: Config, shown: str) -> str:
    """The accuracy; if it was measured on other images than the data set's, after the authors' own."""
    if "measured_on" not in config.training:
        return shown
    return f"{config.training['authors_top1']} (authors); {shown} on other photographs ¹"


def _mark(config: Config) -> str:
    """The mark of a footnote, for accuracy on other images than those of the data set."""
    return " ¹" if "measured_on" in config.training else ""


def _checkpoint(name: str, config: Config) -> dict[str, Any]:
    def shown(mode: str) -> str | None:
        value = config.accuracy.get(mode, {}).get("top1")
        if value is None:
            return None
        is_default = mode == config.default_statistics
        return _top1_of(config, f"**{value:.2f}**") if is_default else f"{value:.2f}{_mark(config)}"

    about = {"checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config)}
    group = config.statistics_batch_size or "whole batch"
    return about | {"classes": config.num_classes, "group": group} | {mode: shown(mode) for mode in MODES}


def _training(results: Path) -> list[dict[str, Any]]:
    """Runs, time and energy of `bkn-zoo train` and of the studies."""
    pretrained = [json.loads(path.read_text()) for path in sorted((results / "pretrained").glob("*.json"))]
    trainings = [each | {"hardware": arm["hardware"]} for arm in pretrained for each in arm.get("trainings", [])]
    parts = {
        "networks of the zoo, comparisons, trials": read_runs(results / "runs")
        + read_runs(results / "runs" / "trials"),
        "replication": read_runs(results / "reproduce"),
        "standardized weights": read_runs(results / "standardized"),
        "pretrained networks": trainings,
    }
    rows = []
    for what, runs in parts.items():
        for hardware in sorted({run["hardware"] for run in runs}):
            seconds = [run["seconds"] for run in runs if run["hardware"] == hardware]
            power = POWER_LIMIT.get(hardware)
            energy = f"{sum(seconds) / 3600 * power / 1000:.1f} kWh" if power else "not known"
            about = {"what": what, "hardware": hardware, "runs": len(seconds), "time": duration(sum(seconds))}
            rows.append(about | {"energy, at most": energy})
    return rows
