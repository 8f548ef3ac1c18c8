"""Compares the defaults of fine-tuning with other choices, on small parts of public data sets: docs/finetuning.md.

The runs are finished; the history of this repository has the code that trained them, until commit 011b5536.
finetuning.toml says what was trained. A record of results/finetune/ is one run: `test` has accuracy by statistics at
inference. Records of another checkpoint are of earlier defaults.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.base import DOCS, RESULTS, Record, Study
from studies.stats import spread

PLAN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
CHECKPOINT, SETS, ARMS = PLAN["checkpoint"], PLAN["sets"], PLAN["arms"]
TUNED = [arm for arm, fields in ARMS.items() if "lr" in fields]
"""Learning rates of the loop of timm, of which one is chosen for each set."""
UNKNOWN = "does not know them"


class Defaults(Study):
    name = "finetuning"
    results = RESULTS / "finetune"

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.render import frame

        small = json.loads((RESULTS / "small_folder.json").read_text())["rows"]
        found = list(records.values())
        tables = {"rivals": rival_rows(found), "study": study_rows(found), "small": small_folders(small)}
        return {DOCS / "finetuning.md": {name: frame(rows) for name, rows in tables.items()}}


STUDY = Defaults()


def tuned(dataset: str, records: Sequence[Record]) -> str:
    """The learning rate of timm with the lowest validation loss with the first seed."""
    runs = [each for arm in TUNED for each in _runs(records, arm, dataset) if each["seed"] == 0]
    return min(runs, key=lambda run: run["validation_loss"])["arm"]


def options(fields: Mapping[str, Any]) -> list[str]:
    """The options of the equivalent command."""
    return [
        word
        for name, value in fields.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]


def top1(record: Record) -> float:
    """On the test images, by the statistics that were chosen without them."""
    return record["test"][record["chosen_statistics"]]["top1"]


def study_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each arm, a column for each data set: the mean over seeds, and ± their deviation."""

    def cell(arm: str, dataset: str) -> str:
        runs = _runs(records, arm, dataset)
        return UNKNOWN if "reason" in runs[0] else spread(map(top1, runs), 1)

    return [
        {"arm": arm, "options": f"`{' '.join(options(fields))}`" if fields else ""}
        | {shown: cell(arm, dataset) for dataset, shown in SETS.items()}
        for arm, fields in ARMS.items()
        if arm not in TUNED
    ]


def rival_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """A row for each way to fine-tune, with the seconds of its training, without the test."""

    def cell(arm: str, dataset: str) -> str:
        runs = _runs(records, arm, dataset)
        lr = f"lr {ARMS[arm]['lr']:g}; " if arm in TUNED else ""
        return f"{spread(map(top1, runs), 1)}; {lr}{mean(record['seconds'] for record in runs):.0f} s"

    ways = {
        "`bkn-zoo train`": dict.fromkeys(SETS, "defaults"),
        "a loop with timm": {dataset: tuned(dataset, records) for dataset in SETS},
        "a linear probe": dict.fromkeys(SETS, "linear probe"),
    }
    return [
        {"by": way} | {shown: cell(arms[dataset], dataset) for dataset, shown in SETS.items()}
        for way, arms in ways.items()
    ]


def _runs(records: Sequence[Record], arm: str, dataset: str) -> list[Record]:
    return [
        each for each in records if (each["checkpoint"], each["arm"], each["dataset"]) == (CHECKPOINT, arm, dataset)
    ]


def small_folders(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """A row for each run on 300 images in five classes."""
    names = SETS | PLAN["small"]
    return [
        {
            "images of": names[row["set"]], "seed": row["seed"], "processor": row["hardware"],
            "seconds": round(row["seconds"]), "epochs": row["epochs"], "defaults": f"{row['test']['top1']:.1f}",
            "linear probe": f"{row['linear_probe']['top1']:.1f}",
        }
        for row in rows
    ]  # fmt: skip
