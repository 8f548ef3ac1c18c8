"""The tables of MODEL_CARD.md: all checkpoints, and the time and energy of all trainings."""

from collections.abc import Mapping, Sequence
from typing import Any

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.cards import Run, dataset_name, duration
from studies.full_length import parameters
from studies.render import Content, frame

POWER_LIMIT = {"NVIDIA H200": 700}
"""Power limit of GPU boards in watts, by PyTorch's name, for an upper bound of the energy of a run."""


def zoo_card(checkpoints: Mapping[str, Config], runs: Sequence[Run]) -> dict[str, Content]:
    """The regions of MODEL_CARD.md.

    Args:
        checkpoints: the configs of all checkpoints, by name.
        runs: the records of all runs.
    """
    rows = (_checkpoint(name, config) for name, config in sorted(checkpoints.items()))
    return {"checkpoints": frame(rows), "training": frame(_training(runs))}


def short_list(checkpoints: Mapping[str, Config]) -> list[dict[str, Any]]:
    """The README's table: for each checkpoint, accuracy with its default statistics."""
    rows = []
    for name, config in sorted(checkpoints.items()):
        top1 = config.accuracy.get(config.default_statistics, {}).get("top1")
        rows.append({
            "checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config),
            "top-1 (%)": None if top1 is None else f"{top1:.2f}{_mark(config)}",
            "classes": config.num_classes,
            "image size": f"{config.preprocessing.size} px" if config.preprocessing else None,
            "parameters": f"{parameters(config.architecture, config.num_classes) / 1e6:.1f}M",
            "default statistics": f"`{config.default_statistics}`",
        })  # fmt: skip
    return rows


def _mark(config: Config) -> str:
    """The mark of a footnote, for accuracy on other images than those of the data set."""
    return " ¹" if "measured_on" in config.training else ""


def _checkpoint(name: str, config: Config) -> dict[str, Any]:
    def top1(mode: str) -> str | None:
        value = config.accuracy.get(mode, {}).get("top1")
        if value is None:
            return None
        shown = f"**{value:.2f}**" if mode == config.default_statistics else f"{value:.2f}"
        return shown + _mark(config)

    about = {"checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config)}
    group = config.statistics_batch_size or "whole batch"
    return about | {"classes": config.num_classes, "group": group} | {mode: top1(mode) for mode in MODES}


def _training(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows = []
    for hardware in sorted({run["hardware"] for run in runs}):
        seconds = sum(run["seconds"] for run in runs if run["hardware"] == hardware)
        power = POWER_LIMIT.get(hardware)
        energy = f"{seconds / 3600 * power / 1000:.1f} kWh" if power else "not known"
        count = sum(run["hardware"] == hardware for run in runs)
        rows.append({"hardware": hardware, "runs": count, "time": duration(seconds), "energy, at most": energy})
    return rows
