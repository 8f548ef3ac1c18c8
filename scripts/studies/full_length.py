"""A table of docs/results.md: runs at the full length of the published recipes.

They compare BKN with few images per statistics group, BN with as few, and BN with many.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from bkn_zoo.checkpoints.card import DATASETS, Run
from bkn_zoo.models import build
from studies.records import CLASSES, but_for_twins, chosen_top1, is_plain, least_to_most, sizes, to_the_end
from studies.render import frame
from studies.stats import spread


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


def parameters(name: str, classes: int, **options: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name, classes, **options).parameters())
