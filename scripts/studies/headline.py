"""The first plot of the README and the first table of docs/results.md: accuracy by images per statistics group."""

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from bkn_zoo.publishing.results import table
from studies.base import Record
from studies.chance import spread
from studies.records import least_to_most
from studies.replication_cells import Cell, cell
from studies.replication_plan import HELD, Plan

GROUPS = {128: "128 images per group", 8: "8", 2: "2", 1: "1"}
FULL, SHORT = "cifar100_full", "cifar100"
COLOURS = {"BKN": "#1f77b4", "BN": "#d62728", "GroupNorm": "#2ca02c", "BRN": "#ff7f0e"}
NAMES = {
    "BKN": "Batch Kalman Normalization (BKN)",
    "BN": "batch normalization (BN)",
    "GroupNorm": "group normalization",
    "BRN": "batch renormalization (BRN)",
}


def headline_cells(setting: str, label: str, plan: Plan, records: Mapping[str, Record]) -> dict[int, Cell]:
    """One norm's results in a setting, by images per group. GroupNorm has the same for every group."""
    found = {
        arm.group: each
        for arm in plan.arms.values()
        if (arm.setting, arm.label) == (setting, label) and (each := cell(arm, records)).good
    }
    return dict.fromkeys(GROUPS, found[128]) if label == "GroupNorm" and found else found


def headline_table(plan: Plan, records: Mapping[str, Record]) -> str:
    """Each norm by images per group, on CIFAR-100, after a full training and after a short one."""
    rows = []
    for setting in (FULL, SHORT):
        for label in ("BN", "BRN", "GroupNorm", HELD, "BKN"):
            found = headline_cells(setting, label, plan, records)
            if found:
                epochs = next(iter(found.values())).arm.runs[0].recipe.epochs
                tops = {shown: spread(found[group].top1()) if group in found else "" for group, shown in GROUPS.items()}
                rows.append({"CIFAR-100, top-1 (%)": label, "epochs": epochs, **tops})
    return table(rows, list(rows[0]))


def headline_figure(plan: Plan, records: Mapping[str, Record]) -> Any:
    """Accuracy over images per group after a full training: a line for each norm, with the deviation over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4), layout="constrained")
    axes = figure.subplots()
    groups, shown = sorted(GROUPS), []
    for label, colour in COLOURS.items():
        found = headline_cells(FULL, label, plan, records)
        shown += found.values()
        tops = {groups.index(group): found[group].top1() for group in groups if group in found}
        means, deviations = [mean(each) for each in tops.values()], [stdev(each) for each in tops.values()]
        style = {"marker": "" if label == "GroupNorm" else "o", "linewidth": 3 if label == "BKN" else 1.8}
        axes.errorbar(list(tops), means, deviations, color=colour, capsize=4, label=NAMES[label], **style)
    axes.set_xticks(range(len(groups)), list(map(str, groups)))
    axes.set_xlabel("images that share one mean and variance in training")
    axes.set_ylabel("top-1 accuracy (%)")
    epochs, seeds = shown[0].arm.runs[0].recipe.epochs, least_to_most(len(each.top1()) for each in shown)
    axes.set_title(f"CIFAR-100, {epochs} epochs, mean and deviation over {seeds} seeds", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    return figure
