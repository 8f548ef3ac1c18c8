"""The plan of a replication, read from a file of experiments, and the records that its runs left.

A planned run and a record belong together if their recipes are the same; names are for people. A record of running
averages that were taken anew stands for no planned run: a recipe does not say so, and a replication never does it.
"""

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.chance import Deviation, Difference, between, mean_of, typical
from bkn_zoo.training.recipes import Recipe, read_recipe

Record = Mapping[str, Any]
CLASSES = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200, "imagenet": 1000}
"""How many a data set has, by its name in a recipe."""
NORMS = {"bkn": "BKN", "bn": "BN", "brn": "BRN", "gn": "GroupNorm"}
WORDS = {
    "link=False": "A held at zero", "prediction_bias=True": "a bias in the prediction",
    "gain_per_channel=True": "a gain per channel", "shared_process_noise=False": "R per channel",
}  # fmt: skip
HELD = f"{NORMS['bkn']}, {WORDS['link=False']}"
"""How an arm of BKN without the link between layers is called."""


@dataclass(frozen=True)
class Run:
    """One training: a recipe, and what a recipe does not say.

    Attributes:
        width: factor of the network's channels.
        every: the training images are each `every`-th of the data set's.
    """

    name: str
    recipe: Recipe
    width: float = 1.0
    every: int = 1

    @cached_property
    def key(self) -> str:
        return recipe_key(self.recipe, self.width, self.every)


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seeds alone: a cell of a table.

    Attributes:
        ablation: it is there to be compared with another, which has the same norm and the same batches.
    """

    name: str
    setting: str
    label: str
    gradient: int
    group: int
    runs: tuple[Run, ...]
    paper: float | None = None
    ablation: bool = False

    @property
    def batches(self) -> str:
        """Gradient and statistics batch, to show."""
        return f"{self.gradient}, {self.group}"


@dataclass(frozen=True)
class Experiment:
    """A table: its arms, and the differences between them that it is about."""

    name: str
    title: str
    setting: str
    place: str | None
    seeds: int
    arms: tuple[Arm, ...]
    differences: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Plan:
    settings: Mapping[str, Mapping[str, Any]]
    experiments: tuple[Experiment, ...]
    claims: tuple[Mapping[str, Any], ...]

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By name."""
        return {arm.name: arm for experiment in self.experiments for arm in experiment.arms}

    def runs(self) -> list[Run]:
        """Each run once, in the order of the file: a row with all its seeds, then the next."""
        first: dict[str, Run] = {}
        for run in (run for experiment in self.experiments for arm in experiment.arms for run in arm.runs):
            first.setdefault(run.key, run)
        return list(first.values())


LAUNCHING = "graph", "compile"
"""Fields of a recipe that say how it is launched, and nothing about what is trained."""


def recipe_key(recipe: Recipe, width: float = 1.0, every: int = 1) -> str:
    """The same for the same training, however it is launched."""
    fields = {name: value for name, value in dataclasses.asdict(recipe).items() if name not in LAUNCHING}
    return json.dumps([fields, float(width), every], sort_keys=True)


def read_plan(path: Path, recipes: Path, overrides: Mapping[str, Any] | None = None) -> Plan:
    """The experiments of a file, with fields of all recipes overridden."""
    try:
        content = tomllib.loads(path.read_text())
        settings = content["settings"]
        experiments = tuple(_experiment(each, settings, recipes, overrides or {}) for each in content["experiments"])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): name a file of experiments.") from None
    except KeyError as error:
        raise InputError(f"{path} lacks {error}: write it as the comment at its head says.") from None
    return Plan(settings, tuple(_with_all_seeds(experiments)), tuple(content.get("claims", [])))


def _with_all_seeds(experiments: Sequence[Experiment]) -> Iterator[Experiment]:
    """An arm has as many seeds as the experiment that asks for most of them."""
    every = [arm for experiment in experiments for arm in experiment.arms]
    seeds = {arm.name: arm.runs for arm in sorted(every, key=lambda arm: len(arm.runs))}
    for each in experiments:
        arms = tuple(dataclasses.replace(arm, runs=seeds[arm.name]) for arm in each.arms)
        yield dataclasses.replace(each, arms=arms)


def _experiment(
    content: Mapping[str, Any], settings: Mapping[str, Any], recipes: Path, overrides: Mapping[str, Any]
) -> Experiment:
    arms = []
    for row in content["rows"]:
        unknown = set(row) - {"norm", "groups", "gradient", "options", "fields", "seeds", "width", "paper"}
        if unknown:
            raise InputError(f"experiment {content['name']}: a row does not take {sorted(unknown)[0]!r}.")
        options, fields, seeds = row.get("options", {}), row.get("fields", {}), row.get("seeds", content["seeds"])
        lists = [listed(row["groups"]), *map(listed, options.values()), *map(listed, fields.values())]
        for group, *values in itertools.product(*lists):
            chosen = dict(zip([*options, *fields], values, strict=True))
            own, changed = ({name: chosen[name] for name in names} for names in (options, fields))
            arms.append(_arm(row, content["setting"], settings, recipes, seeds, group, own, changed, overrides))
    name, title, setting, seeds = (content[field] for field in ("name", "title", "setting", "seeds"))
    about = tuple(content.get("differences", []))
    return Experiment(name, title, setting, content.get("place"), seeds, tuple(arms), about)


def _arm(
    row: Mapping[str, Any], name: str, settings: Mapping[str, Any], recipes: Path, seeds: int, group: int,
    options: dict[str, Any], fields: dict[str, Any], overrides: Mapping[str, Any],
) -> Arm:  # fmt: skip
    setting = dict(settings[name])
    file, every, schedule = recipes / f"{setting.pop('recipe')}.toml", setting.pop("every", 1), setting.pop("brn", {})
    base = read_recipe(file)
    gradient, width = row.get("gradient", base.gradient_batch), row.get("width", 1.0)
    if row["norm"] == "brn":  # with smaller gradient batches it has more steps
        options_in_steps = {key: round(steps * base.gradient_batch / gradient) for key, steps in schedule.items()}
    else:
        options_in_steps = {}
    changes = {
        **setting, "model": f"{base.model.rpartition('_')[0]}_{row['norm']}", "gradient_batch": gradient,
        "statistics_batch": None if group == gradient else group, **fields,
        **{f"norm_options.{option}": value for option, value in (options_in_steps | options).items()}, **overrides,
    }  # fmt: skip
    own = [f"{key}={value}" for key, value in sorted({**options, **fields}.items())]
    wide = ["wide"] if width != 1 else []
    arm = ".".join([name, row["norm"], f"{gradient}-{group}", *([",".join(own)] if own else []), *wide])
    runs = tuple(
        Run(f"{arm}.seed={seed}", read_recipe(file, {**changes, "seed": seed}), width, every) for seed in range(seeds)
    )
    shown = [WORDS.get(each, each.replace("=", " = ").replace("_", " ")) for each in own]
    shown += ["widened"] if wide else []
    label = ", ".join([NORMS[row["norm"]], *shown])
    ablation = bool(options) or width != 1 or (bool(fields) and gradient == base.gradient_batch)
    return Arm(arm, name, label, gradient, group, runs, row.get("paper"), ablation)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_run(path: Path) -> Record:
    """What a run left; with that of a published network, what it was asked later by scripts/evalnorm.py."""
    record = json.loads(path.read_text())
    later = path.parent.parent / "evalnorm" / path.name
    if later.exists():
        record["rules"] = {"EvalNorm": json.loads(later.read_text())["rows"][0], **record.get("rules", {})}
    return record


def read_records(*folders: Path) -> dict[str, Record]:
    """What runs left that can stand for planned ones, by the key of their recipes; of two, that of the first folder."""
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
            mode = f"recalibrated {_best(asked)}" if asked else mode
        return [measured(each, images).get(mode or self.chosen, {}).get("top1") for each in self.good]


def learned(top1: Sequence[float], classes: int) -> bool:
    """Whether each of several networks is better than guessing, and not by a little."""
    return min(top1) >= 2 * 100 / classes


def chosen_statistics(records: Sequence[Record]) -> str:
    """The mode that was best on the validation images of runs that differ by their seeds, on the mean."""
    return _best([{mode: measured(each, "validation")[mode]["top1"] for mode in MODES} for each in records])


def _best(validation: Sequence[Mapping[str, float]]) -> str:
    """The mode whose accuracies have the largest mean; of equal ones, the first."""
    return max(validation[0], key=lambda mode: math.fsum(each[mode] for each in validation))


def measured(record: Record, images: str) -> Mapping[str, Mapping[str, float]]:
    """A record's metrics by mode and, on its test images, by other rules."""
    if images == "test":
        return {**record["test"], **record.get("rules", {})}
    return record.get("validation") or record["curve"][-1]["validation"]


def cell(arm: Arm, records: Mapping[str, Record]) -> Cell:
    return Cell(arm, tuple(records[run.key] for run in arm.runs if run.key in records))


def missing(plan: Plan, records: Mapping[str, Record]) -> list[Run]:
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


def counted(*seeds: int) -> str:
    """Of one arm, or of several that are shown together."""
    return "1 seed" if max(seeds) == 1 else f"{least_to_most(seeds)} seeds"


def least_to_most(numbers: Iterable[int]) -> str:
    least, most = min(numbers := list(numbers)), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def cells(experiment: Experiment, records: Mapping[str, Record]) -> Iterator[Cell]:
    for arm in experiment.arms:
        yield cell(arm, records)
