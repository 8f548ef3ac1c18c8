"""Measures the accuracy and calibration of a network in each statistics mode."""

import csv
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.models import Network
from bkn_zoo.modes import MODES
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.progress import bar
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import Runtime, evaluation_batches
from bkn_zoo.training.datasets import Data, Images

BINS = 15
CLASS_COLUMNS = ("class", "images", "answers", "precision", "recall")
# The share of correct answers with at least the probability `uncertain_below`
RIGHT_ABOVE = 0.95
# With fewer correct answers, what 95 % of them reach is unknown
FEWEST_RIGHT = 20
# An answer with this probability is never called uncertain
SURE = 0.99


def batch_size(device: torch.device) -> int:
    """Images to evaluate at a time: few on a CPU, which is nearly as fast, so that progress is visible."""
    return 16 if device.type == "cpu" else 500


def measure_modes(logits: dict[str, Tensor], labels: Tensor) -> dict[str, dict[str, float]]:
    return {mode: measure_accuracy(outputs, labels) for mode, outputs in logits.items()}


def logits_on(
    model: Any, data: Data, images: Images, runtime: Runtime, what: str, modes: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """The result of `compute_logits` for images of a data set, with a progress bar called `what`."""
    batches = evaluation_batches(data, images, batch_size(runtime.device), runtime.device, runtime.workers)
    return compute_logits(model, batches, modes, None if runtime.quiet else what, len(images))


@torch.inference_mode()
def compute_logits(
    model: Any, batches: Iterable[Batch], modes: Sequence[str] = MODES,
    what: str | None = None, total: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """The logits of all images for each mode, and their labels. A mode that the network refuses is left out."""
    network = model if isinstance(model, Network) else model.model
    logits: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    labels = []
    with left_in_its_modes(network), bar(total, what, "image", lines=True) as done:
        network.eval()
        for images, targets in batches:
            images = images.contiguous(memory_format=torch.channels_last)
            labels.append(targets.argmax(1))
            for mode in list(logits):
                try:
                    logits[mode].append(model(images, statistics=mode).float())
                except InputError as error:  # such as `sample` in BN with one value per channel
                    if mode == "population" or len(logits) == 1:
                        raise
                    warnings.warn(f"{mode} is not measured: {error}", RuntimeWarning, stacklevel=2)
                    del logits[mode]
            done(len(images))
    if not labels:
        raise InputError("there are no images to evaluate: check the data folder.")
    return {mode: torch.cat(outputs) for mode, outputs in logits.items()}, torch.cat(labels)


def measure_accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1 with its 95 % interval, top-5 (of more than five classes), calibration error, and mean cross entropy."""
    hits = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    top1 = hits[:, 0].float().mean().item()
    # The interval of Wilson (1927).
    z = NormalDist().inv_cdf(0.975) ** 2 / len(labels)
    centre, half = (top1 + z / 2) / (1 + z), math.sqrt(z * top1 * (1 - top1) + z * z / 4) / (1 + z)
    # Mean distance between confidence and accuracy over bins of equal width (Guo et al. 2017). NaN falls into any bin.
    confidence = logits.softmax(1).amax(1)
    gaps = torch.zeros(BINS, device=logits.device)
    gaps.index_add_(0, (confidence * BINS).long().clamp(0, BINS - 1), confidence - hits[:, 0].to(confidence.dtype))
    losses = F.cross_entropy(logits, labels, reduction="none")
    return {
        "top1": 100 * top1,
        "top1_low": 100 * max(centre - half, 0.0),
        "top1_high": 100 * min(centre + half, 1.0),
        **({"top5": 100 * hits.any(1).float().mean().item()} if logits.shape[1] > 5 else {}),
        "ece": 100 * (gaps.abs().sum() / len(labels)).item(),
        "loss": losses.mean().item(),
        "loss_error": losses.std(correction=0).item() / math.sqrt(len(labels)),
    }


def measure_classes(logits: Tensor, labels: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """For each class its images, the answers that name it, precision and recall in percent; None where undefined."""
    answers = logits.argmax(1)
    kinds = (labels, answers, labels[answers == labels])
    counts = zip(names, *(kind.bincount(minlength=len(names)).tolist() for kind in kinds), strict=True)
    rows = []
    for name, images, given, right in counts:
        shares = (round(100 * right / whole, 2) if whole else None for whole in (given, images))
        rows.append(dict(zip(CLASS_COLUMNS, (name, images, given, *shares), strict=True)))
    return rows


def write_classes(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, CLASS_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def show_top1(metrics: Mapping[str, float]) -> str:
    """Top-1 with its interval as text."""
    return f"{metrics['top1']:.2f} % (95 %: {metrics['top1_low']:.1f} to {metrics['top1_high']:.1f})"


def uncertain_below(logits: Tensor, labels: Tensor) -> float | None:
    """The probability of the likeliest class that 95 % of the correct answers reach; None if too few are correct."""
    scores, best = logits.float().softmax(1).max(1)
    right = scores[best == labels]
    if len(right) < FEWEST_RIGHT:
        return None
    return min(round(torch.quantile(right, 1 - RIGHT_ABOVE).item(), 4), SURE)
