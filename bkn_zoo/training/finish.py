"""The end of a training: choose the weights, save them, measure the stored network, and record the run."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.card import short_card
from bkn_zoo.checkpoints.config import norm_of
from bkn_zoo.checkpoints.folder import add_accuracy, from_pretrained, save_pretrained, write_card
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.models import Network
from bkn_zoo.norms.baselines import BatchRenorm2d
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.progress import waiting
from bkn_zoo.training.curves import draw_curves
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import batch_size, evaluate, predict, uncertain_below
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.plan import Plan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, best_mode, kept_line

STATISTICS_BATCHES = 64
"""Largest number of training batches for the statistics of averaged weights."""

ACCURACY = ("top1", "top1_low", "top1_high", "top5", "ece")
"""The metrics that config.json stores, as far as there are."""

Metrics = dict[str, dict[str, float]]
"""The result of `measure` for each statistics mode."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training.

    Attributes:
        model: the network with the stored weights, in evaluation mode, on the device of the training.
        record: the content of results/runs/NAME.json: recipe, accuracy, curve, command, hardware, versions.
        folder: the folder of the checkpoint.
    """

    model: Network = field(repr=False)  # pages of text, like the record
    record: dict[str, Any] = field(repr=False)
    folder: Path


def finish(training: Training, recipe: Recipe, data: Data, plan: Plan) -> TrainingResult:
    """Choose the statistics mode on the validation images, save, measure the stored network, and record the run.

    Args:
        recipe: the recipe of the plan, with the fields that depend on the number of images.
    """
    device = torch.device(plan.device)
    kept = kept_line(training.history, recipe)
    model, validation, anew = _best_statistics(training, recipe, data, plan)
    best = best_mode(validation)
    split, images = ("validation", data.validation) if data.test is None else ("test", data.test)
    facts = {
        "name": plan.name,
        "epochs": training.history[-1]["epoch"],
        "kept_epoch": kept["epoch"],
        "test_images": split,
        "statistics_anew": validation is anew,
        "recipe": json.loads(json.dumps(dataclasses.asdict(recipe))),
        **environment(recipe.seed),
    }
    record = facts | {
        "model": recipe.model, "norm": norm_of(recipe.model), "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch, "seed": recipe.seed,
        "seconds": training.seconds, "chosen_statistics": best, "validation": validation, "validation_anew": anew,
        "curve": training.history, "data_sha256": training.fingerprint,
    }  # fmt: skip
    thresholds = _thresholds(model, data, plan)
    save_pretrained(
        model.cpu(), plan.folder, label_names=data.label_names, preprocessing=data.preprocessing, card="",
        default_statistics=best, uncertain_below=thresholds,
        training=facts | {"init": plan.source and plan.source.name, "validation_split": _validation_split(data)},
    )  # fmt: skip
    stored = from_pretrained(plan.folder).to(device).to(memory_format=torch.channels_last)
    batches = evaluation_batches(data, images, batch_size(device), device, plan.workers)
    what = None if plan.quiet else f"measuring the {split} images"
    record["test"] = evaluate(stored, batches, what=what, total=len(images))
    (plan.results / f"{plan.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    stored.config = add_accuracy(plan.folder, {mode: _stored(metrics) for mode, metrics in record["test"].items()})
    write_card(plan.folder, short_card(stored.config, plan.name, plan.license))
    with waiting("drawing curves.png"):
        draw_curves(plan.output / "curves.png", training.history, kept["epoch"], plan.name)
    for kind, part in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        if isinstance(part, FileImages):
            part.say_left_out(kind)
    return TrainingResult(stored, record, plan.folder)


def _best_statistics(
    training: Training, recipe: Recipe, data: Data, plan: Plan
) -> tuple[Network, Metrics, Metrics | None]:
    """The network to keep, its metrics on the validation images, and those with recalibrated statistics, if any.

    The running averages of averaged weights are averaged, too, and describe older weights. A copy with recomputed
    statistics is kept if it is better on the validation images.
    """
    model = training.result
    validation: Metrics = kept_line(training.history, recipe)["validation"]
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    # Frozen norms have no new statistics, and BRN uses its running averages in training, too.
    if not recipe.ema or recipe.freeze or not norms or any(isinstance(norm, BatchRenorm2d) for norm in norms):
        return model, validation, None
    device = torch.device(plan.device)
    copied = copy.deepcopy(model).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        with waiting("computing the statistics of the averaged weights"):
            recalibrate(copied, further_images(recipe, data, device, STATISTICS_BATCHES, plan.workers))
        batches = evaluation_batches(data, data.validation, batch_size(device), device, plan.workers)
        anew = evaluate(copied, batches, what=None if plan.quiet else "validation", total=len(data.validation))
    return (copied, anew, anew) if top1(anew) > top1(validation) else (model, validation, anew)


def _thresholds(model: Network, data: Data, plan: Plan) -> dict[str, float]:
    """For each statistics mode, the probability below which an answer is uncertain, from the validation images.

    A mode is missing if too few of its answers are correct.
    """
    device = torch.device(plan.device)
    batches = evaluation_batches(data, data.validation, batch_size(device), device, plan.workers)
    what = None if plan.quiet else "measuring the confidence"
    logits, labels = predict(model.to(device), batches, what=what, total=len(data.validation))
    found = {mode: uncertain_below(outputs, labels) for mode, outputs in logits.items()}
    return {mode: threshold for mode, threshold in found.items() if threshold is not None}


def _stored(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one mode that config.json stores."""
    return {name: round(metrics[name], 3) for name in ACCURACY if name in metrics}


def top1(metrics: Mapping[str, Mapping[str, float]]) -> float:
    """Top-1 accuracy in the best mode."""
    return max(each["top1"] for each in metrics.values())


def _validation_split(data: Data) -> str:
    """How the validation images were chosen, so that `evaluate` can find them again."""
    if not data.held_out:
        return "its own"
    return "of each class" if data.name == "folder" else "of all"
