"""Pretrained networks with tiny batches: which runs there are, and what was chosen by what they left."""

import dataclasses
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.training.recipes import Recipe, read_recipe
from studies.base import Record, Run

PLAN = Path(__file__).with_name("pretrained.toml")
ARMS = {"bn": "BN", "frozen": "frozen BN", "gn": "GroupNorm", "bkn": "BKN"}


@dataclass(frozen=True)
class FineTuning(Run):
    """One training of an arm, with one setting of what is tried.

    Attributes:
        batch: images in the whole batch, which are one statistics group.
        images: seen in all.
        size: of the network's input; None where images are taken as they are.
        shared: fields of the recipe that all runs of the experiment have in common.
        folder: of the data set.
    """

    experiment: str
    arm: str
    batch: int
    settings: Mapping[str, Any]
    images: int
    size: int | None
    shared: Mapping[str, Any]
    folder: str

    @property
    def steps(self) -> int:
        return self.images // self.batch

    @cached_property
    def recipe(self) -> Recipe:
        """For the optimizer: the learning rate grows with the batch."""
        own = {"lr": self.settings["lr"] * self.batch, "gradient_batch": self.batch, "seed": self.seed}
        return read_recipe(None, {"model": "", "dataset": self.experiment, "epochs": 1, **self.shared, **own})

    def record(self) -> dict[str, Any]:
        """All that decides it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("name", "folder")}

    @cached_property
    def key(self) -> str:
        return json.dumps(self.record(), sort_keys=True)

    @property
    def data(self) -> str:
        return self.folder

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.experiment,)

    @property
    def like(self) -> str:
        return f"{self.experiment}, {self.batch}"


@dataclass(frozen=True)
class Experiment:
    """One task: its arms, each with the settings that are tried of it.

    Attributes:
        data: the folder of its data set.
        metric: what is measured, one of METRICS.
        arms: the settings of each.
    """

    name: str
    title: str
    data: str
    metric: str
    images: int
    batches: Sequence[int]
    seeds: int
    recipe: Mapping[str, Any]
    arms: Mapping[str, Sequence[Mapping[str, Any]]]
    size: int | None = None

    def run(self, arm: str, batch: int, settings: Mapping[str, Any], seed: int) -> FineTuning:
        own = ",".join(f"{name}={value}".replace(" ", "_") for name, value in settings.items())
        name = f"{self.name}.{arm}.batch={batch}.{own}.seed={seed}"
        return FineTuning(name, seed, self.name, arm, batch, settings, self.images, self.size, self.recipe, self.data)

    def changed(self, changes: Mapping[str, Any]) -> "Experiment":
        """With other fields of the recipe."""
        return dataclasses.replace(self, recipe={**self.recipe, **changes})

    def tried(self, arm: str, batch: int) -> list[FineTuning]:
        """The runs by which the arm's setting is chosen."""
        return [self.run(arm, batch, settings, 0) for settings in self.arms[arm]]

    def chosen(self, arm: str, batch: int, records: Mapping[str, Record]) -> FineTuning | None:
        """That of them which was best on the validation images; None before all are done."""
        tried = self.tried(arm, batch)
        if any(run.key not in records for run in tried):
            return None
        return max(tried, key=lambda run: max(records[run.key].get("validation", {"none": -1.0}).values()))

    def shown(self, arm: str, batch: int, records: Mapping[str, Record]) -> list[FineTuning]:
        """The runs of all seeds, with the chosen setting."""
        best = self.chosen(arm, batch, records)
        return [] if best is None else [self.run(arm, batch, best.settings, seed) for seed in range(self.seeds)]

    def planned(self, records: Mapping[str, Record]) -> list[FineTuning]:
        """All runs, as far as they are known: for each batch first what chooses, then what is shown.

        Large batches come first: they take the fewest steps.
        """
        runs = [
            run
            for batch in sorted(self.batches, reverse=True)
            for stage in (self.tried, lambda arm, batch: self.shown(arm, batch, records))
            for arm in self.arms
            for run in stage(arm, batch)
        ]
        return list({run.key: run for run in runs}.values())


@dataclass(frozen=True)
class Drift(Run):
    """What norms do to the pretrained features, before any training."""

    NAME = "drift/drift"
    experiment: Experiment

    @classmethod
    def of(cls, experiment: Experiment) -> "Drift":
        return cls(cls.NAME, 0, experiment)

    @property
    def groups(self) -> tuple[str, ...]:
        return ("drift",)

    @property
    def data(self) -> str:
        return self.experiment.data


def read_experiments(path: Path = PLAN) -> list[Experiment]:
    """Those of a file such as pretrained.toml."""
    try:
        content = tomllib.loads(path.read_text())
        return [Experiment(name, **{**each, "arms": _arms(each["arms"])}) for name, each in content.items()]
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name a file of experiments.") from None
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is not a file of experiments ({error}): write it as its head says.") from None


def _arms(arms: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Each value of an option with each of the others."""
    return {
        arm: [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
        for arm, options in arms.items()
    }


def diverged(experiment: Experiment, arm: str, batch: int, records: Mapping[str, Record]) -> int:
    """How many seeds of the chosen setting failed, and are not in what is measured."""
    return sum("failed" in records.get(run.key, {}) for run in experiment.shown(arm, batch, records))


def measured(
    experiment: Experiment, arm: str, batch: int, records: Mapping[str, Record], mode: str = ""
) -> list[float]:
    """The metric on the test images, of each seed that is done; without a mode, in that which the run chose."""
    done = [records[run.key] for run in experiment.shown(arm, batch, records) if run.key in records]
    return [
        each["test"][mode or each["chosen_statistics"]]
        for each in done
        if "failed" not in each and (mode or each["chosen_statistics"]) in each["test"]
    ]
