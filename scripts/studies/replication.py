"""Repeats the paper's comparisons and adds further ones: docs/results.md.

DATA contains the official folders of the data sets: cifar-10-batches-py, cifar-100-python, tiny-imagenet-200. The plan
is in replication.toml. Records in results/runs/ with the same recipe count as runs of the plan.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.errors import CheckpointError, NonFiniteLossError
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import Runtime, evaluation_batches
from bkn_zoo.training.datasets import Data, decoded_once, load_data
from bkn_zoo.training.evaluation import evaluate
from bkn_zoo.training.loop import fit, further_images
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import STATE, begin, load_state
from studies.base import DOCS, OFFICIAL, RESULTS, Record, Run, Study, device
from studies.full_length import full_length_table, full_lengths
from studies.headline import headline_figure, headline_table
from studies.replication_cells import read_records
from studies.replication_page import contents
from studies.replication_plan import Plan, Training, read_plan
from studies.replication_plots import figures
from studies.rules import (
    coarse,
    evalnorm,
    example_weighing,
    low_rank,
    observing_by,
    recalibrated,
    variance_gaps,
    with_smaller_transitions,
)
from studies.twins import read_twins
from studies.variants import create_variant

ASKED_BATCHES = 64  # of training images, for measurements on a trained network
MAP = 48  # groups and channels in the plot of variance gaps
SMALLER = {
    "A in 8 bits": lambda a: coarse(a, 8),
    "A of rank 16": lambda a: low_rank(a, 16),
    "A of rank 4": lambda a: low_rank(a, 4),
    "A set to zero": torch.zeros_like,
}

Metrics = dict[str, dict[str, float]]


class Replication(Study):
    name = "replication"
    results, plots = RESULTS / "reproduce", RESULTS / "plots"

    @cached_property
    def plan(self) -> Plan:
        return read_plan()

    def planned(self, records: Mapping[str, Record], changes: Mapping[str, Any]) -> list[Training]:
        return (read_plan(overrides=changes) if changes else self.plan).runs()

    def records(self, folder: Path) -> dict[str, Record]:
        return read_records(folder, RESULTS / "runs")

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        recipes = [run.recipe for run in runs if isinstance(run, Training)]
        for recipe in {(each.dataset, each.size, each.validation): each for each in recipes}.values():
            if recipe.dataset == "tiny_imagenet":
                load(recipe, args.data, args.output)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        assert isinstance(run, Training)
        return train(run, args.data, args.output, args.output / self.name / run.name, device(args))

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
        first = {
            "headline": headline_table(self.plan, records),
            "full_length": full_length_table(full_lengths(read_twins(RESULTS))),
        }
        return {DOCS / "results.md": contents(self.plan, records) | first}

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        return figures(self.plan, records) | {"group_sizes": headline_figure(self.plan, records)}


STUDY = Replication()


def load(recipe: Recipe, root: Path, cache: Path) -> Data:
    """The data set of a recipe. Image files are decoded once, into a file that all processes map."""
    if recipe.dataset != "tiny_imagenet":
        return load_data(recipe.dataset, root, recipe.size, recipe.validation)
    where = root / OFFICIAL[recipe.dataset]
    name = f"{recipe.dataset}.{recipe.size}.{recipe.validation}"
    return decoded_once(cache, name, where, lambda: load_data(recipe.dataset, where, recipe.size, recipe.validation))


def train(run: Training, root: Path, cache: Path, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train, or resume a training, then measure. Returns the record."""
    recipe = run.recipe
    torch.manual_seed(recipe.seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    data = load(recipe, root, cache)
    if run.every > 1:
        data = dataclasses.replace(data, train=data.train[torch.arange(0, len(data.train), run.every)])
    data = data.to(device)
    model = create_variant(recipe.model, len(data.label_names), run.width, **recipe.norm_options)
    training = begin(recipe, model, device)
    if (folder / STATE).exists():
        try:
            load_state(training, recipe, folder, device)
        except CheckpointError as error:
            print(f"{error} The training starts again.")
    record: dict[str, Any] = {
        "model": recipe.model, "norm": recipe.model.rpartition("_")[2], "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch_size,
        "epochs": recipe.epochs, "width": run.width, "every": run.every,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
    }  # fmt: skip
    try:
        fit(training, recipe, data, folder, Runtime(device, quiet=True), save_minutes=2.0)
        record |= Questions(training.result, recipe, data, device).answers()
    except NonFiniteLossError as error:
        record["failed"] = str(error).partition(":")[0]  # a failure is a result, too
    (folder / STATE).unlink(missing_ok=True)
    history = [{**line, "validation": rounded(line["validation"])} for line in training.history]
    curve = [
        {"epoch": line["epoch"], "step": line["step"], "loss": round(line["loss"], 4)}
        | {"top1": {mode: metrics["top1"] for mode, metrics in line["validation"].items()}}
        for line in history
    ]
    return {**record, "seconds": round(training.seconds, 1), "curve": curve, "recipe": dataclasses.asdict(recipe)}


def rounded(measured: Metrics) -> Metrics:
    return {mode: {name: round(value, 4) for name, value in metrics.items()} for mode, metrics in measured.items()}


@dataclasses.dataclass
class Questions:
    """Measurements on a trained network: accuracy and calibration by mode, other rules, and variance gaps.

    The mode, and the share of example weighing, are chosen on the validation images.
    """

    model: Network
    recipe: Recipe
    data: Data
    device: torch.device

    def answers(self) -> dict[str, Any]:
        validation = self.measure(self.model, *MODES, images=self.data.validation)
        best = max(MODES, key=lambda mode: validation[mode]["top1"])
        test = self.measure(self.model, *MODES)
        result: dict[str, Any] = {"chosen_statistics": best, "validation": validation, "test": test}
        norm = self.recipe.model.rpartition("_")[2]
        if norm not in ("bn", "bkn"):
            return result
        rules, recalibrated_validation = self.recalibrated()
        result["recalibrated_validation"] = recalibrated_validation
        if self.recipe.statistics_batch_size is not None:
            rules |= self.other_rules(self.recipe.statistics_batch_size)
            result |= self.gaps()
        if norm == "bkn":
            for name, smaller in SMALLER.items():
                rules[name] = self.measure(with_smaller_transitions(self.model, smaller), best)[best]
            gains = {name: value for name, value in self.model.named_parameters() if name.endswith("raw_gain")}
            result["gain"] = {name: round(torch.sigmoid(raw).mean().item(), 3) for name, raw in gains.items()}
        return {**result, "rules": rules}

    def measure(self, network: Network, *modes: str, images: Any = None) -> Metrics:
        """Measure on these images, by default the test images."""
        images = self.data.test if images is None else images
        return rounded(evaluate(network, evaluation_batches(self.data, images, 500, self.device), modes))

    def in_training(self, question: Callable[..., Any]) -> Any:
        """Call a measurement with training batches, in the precision of the training."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            return question(self.model, further_images(self.recipe, self.data, self.device, ASKED_BATCHES))

    def recalibrated(self) -> tuple[Metrics, dict[str, float]]:
        """With recomputed running averages: metrics on the test images, and top-1 on the validation images."""
        fresh, modes = self.in_training(recalibrated), ("population", "expected")
        test = {f"recalibrated {mode}": metrics for mode, metrics in self.measure(fresh, *modes).items()}
        validation = self.measure(fresh, *modes, images=self.data.validation)
        return test, {mode: metrics["top1"] for mode, metrics in validation.items()}

    def other_rules(self, group: int) -> Metrics:
        def expected(images: Any = None) -> dict[str, float]:
            return self.measure(self.model, "expected", images=images)["expected"]

        with observing_by(self.model, self.in_training(evalnorm)):
            rules = {"EvalNorm": expected()}
        shares = {}
        for share in sorted({0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1 / group}):
            with observing_by(self.model, example_weighing(share)):
                shares[share] = expected(self.data.validation)["top1"]
        best = max(shares, key=lambda each: shares[each])
        with observing_by(self.model, example_weighing(best)):
            return rules | {"example weighing": {**expected(), "share": best}}

    def gaps(self) -> dict[str, Any]:
        gaps = self.in_training(variance_gaps)
        found: dict[str, Any] = {"variance_gap": [round(layer.abs().mean().item(), 4) for layer in gaps]}
        if self.recipe.seed == 0:
            shown = gaps[-1][:MAP, :MAP]
            found["variance_gap_map"] = [[round(value, 2) for value in row] for row in shown.tolist()]
        return found
