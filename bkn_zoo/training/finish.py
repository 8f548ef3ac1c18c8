"""The end of a training: choose the weights, save them, measure the stored network, and record the run."""

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bkn_zoo.checkpoints.card import address_of, checkpoint_card
from bkn_zoo.checkpoints.config import norm_of
from bkn_zoo.checkpoints.folder import add_accuracy, from_pretrained, save_pretrained, write_card
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.models import Network
from bkn_zoo.norms.baselines import BatchRenorm2d
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.progress import waiting
from bkn_zoo.training.data import Runtime, evaluation_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import batch_size, compute_logits, evaluate_on, uncertain_below
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.plan import TrainingPlan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, best_mode, kept_line, validation_loss
from bkn_zoo.training.step import autocast

STATISTICS_BATCHES = 64
"""Largest number of training batches for the statistics of averaged weights."""

ACCURACY = ("top1", "top1_low", "top1_high", "top5", "ece")
"""The metrics that config.json stores, as far as there are."""

Metrics = dict[str, dict[str, float]]
"""The result of `measure_accuracy` for each statistics mode."""


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


def finish_training(
    training: Training, recipe: Recipe, data: Data, plan: TrainingPlan, runtime: Runtime
) -> TrainingResult:  # fmt: skip
    """Choose the statistics mode on the validation images, save, measure the stored network, and record the run.

    Args:
        recipe: the recipe of the plan, with the fields that depend on the number of images.
    """
    kept = kept_line(training.history, recipe)
    model, validation, anew = _best_statistics(training, recipe, data, runtime)
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
    thresholds = _thresholds(model, data, runtime)
    save_pretrained(
        model.cpu(), plan.folder, label_names=data.label_names, preprocessing=data.preprocessing, card="",
        default_statistics=best, uncertain_below=thresholds,
        training=facts | {"init": plan.source and plan.source.name, "validation_split": _validation_split(data)},
    )  # fmt: skip
    stored = from_pretrained(plan.folder).to(runtime.device).to(memory_format=torch.channels_last)
    measured = evaluate_on(stored, data, images, runtime, f"measuring the {split} images")
    accuracy = {
        mode: {name: round(metrics[name], 3) for name in ACCURACY if name in metrics}
        for mode, metrics in measured.items()
    }
    stored.config = add_accuracy(plan.folder, accuracy)
    record = facts | {
        "model": recipe.model, "norm": norm_of(recipe.model), "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch_size, "seed": recipe.seed,
        "seconds": training.seconds, "chosen_statistics": best, "validation": validation, "validation_anew": anew,
        "curve": training.history, "data_sha256": training.fingerprint, "test": measured,
    }  # fmt: skip
    address = address_of(plan.folder)
    write_card(plan.folder, checkpoint_card(stored.config, plan.name, record, address=address, license=plan.license))
    (plan.results / f"{plan.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    with waiting("drawing curves.png"):
        draw_curves(plan.output / "curves.png", training.history, kept["epoch"], plan.name)
    for kind, part in (("training", data.train), ("validation", data.validation), ("test", data.test)):
        if isinstance(part, FileImages):
            part.say_left_out(kind)
    return TrainingResult(stored, record, plan.folder)


def _best_statistics(
    training: Training, recipe: Recipe, data: Data, runtime: Runtime
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
    device = runtime.device
    copied = copy.deepcopy(model).to(device)
    with autocast(recipe, device):
        with waiting("computing the statistics of the averaged weights"):
            recalibrate(copied, further_images(recipe, data, device, STATISTICS_BATCHES, runtime.workers))
        anew = evaluate_on(copied, data, data.validation, runtime, "validation")
    return (copied, anew, anew) if _best_top1(anew) > _best_top1(validation) else (model, validation, anew)


def _best_top1(metrics: Mapping[str, Mapping[str, float]]) -> float:
    return max(each["top1"] for each in metrics.values())


def _thresholds(model: Network, data: Data, runtime: Runtime) -> dict[str, float]:
    """For each statistics mode, the probability below which an answer is uncertain, from the validation images.

    A mode is missing if too few of its answers are correct.
    """
    device = runtime.device
    batches = evaluation_batches(data, data.validation, batch_size(device), device, runtime.workers)
    what = None if runtime.quiet else "measuring the confidence"
    logits, labels = compute_logits(model.to(device), batches, what=what, total=len(data.validation))
    found = {mode: uncertain_below(outputs, labels) for mode, outputs in logits.items()}
    return {mode: threshold for mode, threshold in found.items() if threshold is not None}


def _validation_split(data: Data) -> str:
    """How the validation images were chosen, so that `evaluate` can find them again."""
    if not data.held_out:
        return "its own"
    return "of each class" if data.name == "folder" else "of all"


def draw_curves(path: Path, history: list[dict[str, Any]], kept: int, title: str) -> None:
    """Draw loss and accuracy of each epoch, and mark the epoch that is kept. Without matplotlib, print a line."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("no curves.png: install matplotlib with pip install 'bkn-zoo[train]'", file=sys.stderr)
        return
    epochs = [line["epoch"] for line in history]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    # The loss of epoch 0, a classifier alone, is without augmentation and smoothing: it does not compare.
    losses = [line["loss"] if line["epoch"] > 0 else math.nan for line in history]
    held = [validation_loss(line) for line in history]
    left.plot(epochs, losses, "o-", color="black", markersize=4, label="training")
    left.plot(epochs, held, "o--", color="C3", markersize=4, label="validation")
    highest = max((loss for loss in (*losses, *held) if math.isfinite(loss)), default=0) or 1
    left.set(ylabel="loss", ylim=(0, 1.05 * highest))  # space for the marker at the top
    left.legend(loc="upper right")
    # Modes often agree, so lower lines are drawn wider.
    looks = zip(history[-1]["validation"], ("C0", "C1", "C2"), (7, 4, 1.5), (11, 7, 4), strict=False)
    for mode, colour, width, marker in looks:
        lines = [line["validation"][mode] for line in history]
        right.plot(
            epochs, [m["top1"] for m in lines], "o-", color=colour, linewidth=width, markersize=marker, label=mode,
            solid_capstyle="round",
        )  # fmt: skip
        if all("top1_low" in m for m in lines):
            low, high = ([m[name] for m in lines] for name in ("top1_low", "top1_high"))
            right.fill_between(epochs, low, high, color=colour, alpha=0.1)
    right.set(ylabel="validation top-1 (%), with 95 % intervals", ylim=(0, 104))
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.axvline(kept, color="grey", linestyle=":")
        axes.set(xlabel=f"epoch (dotted: {kept}, whose weights are kept)", xlim=(epochs[0] - 0.5, epochs[-1] + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
