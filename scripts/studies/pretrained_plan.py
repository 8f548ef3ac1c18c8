"""Pretrained networks with tiny batches: which trainings an arm needs, and how its learning rate is chosen."""

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.errors import InputError
from studies.base import Record, Run

PLAN = Path(__file__).with_name("pretrained.toml")
ARMS = {
    "bn": "BN",
    "frozen": "frozen BN",
    "adabn": "AdaBN, then frozen",
    "partial": "partial BN",
    "gn": "GroupNorm",
    "measured": "BKN, measured gain",
    "learned": "BKN, learned gain",
    "linkless": "BKN, learned gain, A = 0",
}
BELIEVING = ("measured", "learned", "linkless")
TUNED_BATCH = 2
SEEDS = (1, 2, 3)
LIMITS = (1e-6, 0.3)  # of learning rates
GAINS = (0.0, 0.01, 0.03, 0.1, 0.3)  # fixed gains that are compared with the measured ones


@dataclass(frozen=True)
class Experiment:
    """One data set with its trainings; pretrained.toml explains the fields."""

    name: str
    title: str
    data: str
    reader: str
    task: str
    size: Sequence[int]
    measured: int
    tuned: int
    images: int
    batches: Sequence[int]
    rates: Sequence[float]
    precision: str
    balance: float
    domains: Sequence[str] = ()

    @property
    def targets(self) -> Sequence[str]:
        """The domains that are left out in turn; one empty name if there are no domains."""
        return self.domains or ("",)

    @property
    def metric(self) -> str:
        return {"classification": "top1", "segmentation": "miou"}[self.task]


@dataclass(frozen=True)
class Training:
    """One training of an arm.

    Attributes:
        stage: "rate" (chooses the learning rate), "gain" (one fixed gain for all norms) or "final".
        target: the domain that is left out, or "".
        rate: learning rate of this batch size.
        images: seen in total.
        gain: of all norms, in the stage "gain".
    """

    stage: str
    target: str
    batch: int
    rate: float
    seed: int
    images: int
    gain: float | None = None

    @property
    def steps(self) -> int:
        return self.images // self.batch

    @cached_property
    def key(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Arm(Run):
    """All trainings of one arm on one data set, which one process does: it builds and captures the network once."""

    experiment: Experiment
    arm: str

    @classmethod
    def of(cls, experiment: Experiment, arm: str) -> "Arm":
        return cls(f"{experiment.name}.{arm}", 0, experiment, arm)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Everything that determines the result."""
        own = {name: value for name, value in dataclasses.asdict(self.experiment).items() if name != "title"}
        return {**own, "arm": self.arm, "seeds": list(SEEDS)}

    @cached_property
    def key(self) -> str:
        return json.dumps(self.plan, sort_keys=True)

    @property
    def data(self) -> str:
        return self.experiment.data

    @property
    def groups(self) -> tuple[str, ...]:
        return (self.experiment.name, self.arm)

    @property
    def like(self) -> str:
        """Arms differ in speed; and an arm that does not finish in time continues later."""
        return self.name

    @property
    def epochs(self) -> int:
        """Number of trainings, if no rate has to be added to the list."""
        one = len(self.experiment.rates) + len(self.experiment.batches) * len(SEEDS)
        one += len(GAINS) if self.arm == "measured" else 0
        return one * len(self.experiment.targets)

    def trainings(self, done: Mapping[str, Record]) -> list[Training]:
        """The trainings that are known so far, given the finished ones by their keys."""
        found: list[Training] = []
        for target in self.experiment.targets:
            found += self.tuning(target, done)
            found += self.gains(target, done)
        for batch in sorted(self.experiment.batches, key=lambda batch: batch != TUNED_BATCH):
            for target in self.experiment.targets:
                found += self.final(target, batch, done)
        return found

    def tried(self, target: str, done: Mapping[str, Record]) -> dict[float, float]:
        """Validation results of the finished trainings that choose the learning rate, by learning rate."""
        rates = [r for r in done.values() if r["stage"] == "rate" and r["target"] == target]
        return {record["rate"]: best_validation(record) for record in rates}

    def tuning(self, target: str, done: Mapping[str, Record]) -> list[Training]:
        wanted = next_rates(self.experiment.rates, self.tried(target, done))
        return [Training("rate", target, TUNED_BATCH, rate, 0, self.experiment.tuned) for rate in wanted]

    def rate(self, target: str, done: Mapping[str, Record]) -> float | None:
        """The learning rate for TUNED_BATCH that is best on the validation images; None before all are tried."""
        tried = self.tried(target, done)
        if set(next_rates(self.experiment.rates, tried)) - set(tried):
            return None
        return best_rate(tried)

    def final(self, target: str, batch: int, done: Mapping[str, Record]) -> list[Training]:
        rate = self.rate(target, done)
        if rate is None:
            return []
        rate *= (batch / TUNED_BATCH) ** 0.5
        return [Training("final", target, batch, rate, seed, self.experiment.images) for seed in SEEDS]

    def gains(self, target: str, done: Mapping[str, Record]) -> list[Training]:
        """Fixed gains at the arm's learning rate; for the arm with measured gains, to compare with them."""
        rate = self.rate(target, done)
        if self.arm != "measured" or rate is None:
            return []
        return [Training("gain", target, TUNED_BATCH, rate, 0, self.experiment.tuned, gain) for gain in GAINS]


@dataclass(frozen=True)
class Facts(Run):
    """What is measured on a data set before any training: T, V, gains and the advice."""

    experiment: Experiment

    @classmethod
    def of(cls, experiment: Experiment) -> "Facts":
        return cls(f"{experiment.name}.facts", 0, experiment)

    @property
    def groups(self) -> tuple[str, ...]:
        return ("facts",)

    @property
    def data(self) -> str:
        return self.experiment.data


@dataclass(frozen=True)
class Drift(Run):
    """What the start of BKN leaves of the pretrained features, before any training."""

    experiment: Experiment

    @classmethod
    def of(cls, experiment: Experiment) -> "Drift":
        return cls("drift", 0, experiment)

    @property
    def groups(self) -> tuple[str, ...]:
        return ("drift",)

    @property
    def data(self) -> str:
        return self.experiment.data


def best_validation(record: Record) -> float:
    """Of the modes, the best; a training whose loss was not finite is the worst."""
    return max(record["validation"].values()) if "validation" in record else -1.0


def best_rate(tried: Mapping[float, float]) -> float:
    """Of equal results the highest rate: a network that learned nothing needs a higher one."""
    return max(tried, key=lambda rate: (tried[rate], rate))


def next_rates(rates: Sequence[float], tried: Mapping[float, float]) -> list[float]:
    """The learning rates to try: the list and, where the best of those tried is at an end, the next one there."""
    wanted = sorted({*rates, *tried})
    if tried and set(tried) >= set(wanted):
        best = best_rate(tried)
        if best == wanted[0] > LIMITS[0]:
            wanted.insert(0, neighbour(best, -1))
        elif best == wanted[-1] < LIMITS[1]:
            wanted.append(neighbour(best, 1))
    return wanted


def neighbour(rate: float, step: int) -> float:
    """The next of ..., 0.001, 0.003, 0.01, ..."""
    return float(f"{10 ** ((round(2 * math.log10(rate)) + step) / 2):.0e}")


def finished(record: Record | None) -> dict[str, Record]:
    """The trainings of an arm's record, by key."""
    fields = [field.name for field in dataclasses.fields(Training)]
    trainings = record["trainings"] if record else []
    return {Training(**{name: each[name] for name in fields}).key: each for each in trainings}


def chosen_mode(finals: Iterable[Record]) -> str | None:
    """The statistics of an arm with one batch size: those with the best mean on the validation images over seeds."""
    done = [each["validation"] for each in finals if "validation" in each]
    return max(done[0], key=lambda mode: mean(each[mode] for each in done)) if done else None


def finals(record: Record | None, target: str, batch: int) -> list[Record]:
    """The final trainings of an arm."""
    trainings = record["trainings"] if record else []
    return [t for t in trainings if (t["stage"], t["target"], t["batch"]) == ("final", target, batch)]


def measured(record: Record | None, target: str, batch: int, mode: str | None = None) -> list[float]:
    """The test results of the seeds, with the chosen statistics or those of `mode`."""
    done = finals(record, target, batch)
    mode = mode or chosen_mode(done)
    return [each["test"][mode] for each in done if mode in each.get("test", {})]


def read_experiments(path: Path = PLAN) -> list[Experiment]:
    """Those of a file such as pretrained.toml."""
    try:
        content = tomllib.loads(path.read_text())
        return [Experiment(name, **each) for name, each in content.items()]
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name a file of experiments.") from None
    except (AttributeError, TypeError) as error:
        raise InputError(f"{path} is not a file of experiments ({error}): write it as its head says.") from None
