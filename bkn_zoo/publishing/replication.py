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
from statistics import mean, stdev
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.modes import MODES
from bkn_zoo.training.recipes import Recipe, read_recipe

Record = Mapping[str, Any]
NORMS = {"bkn": "BKN", "bn": "BN", "brn": "BRN", "gn": "GroupNorm"}
WORDS = {
    "link=False": "A held at zero", "prediction_bias=True": "a bias in the prediction",
    "gain_per_channel=True": "a gain per channel", "shared_process_noise=False": "R per channel",
}  # fmt: skip


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
    label: str
    gradient: int
    group: int
    runs: tuple[Run, ...]
    paper: float | None = None
    ablation: bool = False


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
        """By name. The same arm in another experiment may have other seeds: the one with most of them counts."""
        every = [arm for experiment in self.experiments for arm in experiment.arms]
        return {arm.name: arm for arm in sorted(every, key=lambda arm: len(arm.runs))}

    def runs(self) -> list[Run]:
        """Each run once, in the order of the file: a row with all its seeds, then the next."""
        first: dict[str, Run] = {}
        for run in (run for experiment in self.experiments for arm in experiment.arms for run in arm.runs):
            first.setdefault(run.key, run)
        return list(first.values())


def recipe_key(recipe: Recipe, width: float = 1.0, every: int = 1) -> str:
    """The same for the same training, however it is launched."""
    fields = dataclasses.asdict(recipe)
    for launching in ("graph", "compile"):
        del fields[launching]
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
    return Plan(settings, experiments, tuple(content.get("claims", [])))


def _experiment(
    content: Mapping[str, Any], settings: Mapping[str, Any], recipes: Path, overrides: Mapping[str, Any]
) -> Experiment:
    arms = []
    for row in content["rows"]:
        unknown = set(row) - {"norm", "groups", "gradient", "options", "fields", "width", "paper"}
        if unknown:
            raise InputError(f"experiment {content['name']}: a row does not take {sorted(unknown)[0]!r}.")
        options, fields = row.get("options", {}), row.get("fields", {})
        lists = [_listed(row["groups"]), *map(_listed, options.values()), *map(_listed, fields.values())]
        for group, *values in itertools.product(*lists):
            chosen = dict(zip([*options, *fields], values, strict=True))
            own, changed = ({name: chosen[name] for name in names} for names in (options, fields))
            arms.append(
                _arm(row, content["setting"], settings, recipes, content["seeds"], group, own, changed, overrides)
            )
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
    return Arm(arm, label, gradient, group, runs, row.get("paper"), ablation)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_records(*folders: Path) -> dict[str, Record]:
    """What runs left that can stand for planned ones, by the key of their recipes; of two, that of the first folder."""
    records: dict[str, Record] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text())
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

    def top1(self, mode: str | None = None, images: str = "test") -> list[float]:
        """Of each seed, in percent; without a mode, in that which was best on the run's validation images.

        On the test images, a mode may also be one of the other rules, of those networks that were asked for it, or
        "recalibrated": of those with running statistics taken anew, the one that was best on the validation images.
        """
        return [value for record in self.good if (value := _top1(record, mode, images)) is not None]


def _top1(record: Record, mode: str | None, images: str = "test") -> float | None:
    """None where the network was not asked for it."""
    name = mode or record["chosen_statistics"]
    if mode == "recalibrated" and (validation := record.get("recalibrated_validation")):
        name = f"recalibrated {max(validation, key=lambda each: validation[each])}"
    metrics = measured(record, images).get(name)
    return None if metrics is None else metrics["top1"]


def measured(record: Record, images: str) -> Mapping[str, Mapping[str, float]]:
    """A record's metrics by mode and, on its test images, by other rules."""
    if images == "test":
        return {**record["test"], **record.get("rules", {})}
    return record.get("validation") or record["curve"][-1]["validation"]


def cell(arm: Arm, records: Mapping[str, Record]) -> Cell:
    return Cell(arm, tuple(records[run.key] for run in arm.runs if run.key in records))


def missing(plan: Plan, records: Mapping[str, Record]) -> list[Run]:
    return [run for run in plan.runs() if run.key not in records]


@dataclass(frozen=True)
class Difference:
    """Between two means, with its standard error where both are of several seeds."""

    value: float
    error: float | None
    seeds: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    def verdict(self, same: bool = False) -> str:
        """Whether a claim held that it is positive or, if `same`, that there is none."""
        margin = 0.5 if self.error is None else max(2 * self.error, 0.1)
        if same:
            held = "held" if abs(self.value) <= max(margin, 0.3) else "did not hold"
        else:
            held = "held" if self.value > margin else "did not hold" if self.value < -margin else "within chance"
        return held if self.error is not None else f"{held} (one seed)"


def verdict(claim: Mapping[str, Any], found: Difference) -> str:
    """Whether it held. That no step is saved is not chance."""
    said = found.verdict(claim.get("same", False))
    return said.replace("within chance", "did not hold") if claim.get("steps") and found.value <= 0 else said


def between(these: Sequence[float], those: Sequence[float]) -> Difference:
    """The difference between the means of runs that have nothing to do with each other."""
    seeds = len(these), len(those)
    error = (stdev(these) ** 2 / seeds[0] + stdev(those) ** 2 / seeds[1]) ** 0.5 if min(seeds) > 1 else None
    return Difference(mean(these) - mean(those), error, seeds)


def difference(claim: Mapping[str, Any], plan: Plan, records: Mapping[str, Record]) -> Difference | None:
    """That a claim is about; None where runs are missing. Differences within the same runs are taken run by run."""
    if claim.get("steps"):
        return steps_saved(claim, plan, records)
    modes = claim.get("modes", [None, None])
    cells = [best(_listed(claim[side]), plan, records) for side in ("this", "that")]
    if claim["this"] == claim["that"]:
        both = [[_top1(record, mode) for mode in modes] for record in cells[0].good]
        gaps = [a - b for a, b in both if a is not None and b is not None]
        return _mean_of(gaps, (len(gaps), len(gaps))) if gaps else None
    this, that = (each.top1(mode) for each, mode in zip(cells, modes, strict=True))
    return between(this, that) if this and that else None


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


def _mean_of(gaps: Sequence[float], seeds: tuple[int, int]) -> Difference:
    """Of differences that were taken run by run."""
    return Difference(mean(gaps), stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None, seeds)


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
    return _mean_of(saved, (len(this), len(that))) if saved else None


def spread(values: Iterable[float]) -> str:
    """Mean and, of several, the standard deviation."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def cells(experiment: Experiment, records: Mapping[str, Record]) -> Iterator[Cell]:
    for arm in experiment.arms:
        yield cell(arm, records)
