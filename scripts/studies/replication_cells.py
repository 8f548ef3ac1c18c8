"""What the records of the replication say about its arms, and about the differences between them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import read_recipe
from studies.base import Record
from studies.chance import Deviation, Difference, between, mean_of, typical
from studies.records import best_mode, chosen_statistics, learned, measured, read_run, recipe_key
from studies.replication_plan import CLASSES, Arm, Experiment, Plan, Training, listed


def read_records(*folders: Path) -> dict[str, Record]:
    """What runs left that can stand for planned ones, by the key of their recipes; of two, that of the first folder.

    A record of running averages that were taken anew stands for none: a recipe does not say so, and the replication
    never does it.
    """
    records: dict[str, Record] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            record = read_run(path)
            recipe = read_recipe(None, record["recipe"])
            shared = record.get("processes", 1) > 1 and recipe.statistics_batch is None  # groups are smaller then
            if record.get("statistics_anew") or shared:
                continue
            records.setdefault(recipe_key(recipe, record.get("width", 1.0), record.get("every", 1)), record)
    return records


@dataclass(frozen=True)
class Cell:
    """The records of an arm."""

    arm: Arm
    records: tuple[Record, ...]

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if "failed" not in record]

    @cached_property
    def chosen(self) -> str:
        """The mode that was best on the validation images, in the mean over seeds."""
        return chosen_statistics(self.good)

    def top1(self, mode: str | None = None, images: str = "test") -> list[float]:
        """Of each seed, in percent; without a mode, in the one that is chosen.

        On the test images, a mode may also be one of the other rules, of those networks that were asked for it, or
        "recalibrated": of those with running statistics taken anew, the one that was best on the validation images.
        """
        return [top1 for top1 in self._asked(mode, images) if top1 is not None]

    def learned(self, mode: str | None = None) -> bool:
        """Whether all its seeds did."""
        dataset = self.arm.runs[0].recipe.dataset
        return len(self.good) == len(self.records) and learned(self.top1(mode), CLASSES[dataset])

    def gaps(self, this: str | None, that: str | None) -> list[float]:
        """Between two modes on the test images, network by network."""
        pairs = zip(self._asked(this), self._asked(that), strict=True)
        return [a - b for a, b in pairs if a is not None and b is not None]

    def _asked(self, mode: str | None, images: str = "test") -> list[float | None]:
        """None for a network that was not asked for it."""
        if mode == "recalibrated":
            asked = [each["recalibrated_validation"] for each in self.good if "recalibrated_validation" in each]
            mode = f"recalibrated {best_mode(asked)}" if asked else mode
        return [measured(each, images).get(mode or self.chosen, {}).get("top1") for each in self.good]


def cell(arm: Arm, records: Mapping[str, Record]) -> Cell:
    return Cell(arm, tuple(records[run.key] for run in arm.runs if run.key in records))


def missing(plan: Plan, records: Mapping[str, Record]) -> list[Training]:
    return [run for run in plan.runs() if run.key not in records]


def deviation(setting: str, plan: Plan, records: Mapping[str, Record], images: str = "test") -> Deviation | None:
    """The one that is typical of a setting; None where no arm has several seeds.

    Arms of which a seed diverged or did not learn are left out: how far the others are apart is no chance of networks
    that train.
    """
    found = (cell(arm, records) for arm in plan.arms.values() if arm.setting == setting)
    return typical(each.top1(images=images) for each in found if each.records and each.learned())


def verdict(claim: Mapping[str, Any], found: Difference) -> str:
    """Whether it held; or what else its not holding means, where the claim says so."""
    said = found.verdict(claim.get("same", False))
    return said if said.startswith("held") else claim.get("otherwise", said)


def difference(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> Difference | None:
    """That a claim is about; None where runs are missing. Differences within the same runs are taken run by run."""
    if "this" not in claim:
        return None
    if claim.get("steps"):
        return steps_saved(claim, plan, records)
    modes, images = claim.get("modes", [None, None]), claim.get("images", "test")
    this, that = (best(listed(claim[side]), plan, records) for side in ("this", "that"))
    if this.arm is that.arm:
        gaps = this.gaps(*modes)
        return mean_of(gaps, (len(gaps), len(gaps))) if gaps else None
    ours, theirs = this.top1(modes[0], images), that.top1(modes[1], images)
    if not ours or not theirs:
        return None
    return between(ours, theirs, deviation(this.arm.setting, plan, records, images))


@dataclass(frozen=True)
class Lead:
    """Of an arm of BKN over another arm."""

    arm: Arm
    over: Arm
    points: Difference


def leads_by_length(plan: Plan, records: Mapping[str, Record]) -> list[tuple[Lead, Lead]]:
    """After a short training and after one of full length, of settings NAME and NAME_full.

    Over BN and over BKN with A held at zero, at equal batches, and over GroupNorm, which has no groups of images.
    """
    found = []
    for arm in plan.arms.values():
        short, _, rest = arm.name.partition("_full.bkn.")
        if not rest or arm.ablation:
            continue
        for other in (f"bn.{rest}", f"gn.{arm.gradient}-{arm.gradient}", f"bkn.{rest}.link=False"):
            leads = [_lead(f"{each}.bkn.{rest}", f"{each}.{other}", plan, records) for each in (short, f"{short}_full")]
            if leads[0] and leads[1]:
                found.append((leads[0], leads[1]))
    return found


def _lead(this: str, that: str, plan: Plan, records: Mapping[str, Record]) -> Lead | None:
    if this not in plan.arms or that not in plan.arms:
        return None
    points = difference({"this": this, "that": that}, plan, records)
    return None if points is None else Lead(plan.arms[this], plan.arms[that], points)


def best(names: Sequence[str], plan: Plan, records: Mapping[str, Record]) -> Cell:
    """Of several arms, the one that was best on its validation images; one without records, if there is any.

    One that diverged is a result, too, and the worst.
    """
    for name in names:
        if name not in plan.arms:
            raise InputError(f"a claim is about {name}, which no experiment runs: name one of its arms.")
    found = [cell(plan.arms[name], records) for name in names]

    def worth(each: Cell) -> float:
        return mean(each.top1(images="validation")) if each.good else -math.inf if each.records else math.inf

    return max(found, key=worth)


def steps_saved(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> Difference | None:
    """Share of the steps, in percent, that `this` can do without to be as good as `that` is at its end (validation)."""
    this, that = (cell(plan.arms[claim[name]], records).good for name in ("this", "that"))
    if not this or not that:
        return None

    def curve(record: Record) -> list[tuple[int, float]]:
        return [(line["step"], max(line["top1"].values())) for line in record["curve"] if "top1" in line]

    goal = mean(max(measured(record, "validation")[mode]["top1"] for mode in MODES) for record in that)
    saved = [
        100
        * (
            1
            - next((step for step, top1 in curve(record) if top1 >= goal), curve(record)[-1][0]) / curve(record)[-1][0]
        )
        for record in this
        if curve(record)
    ]
    return mean_of(saved, (len(this), len(that))) if saved else None


def cells(experiment: Experiment, records: Mapping[str, Record]) -> Iterator[Cell]:
    for arm in experiment.arms:
        yield cell(arm, records)
