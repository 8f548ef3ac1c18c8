"""A table of docs/results.md and its figure: runs at the full length of the published recipes.

They compare BKN with few images per statistics group, BN with as few, and BN with many.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import pandas as pd
import torch

from bkn_zoo.checkpoints.card import DATASETS, Run
from bkn_zoo.models import build
from studies.records import CLASSES, but_for_twins, chosen_top1, counted, is_plain, least_to_most, sizes, to_the_end
from studies.render import frame
from studies.stats import spread

BKN, BN_FEW, BN_MANY = "#1f77b4", "#d62728", "#7f7f7f"


@dataclass(frozen=True)
class FullLength:
    """One network on one data set with the same recipe: top-1 on the test images for each seed.

    Attributes:
        few: images per statistics group of `bkn` and `bn_few`.
        many: images per statistics group of `bn_many`.
    """

    data: str
    network: str
    few: int
    many: int
    bn_few: list[float]
    bkn: list[float]
    bn_many: list[float]

    @property
    def seeds(self) -> list[int]:
        """The number of seeds of each of the three."""
        return [len(arm) for arm in (self.bn_few, self.bkn, self.bn_many)]


def full_lengths(runs: Iterable[Run]) -> list[FullLength]:
    """One row for each network, data set and group size with runs to compare.

    If there are several recipes, the one with most epochs is used, then the one with most runs.

    Args:
        runs: the result of `read_twins`. Runs with options of a norm are ignored.
    """
    alike: dict[tuple[str, str, str], list[Run]] = {}
    for run in (run for run in to_the_end(runs) if is_plain(run, {})):
        key = json.dumps(but_for_twins(run["recipe"]), sort_keys=True, default=str)
        alike.setdefault((run["dataset"], run["model"].rpartition("_")[0], key), []).append(run)
    found: dict[tuple[str, str], list[FullLength]] = {}
    for (dataset, network, _), members in sorted(alike.items(), key=lambda item: (item[1][0]["epochs"], len(item[1]))):
        of: dict[tuple[str, int], list[Run]] = {}
        for run in members:
            of.setdefault((run["norm"], sizes(run)[1]), []).append(run)
        many = max((group for norm, group in of if norm == "bn"), default=0)
        both = sorted(group for norm, group in of if norm == "bkn" and ("bn", group) in of and group < many)
        if both:
            found[dataset, network] = [
                FullLength(str(DATASETS[dataset].shown), network, few, many, *map(chosen_top1, three))
                for few in both
                for three in [(of["bn", few], of["bkn", few], of["bn", many])]
            ]
    return [row for key in sorted(found) for row in found[key]]


def full_length_table(rows: Iterable[FullLength]) -> pd.DataFrame:
    """The rows as a table, with the parameters that A adds."""
    classes = {DATASETS[name].shown: count for name, count in CLASSES.items()}

    def line(row: FullLength) -> dict[str, str]:
        bn, bkn = (parameters(f"{row.network}_{norm}", classes[row.data]) / 1e6 for norm in ("bn", "bkn"))
        return {
            "data, network": f"{row.data}, `{row.network}`",
            "images per group": str(row.few),
            "BN": spread(row.bn_few),
            "**BKN**": f"**{spread(row.bkn)}**",
            "BN with many": f"{spread(row.bn_many)} ({row.many} per group)",
            "seeds": least_to_most(row.seeds),
            "parameters, BN to BKN": f"{bn:.1f}M to {bkn:.1f}M",
        }

    return frame(map(line, rows))


def parameters(name: str, classes: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name, classes).parameters())


def full_length_figure(rows: Sequence[FullLength]) -> Any:
    """One line per row: from BN to BKN with few images per group, and BN with many."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    large = sorted({row.many for row in rows})
    groups = " or ".join(map(str, large)) if len(large) < 3 else f"{large[0]} to {large[-1]}"
    dots = (
        ("bn_few", BN_FEW, "BN", {"marker": "o", "markersize": 10}),
        ("bkn", BKN, "BKN", {"marker": "o", "markersize": 6}),
        ("bn_many", BN_MANY, f"BN with {groups} images per group", {"marker": "|", "markersize": 16}),
    )
    for y, row in enumerate(reversed(rows)):
        few, bkn = mean(row.bn_few), mean(row.bkn)
        axes.plot([few, bkn], [y, y], color=BKN, linewidth=2, alpha=0.4)
        for name, colour, label, style in dots:
            seeds = getattr(row, name)
            error = stdev(seeds) if len(seeds) > 1 else None
            axes.errorbar(mean(seeds), y, xerr=error, color=colour, capsize=4, label="" if y else label, linestyle="",
                          **style)  # fmt: skip
        axes.annotate(f"{bkn - few:+.1f}", ((few + bkn) / 2, y), (0, 10), ha="center", textcoords="offset points",
                      color=BKN)  # fmt: skip
    labels = [
        f"{row.data}, {row.network}\n{row.few} image{'s' * (row.few > 1)} per group, {counted(*row.seeds)}"
        for row in reversed(rows)
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.set_xlabel("top-1 accuracy on the test images (%), mean and standard deviation over seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure
