"""The plan of the replication, read from replication.toml, and the records that belong to it.

A planned run and a record belong together if their recipes are equal. Names do not matter.
"""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bkn_zoo.errors import InputError
from bkn_zoo.training.recipes import Recipe, read_recipe
from studies.base import OFFICIAL, ROOT, Record, Run
from studies.records import LAUNCHING, NORMS, read_run, recipe_key

PLAN, RECIPES = Path(__file__).with_name("replication.toml"), ROOT / "recipes"
WORDS = {
    "link=False": "A held at zero", "prediction_bias=True": "a bias in the prediction",
    "gain_per_channel=True": "a gain per channel", "shared_process_noise=False": "R per channel",
    "standardized_weights=True": "standardized weights", "transition_rank=16": "A of rank 16",
}  # fmt: skip
HELD = f"{NORMS['bkn']}, {WORDS['link=False']}"
"""The label of an arm of BKN without the link between layers."""
ROW = {"norm", "groups", "gradient", "options", "fields", "seeds", "width", "paper"}
"""The fields of a row; replication.toml explains them."""


def read_records(*folders: Path) -> dict[str, Record]:
    """Records that can be used for planned runs, by the key of their recipes. The first folder has precedence.

    Records with recomputed running averages are left out: a recipe does not show this, and the replication never
    recomputes them.
    """
    records: dict[str, Record] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        record = read_run(path)
        recipe = read_recipe(None, record["recipe"])
        if recipe.gradient_batch <= 2 and not record["statistics_batch"]:
            # Measured without a group: this was `population` once more.
            for images in ("test", "validation"):
                record.get(images, {}).pop("expected", None)
        # Several processes divide a batch, so that its statistics groups are smaller.
        shared = record.get("processes", 1) > 1 and recipe.statistics_batch_size is None
        if not record.get("statistics_anew") and not shared:
            records.setdefault(recipe_key(recipe, record.get("width", 1.0), record.get("every", 1)), record)
    return records


@dataclass(frozen=True, kw_only=True)
class Training(Run):
    """A recipe, with settings that a recipe does not have.

    Attributes:
        width: factor of the network's channels.
        every: train on every `every`-th image of the data set.
    """

    recipe: Recipe
    width: float = 1.0
    every: int = 1

    @cached_property
    def key(self) -> str:
        return recipe_key(self.recipe, self.width, self.every)


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seeds: a cell of a table.

    Attributes:
        ablation: whether it is compared with another arm that has the same norm and batches.
    """

    name: str
    setting: str
    label: str
    gradient: int
    group: int
    runs: tuple[Training, ...]
    paper: float | None = None
    ablation: bool = False

    @property
    def batches(self) -> str:
        """Gradient and statistics batch as text."""
        return f"{self.gradient}, {self.group}"


@dataclass(frozen=True)
class Experiment:
    """A table: its arms, and the differences that it compares, by seed if they are paired."""

    name: str
    setting: str
    place: str | None
    arms: tuple[Arm, ...]
    differences: tuple[Mapping[str, Any], ...]
    paired: bool


@dataclass(frozen=True)
class Plan:
    settings: Mapping[str, Mapping[str, Any]]
    experiments: tuple[Experiment, ...]
    claims: tuple[Mapping[str, Any], ...]

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By name."""
        return {arm.name: arm for experiment in self.experiments for arm in experiment.arms}

    def runs(self) -> list[Training]:
        """Each run once, in the order of the file, row by row with all seeds."""
        first: dict[str, Training] = {}
        shown: dict[str, list[str]] = {}
        for experiment in self.experiments:
            for run in (run for arm in experiment.arms for run in arm.runs):
                first.setdefault(run.key, run)
                shown.setdefault(run.key, []).append(experiment.name)
        return [dataclasses.replace(run, groups=tuple(shown[key])) for key, run in first.items()]


def read_plan(path: Path = PLAN, overrides: Mapping[str, Any] | None = None) -> Plan:
    """Read the experiments of a file, with overridden fields in all recipes."""
    try:
        content = tomllib.loads(path.read_text())
        settings = content["settings"]
        experiments = tuple(_experiment(each, settings, overrides or {}) for each in content["experiments"])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): pass a file of experiments.") from None
    except KeyError as error:
        raise InputError(f"{path} lacks {error}: see the comment at its beginning.") from None
    return Plan(settings, tuple(_with_all_seeds(experiments)), tuple(content.get("claims", [])))


def _with_all_seeds(experiments: Sequence[Experiment]) -> Iterator[Experiment]:
    """Give each arm the largest number of seeds that any experiment asks for."""
    every = [arm for experiment in experiments for arm in experiment.arms]
    seeds = {arm.name: arm.runs for arm in sorted(every, key=lambda arm: len(arm.runs))}
    for each in experiments:
        arms = tuple(dataclasses.replace(arm, runs=seeds[arm.name]) for arm in each.arms)
        yield dataclasses.replace(each, arms=arms)


def _experiment(content: Mapping[str, Any], settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> Experiment:
    arms = []
    for row in content["rows"]:
        if unknown := sorted(set(row) - ROW):
            raise InputError(f"experiment {content['name']}: a row has the unknown field {unknown[0]!r}: remove it.")
        options, fields, seeds = row.get("options", {}), row.get("fields", {}), row.get("seeds", content["seeds"])
        lists = [listed(row["groups"]), *map(listed, options.values()), *map(listed, fields.values())]
        for group, *values in itertools.product(*lists):
            chosen = dict(zip([*options, *fields], values, strict=True))
            own, changed = ({name: chosen[name] for name in names} for names in (options, fields))
            arms.append(_arm(row, content["setting"], settings, seeds, group, own, changed, overrides))
    about, paired = tuple(content.get("differences", [])), content.get("paired", False)
    return Experiment(content["name"], content["setting"], content.get("place"), tuple(arms), about, paired)


def _arm(
    row: Mapping[str, Any], name: str, settings: Mapping[str, Any], seeds: int, group: int,
    options: dict[str, Any], fields: dict[str, Any], overrides: Mapping[str, Any],
) -> Arm:  # fmt: skip
    setting = dict(settings[name])
    file, every, schedule = RECIPES / f"{setting.pop('recipe')}.toml", setting.pop("every", 1), setting.pop("brn", {})
    base = read_recipe(file)
    network, gradient, width = base.model.rpartition("_")[0], row.get("gradient", base.gradient_batch), row.get("width")
    # Smaller gradient batches mean more steps of BRN's schedule.
    in_steps = {key: round(steps * base.gradient_batch / gradient) for key, steps in schedule.items()}
    changes = {
        **setting, "model": f"{network}_{row['norm']}", "gradient_batch": gradient,
        "statistics_batch_size": None if group == gradient else group, **fields,
        "norm_options": {**(in_steps if row["norm"] == "brn" else {}), **options}, **overrides,
    }  # fmt: skip
    own = [f"{key}={value}" for key, value in sorted({**options, **fields}.items()) if key not in LAUNCHING]
    wide, batches = ["wide"] * bool(width), f"{gradient}-{group}"
    arm = ".".join([name, row["norm"], batches, *([",".join(own)] if own else []), *wide])

    def run(seed: int) -> Training:
        recipe = read_recipe(file, {**changes, "seed": seed})
        about = {
            "data": OFFICIAL[recipe.dataset], "like": f"{recipe.dataset}, {network}, {recipe.gradient_batch}, {every}",
            "epochs": recipe.epochs, "recipe": recipe, "width": width or 1.0, "every": every,
        }  # fmt: skip
        return Training(f"{arm}.seed={seed}", seed, **about)

    shown = [WORDS.get(each, each.replace("=", " = ").replace("_", " ")) for each in own] + ["widened"] * bool(width)
    label = ", ".join([NORMS[row["norm"]], *shown])
    ablation = bool(options) or bool(width) or (bool(fields) and gradient == base.gradient_batch)
    return Arm(arm, name, label, gradient, group, tuple(map(run, range(seeds))), row.get("paper"), ablation)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
