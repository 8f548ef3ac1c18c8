"""What a study is: planned runs, their records, and what pages say of them.

A new study is a new file beside this one, with a subclass of `Study` and, as STUDY, one of it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS = ROOT / "results", ROOT / "docs"
OFFICIAL = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "tiny_imagenet": "tiny-imagenet-200"}
"""The folders of data sets, by their names in recipes."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One planned training.

    Attributes:
        name: for people, and of the record's file; ends with .seed=N, where there are several.
        seed: of its training.
    """

    name: str
    seed: int

    @property
    def key(self) -> str:
        """All that decides it: a record with the same key is this run's."""
        return self.name

    @property
    def groups(self) -> Sequence[str]:
        """What --only may name, beside the run itself."""
        return ()

    @property
    def data(self) -> str:
        """The folder that it needs within that of --data."""
        return ""

    @property
    def like(self) -> str:
        """The same for runs whose epochs take equally long."""
        return ""

    @property
    def epochs(self) -> int:
        """How many lines its log.jsonl will have, if it writes one."""
        return 1


class Study:
    """What is trained, and what is said of it. All methods but `planned` and `train` may stay as they are.

    Attributes:
        name: of its file.
        results: the folder of its records.
        plots: the folder of its pictures.
    """

    name: str
    results: Path
    plots: Path

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add what the study alone needs."""

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Run]:
        """All runs that are known, in the order in which they are trained; what was found may decide on more.

        Args:
            records: what is done.
            changes: fields of all recipes, by --set.
        """
        raise NotImplementedError

    def records(self, folder: Path) -> dict[str, Record]:
        """What runs left, by their keys."""
        found = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
        return {self.key(record): record for record in found}

    def key(self, record: Record) -> str:
        """That of the run that left a record."""
        return record["name"]

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        """Do once what several processes would do at the same time: decode images, look for weights."""

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        """Train and measure; returns the record, to which command, machine and seed are added."""
        raise NotImplementedError

    def pack(self, args: argparse.Namespace) -> None:
        """Put what runs need of the data sets in `args.data` into the folder `args.pack`."""
        raise InputError(f"{self.name} takes the data sets as they are: leave --pack out.")

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        """For each page, the contents of its marked regions."""
        return {}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        """Pictures by name; None for one that there are no runs for."""
        return {}


def device(args: argparse.Namespace) -> Any:
    import torch

    return torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
