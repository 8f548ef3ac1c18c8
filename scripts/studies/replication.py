"""Repeats the paper's comparisons and adds further ones: docs/results.md.

DATA contains the official folders of the data sets: cifar-10-batches-py, cifar-100-python, tiny-imagenet-200. The plan
is in replication.toml. A planned run and a record belong together if their recipes are equal; names do not matter.
Records in results/runs/ with the same recipe count as runs of the plan.
"""

import argparse
import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import bkn_zoo
from bkn_zoo.errors import CheckpointError, NonFiniteLossError
from bkn_zoo.images import Preprocessing
from bkn_zoo.models import Network
from bkn_zoo.models.inception import InceptionCifar
from bkn_zoo.models.registry import NORMS as FACTORIES
from bkn_zoo.modes import MODES
from bkn_zoo.training.data import Runtime, evaluation_batches
from bkn_zoo.training.datasets import ArrayImages, Data, load_data
from bkn_zoo.training.evaluation import compute_logits, measure_modes
from bkn_zoo.training.loop import fit, further_images
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import STATE, begin, load_state
from studies.base import OFFICIAL, RESULTS, Record, Run, Study, device
from studies.replication_plan import PLAN, Plan, Training, read_plan, read_records
from studies.rules import evalnorm, example_weighing, observing_by, recalibrated

ASKED_BATCHES = 64  # of training images, for measurements on a trained network

Metrics = dict[str, dict[str, float]]


class Replication(Study):
    name = "replication"
    results = RESULTS / "reproduce"

    @cached_property
    def plan(self) -> Plan:
        return self.read_plan({})

    def read_plan(self, changes: Mapping[str, Any]) -> Plan:
        return read_plan(PLAN.with_stem(self.name), overrides=changes)

    def planned(self, changes: Mapping[str, Any]) -> list[Training]:
        return (self.read_plan(changes) if changes else self.plan).runs()

    def records(self, folder: Path) -> dict[str, Record]:
        return read_records(folder, RESULTS / "runs")

    def prepare(self, runs: Sequence[Run], args: argparse.Namespace) -> None:
        recipes = [run.recipe for run in runs if isinstance(run, Training)]
        for recipe in {(each.dataset, each.size, each.validation): each for each in recipes}.values():
            if recipe.dataset == "tiny_imagenet":
                load(recipe, args.data, args.output)

    def train(self, run: Run, args: argparse.Namespace) -> dict[str, Any]:
        """Train, or resume a training, then measure. Returns the record."""
        assert isinstance(run, Training)
        recipe, where, folder = run.recipe, device(args), args.output / self.name / run.name
        torch.manual_seed(recipe.seed)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        data = load(recipe, args.data, args.output)
        if run.every > 1:
            data = dataclasses.replace(data, train=data.train[torch.arange(0, len(data.train), run.every)])
        data = data.to(where)
        training = begin(recipe, network_of(run, len(data.label_names)), where)
        if (folder / STATE).exists():
            try:
                load_state(training, recipe, folder, where)
            except CheckpointError as error:
                print(f"{error} The training starts again.")
        record: dict[str, Any] = {
            "model": recipe.model, "norm": recipe.model.rpartition("_")[2], "dataset": recipe.dataset,
            "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch_size,
            "epochs": recipe.epochs, "width": run.width, "every": run.every,
            "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        }  # fmt: skip
        try:
            fit(training, recipe, data, folder, Runtime(where, quiet=True), save_minutes=2.0)
            record |= self.answers(Questions(training.result, recipe, data, where), folder)
        except NonFiniteLossError as error:
            record["failed"] = str(error).partition(":")[0]  # a failure is a result, too
        (folder / STATE).unlink(missing_ok=True)
        curve = [
            {"epoch": line["epoch"], "step": line["step"], "loss": round(line["loss"], 4)}
            | {"top1": {mode: metrics["top1"] for mode, metrics in rounded(line["validation"]).items()}}
            for line in training.history
        ]
        return {**record, "seconds": round(training.seconds, 1), "curve": curve, "recipe": dataclasses.asdict(recipe)}

    def answers(self, questions: "Questions", folder: Path) -> dict[str, Any]:
        """What is measured on a trained network."""
        return questions.modes() | questions.rules()

    def regions(self, records: Mapping[str, Record]) -> dict[Path, dict[str, Any]]:
        from studies.replication_page import pages

        return pages(self.plan, records, *newer())

    def figures(self, records: Mapping[str, Record]) -> dict[str, Any]:
        from studies.replication_page import gains_figure, group_size_figure, norms_by_group, rules_figure

        fresh = newer()
        norms = norms_by_group(self.plan, records, *fresh)
        gains = gains_figure(norms, self.plan, records, *fresh)
        return {"group_sizes": group_size_figure(norms), "rules": rules_figure(norms), "gains": gains}


STUDY = Replication()


def load(recipe: Recipe, root: Path, cache: Path) -> Data:
    """The data set of a recipe. Image files are decoded once, into a file that all processes map."""
    if recipe.dataset != "tiny_imagenet":
        return load_data(recipe.dataset, root, recipe.size, recipe.validation)
    where = root / OFFICIAL[recipe.dataset]
    of = zlib.crc32(str(where.resolve()).encode())
    path = cache / f"{recipe.dataset}.{recipe.size}.{recipe.validation}.{of:08x}.pt"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(load_data(recipe.dataset, where, recipe.size, recipe.validation), scratch)
        os.replace(scratch, path)
    with torch.serialization.safe_globals([Data, ArrayImages, Preprocessing]):  # so that loading runs no other code
        return torch.load(path, mmap=True, weights_only=True)


def newer() -> tuple[Plan, dict[str, Record]]:
    """Plan and records of the study `standardized`, which docs/results.md shows, too."""
    return read_plan(PLAN.with_stem("standardized")), read_records(RESULTS / "standardized")


def network_of(run: Training, classes: int) -> Network:
    """The network of a run; only inception_cifar can be widened."""
    if run.width == 1:
        return bkn_zoo.create_model(run.recipe.model, classes, **run.recipe.norm_options)
    norm = FACTORIES[run.recipe.model.removeprefix("inception_cifar_")]
    return InceptionCifar(norm(**run.recipe.norm_options), classes, run.width)


def rounded(measured: Metrics) -> Metrics:
    return {mode: {name: round(value, 4) for name, value in metrics.items()} for mode, metrics in measured.items()}


@dataclass
class Questions:
    """Measurements on a trained network: accuracy and calibration by mode, other rules, and gains.

    The mode, and the share of example weighing, are chosen on the validation images.
    """

    model: Network
    recipe: Recipe
    data: Data
    device: torch.device

    def modes(self) -> dict[str, Any]:
        """Accuracy and calibration by mode, and the gains."""
        validation = self.measure(self.model, *MODES, images=self.data.validation)
        best = max(MODES, key=lambda mode: validation[mode]["top1"])
        result = {"chosen_statistics": best, "validation": validation, "test": self.measure(self.model, *MODES)}
        gains = {name: value for name, value in self.model.named_parameters() if name.endswith("raw_gain")}
        return {**result, "gain": {name: round(torch.sigmoid(raw).mean().item(), 3) for name, raw in gains.items()}}

    def rules(self) -> dict[str, Any]:
        """Accuracy of BN and BKN by other rules."""
        if self.recipe.model.rpartition("_")[2] not in ("bn", "bkn"):
            return {}
        rules, validation = self.recalibrated()
        if self.recipe.statistics_batch_size is not None:
            rules |= self.other_rules(self.recipe.statistics_batch_size)
        return {"recalibrated_validation": validation, "rules": rules}

    def measure(self, network: Network, *modes: str, images: Any = None) -> Metrics:
        """Measure on these images, by default the test images."""
        images = self.data.test if images is None else images
        batches = evaluation_batches(self.data, images, 500, self.device)
        return rounded(measure_modes(*compute_logits(network, batches, modes)))

    def in_training(self, question: Callable[..., Any]) -> Any:
        """Call a measurement with training batches, in the precision of the training."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            return question(self.model, further_images(self.recipe, self.data, Runtime(self.device), ASKED_BATCHES))

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
