"""The study of fine-tuning: which choices are held against the defaults, and the table of what they gave."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bkn_zoo.publishing.results import table

CHECKPOINT = "inception_v2_bkn.tiny_imagenet"
SETS = {"imagewoof": "Imagewoof", "imagenette": "Imagenette", "tiny_imagenet": "Tiny ImageNet, 20 classes"}
SEEDS = range(3)
DEFAULTS, PROBE, ORIGINAL = "defaults", "linear probe", "original head"

ARMS: dict[str, tuple[str, ...]] = {
    DEFAULTS: (),
    PROBE: (),
    ORIGINAL: (),
    "groups of 1": ("--statistics_batch", "1"),
    "5 epochs": ("--epochs", "5"),
    "last epoch": ("--keep", "last"),
    "frozen backbone": ("--freeze",),
    "frozen backbone at lr 0.01": ("--freeze", "--lr", "0.01"),
    "lr 0.001": ("--lr", "0.001"),
    "lr 0.01": ("--lr", "0.01"),
}
"""What each changes of `bkn-zoo train`, in the order in which they are run; the second and third are no trainings."""

NOT_RUN = "not run yet"
UNKNOWN = "does not know them"


def read_study(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def top1(record: dict[str, Any]) -> float:
    """On the test images, by the statistics that were chosen without them."""
    return record["test"][record["chosen_statistics"]]["top1"]


def study_table(records: Sequence[dict[str, Any]]) -> str:
    """A row for each arm, a column for each data set: the mean over seeds, and ± their standard deviation."""

    def cell(arm: str, dataset: str) -> str:
        found = [record for record in records if (record["arm"], record["dataset"]) == (arm, dataset)]
        values = [top1(record) for record in found if "test" in record]
        if not values:
            return UNKNOWN if found else NOT_RUN
        few = "" if len(values) == len(SEEDS) else f" ({len(values)} of {len(SEEDS)} seeds)"
        return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "") + few

    rows = [
        {"arm": arm, "options": f"`{' '.join(options)}`" if options else ""}
        | {shown: cell(arm, dataset) for dataset, shown in SETS.items()}
        for arm, options in ARMS.items()
    ]
    return table(rows, list(rows[0]))
