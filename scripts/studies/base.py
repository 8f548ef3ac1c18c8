"""The base classes of studies: `Run`, one planned training, and `Study`, a plan, its records and its pages.

A study is a TOML file (what to train or measure) and a module of the same name (what is special) that defines STUDY.
Modules of studies import neither pandas nor scipy, which machines that train may lack: what makes tables and figures
is imported when it is called.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
OFFICIAL = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "tiny_imagenet": "tiny-imagenet-200"}
"""The folders of data sets, by their names in recipes."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One planned training.

    Attributes:
        name: name of the record's file; ends with .seed=N if there are several seeds.
        seed: seed of the training.
        groups: names by which --only selects the run, besides its own.
        data: the folder that the run needs inside the folder of --data.
        like: equal for runs whose epochs take equally long.
        epochs: number of epochs; a run may log each one as a line of log.jsonl.
    """

    name: str
    seed: int
    groups: Sequence[str] = ()
    data: str = ""
    like: str = ""
    epochs: int = 1

    @property
    def key(self) -> str:
        """Everything that determines the result: a record with the same key is the record of this run."""
        return self.name


class Study:
    """A plan of runs, and the tables and figures made from their records.

    Attributes:
        name: name of the study's file.
        results: folder of the records.
    """

    name: str
    results: Path

    def planned(self, changes: Mapping[str, Any]) -> Sequence[Run]:
        """All runs, in the order of training.

        Args:
            changes: recipe fields overridden by --set.
        """
        return []

    def records(self, folder: Path) -> dict[str, Record]:
        """The records in a folder, by key."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        """Work to do once, before several processes start: decode images, find weights."""

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        """Train and measure. Returns the record; the runner adds command, hardware, versions and seed."""
        raise NotImplementedError

    def regions(self, records: Mapping[str, Record]) -> Mapping[Path, Mapping[str, Any]]:
        """The contents of the marked regions of each page, as `render.rendered` takes them."""
        return {}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        """Figures by name; None if the records for a figure are missing."""
        return {}


def device(args: argparse.Namespace) -> Any:
    import torch

    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
