"""The end of a training: choose the statistics, save the network, measure what is stored, and record the run."""

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
from torch import Tensor

from bkn_zoo.checkpoints.card import address_of, checkpoint_card
from bkn_zoo.checkpoints.config import norm_of
from bkn_zoo.checkpoints.folder import add_accuracy, from_pretrained, save_pretrained, write_card
from bkn_zoo.checkpoints.provenance import environment
from bkn_zoo.checkpoints.weights import stored_dtype
from bkn_zoo.models import Network
from bkn_zoo.norms.baselines import BatchRenorm2d
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.progress import waiting
from bkn_zoo.training.data import Runtime
from bkn_zoo.training.datasets import Data
from bkn_zoo.training.evaluation import logits_on, measure_classes, measure_modes, uncertain_below, write_classes
from bkn_zoo.training.loop import further_images
from bkn_zoo.training.plan import TrainingPlan
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training, drop_state, kept_line, metrics_of, validation_loss
from bkn_zoo.training.step import autocast

# Largest number of training batches for the statistics of averaged weights
STATISTICS_BATCHES = 64
# The metrics that config.json stores, as far as there are
ACCURACY = ("top1", "top1_low", "top1_high", "top5", "ece")
# Standard errors by which another statistics mode than the first choice must be better
CLEAR = 2.0


@dataclass(frozen=True)
class TrainingResult:
    """The network with the stored weights, the record (results/runs/NAME.json) and the folder of the checkpoint."""

    # These are pages of text.
    model: Network = field(repr=False)
    record: dict[str, Any] = field(repr=False)
    folder: Path


def finish_training(
    training: Training, recipe: Recipe, data: Data, plan: TrainingPlan, runtime: Runtime
) -> TrainingResult:  # fmt: skip
    """Choose the statistics mode on the validation images, save, measure the stored network, and record the run."""
    kept = kept_line(training.history, recipe)
    model, logits, labels, anew = _with_better_statistics(training.result, recipe, data, runtime)
    best = choose_mode(logits, labels, recipe.statistics_batch_size, model.default_statistics)
    validation = measure_modes(logits, labels)
    thresholds = {mode: uncertain_below(outputs, labels) for mode, outputs in logits.items()}
    split = "validation" if data.test is None else "test"
    facts = {
        "name": plan.name,
        "epochs": training.history[-1]["epoch"],
        "kept_epoch": kept["epoch"],
        "test_images": split,
        "statistics_anew": anew,
        "recipe": json.loads(json.dumps(dataclasses.asdict(recipe))),
        **environment(recipe.seed, runtime.device),
    }
    held_out = "of each class" if data.name == "folder" else "of all"  # so that `evaluate` can find them again
    save_pretrained(
        model.cpu(), plan.folder, label_names=data.label_names, preprocessing=data.preprocessing, card="",
        default_statistics=best, uncertain_below={mode: each for mode, each in thresholds.items() if each is not None},
        training=facts
        | {"init": plan.source and plan.source.name, "validation_split": held_out if data.held_out else "its own"},
    )  # fmt: skip
    stored = from_pretrained(plan.folder).to(runtime.device).to(memory_format=torch.channels_last)
    measured = validation
    if data.test is not None:
        logits, labels = logits_on(stored, data, data.test, runtime, "measuring the test images", runtime.modes)
        measured = measure_modes(logits, labels)
    classes = measure_classes(logits[best], labels, data.label_names)
    stored.config = add_accuracy(
        plan.folder,
        {mode: {name: round(at[name], 3) for name in ACCURACY if name in at} for mode, at in measured.items()},
    )
    record = facts | {
        "model": recipe.model, "norm": norm_of(recipe.model), "dataset": recipe.dataset,
        "gradient_batch": recipe.gradient_batch, "statistics_batch": recipe.statistics_batch_size, "seed": recipe.seed,
        "seconds": training.seconds, "chosen_statistics": best, "validation": validation, "curve": training.history,
        "data_sha256": training.fingerprint, "test": measured, "classes": classes,
    }  # fmt: skip
    address = address_of(plan.folder)
    write_card(plan.folder, checkpoint_card(stored.config, plan.name, record, address=address, license=plan.license))
    plan.record.write_text(json.dumps(record, indent=1) + "\n")
    write_classes(plan.output / "classes.csv", classes)
    with waiting("drawing curves.png"):
        draw_curves(plan.output / "curves.png", training.history, kept["epoch"], plan.name)
    drop_state(training, recipe, plan.output)
    return TrainingResult(stored, record, plan.folder)


def _with_better_statistics(
    model: Network, recipe: Recipe, data: Data, runtime: Runtime
) -> tuple[Network, dict[str, Tensor], Tensor, bool]:
    """The network to keep, its logits of the validation images by mode, labels, and whether it was recalibrated."""
    # It is measured as it is stored.
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.to(stored_dtype(tensor)))
    what = "measuring the validation images"
    logits, labels = logits_on(model, data, data.validation, runtime, what, runtime.modes)
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    # The running averages of averaged weights are averaged, too, and describe older weights. Frozen norms have no new
    # statistics, and BRN uses its running averages in training, too.
    if recipe.ema and not recipe.freeze and norms and not any(isinstance(norm, BatchRenorm2d) for norm in norms):
        copied = copy.deepcopy(model)
        with autocast(recipe, runtime.device), waiting("computing the statistics of the averaged weights"):
            recalibrate(copied, further_images(recipe, data, runtime, STATISTICS_BATCHES))
        others, labels = logits_on(copied, data, data.validation, runtime, what, runtime.modes)
        if best_top1(others, labels) > best_top1(logits, labels):
            return copied, others, labels, True
    return model, logits, labels, False


def best_top1(logits: Mapping[str, Tensor], labels: Tensor) -> float:
    return max((outputs.argmax(1) == labels).float().mean().item() for outputs in logits.values())


def choose_mode(logits: Mapping[str, Tensor], labels: Tensor, group: int | None, first: str) -> str:
    """The default mode: the first, unless `population` or the mode that fits the group size is clearly better."""
    fitting = "sample" if group == 1 else "expected"
    best = next(mode for mode in (first, "population", fitting, *logits) if mode in logits)
    right = {mode: (outputs.argmax(1) == labels).double() for mode, outputs in logits.items()}
    for mode in ("population", fitting):
        if mode in right:
            gains = right[mode] - right[best]
            if gains.mean() > CLEAR * gains.std() / math.sqrt(len(gains)):
                best = mode
    return best


def draw_curves(path: Path, history: list[dict[str, Any]], kept: int, title: str) -> None:
    """Draw loss and accuracy of each epoch, and mark the epoch that is kept. Without matplotlib, print a line."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no curves.png: install matplotlib with pip install 'bkn-zoo[train]'", file=sys.stderr)
        return
    epochs = [line["epoch"] for line in history]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{title} (dotted: epoch {kept}, whose weights are kept)")
    left, right = figure.subplots(1, 2)
    # The loss of epoch 0, a classifier alone, is without augmentation and smoothing: it does not compare.
    losses = [line["loss"] if line["epoch"] > 0 else math.nan for line in history]
    left.plot(epochs, losses, "o-", color="black", markersize=4, label="training")
    left.plot(epochs, [validation_loss(line) for line in history], "o--", color="C3", markersize=4, label="validation")
    lines = [metrics_of(line) for line in history]
    top1, low, high = ([line[name] for line in lines] for name in ("top1", "top1_low", "top1_high"))
    right.plot(epochs, top1, "o-", markersize=4, label=next(iter(history[-1]["validation"])))
    right.fill_between(epochs, low, high, alpha=0.1)
    right.set(ylim=(0, 104))
    for axes, what in ((left, "loss"), (right, "validation top-1 (%), with 95 % intervals")):
        axes.axvline(kept, color="grey", linestyle=":")
        axes.set(xlabel="epoch", ylabel=what)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
