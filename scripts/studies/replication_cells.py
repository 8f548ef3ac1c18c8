"""The results of the replication's arms, and the differences between them, from the records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from bkn_zoo.errors import InputError
from studies.base import Record
from studies.records import CLASSES, best_mode, chosen_statistics, learned, measured
from studies.replication_plan import Arm, Plan, Training, listed
from studies.stats import Deviation, Difference, between, gaps, mean_of, typical, typical_of_pairs


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
        """The mode with the best mean accuracy on the validation images."""
        return chosen_statistics(self.good)

    def top1(self, mode: str | None = None, images: str = "test") -> list[float]:
        """Top-1 accuracy of each seed in percent, by default in the chosen mode.

        On the test images, a mode may also be another rule, for the networks that were measured with it, or
        "recalibrated": the better mode on validation images with recomputed running statistics.
        """
        return list(self.by_seed(mode, images).values())

    def by_seed(self, mode: str | None = None, images: str = "test") -> dict[int, float]:
        """The same, by seed."""
        asked = zip(self.good, self._asked(mode, images), strict=True)
        return {record["seed"]: top1 for record, top1 in asked if top1 is not None}

    def learned(self, mode: str | None = None) -> bool:
        """Whether all its seeds learned."""
        dataset = self.arm.runs[0].recipe.dataset
        return len(self.good) == len(self.records) and learned(self.top1(mode), CLASSES[dataset])

    def gaps(self, this: str | None, that: str | None) -> list[float]:
        """Differences between two modes on the test images, network by network."""
        pairs = zip(self._asked(this), self._asked(that), strict=True)
        return [a - b for a, b in pairs if a is not None and b is not None]

    def _asked(self, mode: str | None, images: str = "test") -> list[float | None]:
        """The accuracy of a network with a mode or rule; None if it was not measured."""
        if mode == "recalibrated":
            asked = [each["recalibrated_validation"] for each in self.good if "recalibrated_validation" in each]
            mode = f"recalibrated {best_mode(asked)}" if asked else mode
        return [measured(each, images).get(mode or self.chosen, {}).get("top1") for each in self.good]


def cell(arm: Arm, records: Mapping[str, Record]) -> Cell:
    return Cell(arm, tuple(records[run.key] for run in arm.runs if run.key in records))


def missing(plan: Plan, records: Mapping[str, Record]) -> list[Training]:
    return [run for run in plan.runs() if run.key not in records]


def deviation(setting: str, plan: Plan, records: Mapping[str, Record], images: str = "test") -> Deviation | None:
    """The typical deviation of a setting; None if no arm has several seeds.

    Arms with a seed that diverged or did not learn are left out, because their deviation is not that of networks that
    train.
    """
    found = (cell(arm, records) for arm in plan.arms.values() if arm.setting == setting)
    return typical(each.top1(images=images) for each in found if each.records and each.learned())


def paired_deviation(setting: str, plan: Plan, records: Mapping[str, Record]) -> Deviation | None:
    """The typical deviation of a setting's differences between runs with the same seed."""
    claims = [claim for each in plan.experiments if each.paired for claim in each.differences]
    pairs = [[best(listed(claim[side]), plan, records) for side in ("this", "that")] for claim in claims]
    pairs = [pair for pair in pairs if pair[0].arm.setting == setting]
    arms = {each.arm.name for pair in pairs for each in pair if each.records}
    return typical_of_pairs([gaps(this.by_seed(), that.by_seed()) for this, that in pairs], len(arms))


def difference(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> Difference | None:
    """The difference of a claim; None if runs are missing.

    Within the same runs, it is computed run by run; of a claim that is `paired`, between runs with the same seed.
    """
    if "this" not in claim:
        return None
    modes, images = claim.get("modes", [None, None]), claim.get("images", "test")
    this, that = (best(listed(claim[side]), plan, records) for side in ("this", "that"))
    if this.arm is that.arm:
        own = this.gaps(*modes)
        return mean_of(own) if own else None
    setting, ours, theirs = this.arm.setting, this.by_seed(modes[0], images), that.by_seed(modes[1], images)
    if claim.get("paired"):
        pairs = gaps(ours, theirs)
        return mean_of(pairs, usual=paired_deviation(setting, plan, records)) if pairs else None
    if not ours or not theirs:
        return None
    return between([*ours.values()], [*theirs.values()], deviation(setting, plan, records, images))


@dataclass(frozen=True)
class Lead:
    """The lead of an arm of BKN over another arm."""

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
            raise InputError(f"a claim is about {name}, which no experiment runs: correct the name.")
    found = [cell(plan.arms[name], records) for name in names]

    def worth(each: Cell) -> float:
        return mean(each.top1(images="validation")) if each.good else -math.inf if each.records else math.inf

    return max(found, key=worth)
