"""MODEL_CARD.md: the card of the zoo as a whole, written by scripts/report.py from all checkpoints and runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.cards import DATASETS, Run, dataset_name, duration
from bkn_zoo.publishing.results import table

POWER_LIMIT = {"NVIDIA H200": 700}
"""Watts that a board may draw, by the name that PyTorch gives it: with the time, a bound on the energy of a run."""

INTRODUCTION = """\
# The zoo's model card

This page is written by `python scripts/report.py` from `checkpoints/` and `results/`; a test fails when they disagree.
Each checkpoint has a card of its own, with its command, recipe, twins, speed and calibration, in its folder and, once
it is published, on the Hub.

## Checkpoints

Top-1 accuracy in percent on test images, per statistics mode; the default, chosen on validation images, is in bold.
*group* is how many images shared their statistics in training."""

NONE = "There are no checkpoints in this tree yet."

METHOD = """\
## The method in ten lines

1. Every normalization layer holds a belief about its input: a mean and a variance per channel.
2. The belief travels up the network beside the features.
3. Predict: the layer's prior is the belief of the layer below, mapped by a learned transition A, plus process noise R.
4. Observe: the mean and variance of the statistics group, be it a whole batch or one image.
5. Update: prior and observation are joined by a learned gain q between 0 and 1, as in a Kalman filter.
6. Normalize: by the updated belief, then the usual scale and shift.
7. Remember: running averages of beliefs and of images' own statistics, for inference.
8. Gradients run through the whole chain, so that a layer's A, R and q also learn from the layers above.
9. With q = 1, and in the first layer, it is batch normalization.
10. Few images make noisy observations, which the prior steadies, even one that knows nothing of the layer below, where
    A is zero ([docs/results.md](docs/results.md)). [docs/paper.md](docs/paper.md) has the equations.

## Which statistics to choose

| statistics | choose it |
|---|---|
| `population` | when training had large groups, or when speed matters most: it folds into the convolutions |
| `sample` | when training had one image per group |
| `expected` | when training had a few images per group |

Each checkpoint's default is the mode that was best on its validation images, however small the difference. In every
mode an image's result does not depend on what else is in the batch."""

UNTESTED = """\
## What was not tested

- Data sets other than those in the table and those of [docs/finetuning.md](docs/finetuning.md); images of another kind,
  size or quality than the training images.
- Robustness to noise, corruption or attack, and fairness between groups of people.
- Detection and video: the networks here classify. Segmentation was tried once, with a converted network
  ([docs/pretrained.md](docs/pretrained.md)).
- ImageNet: [docs/imagenet.md](docs/imagenet.md) says what that would take.
- Seeds: where a checkpoint's card gives one run, the spread between seeds is not known.
- At a recipe's full length: on Tiny ImageNet, BKN with groups of one image and of 32, BRN and GroupNorm; what the link
  between layers is worth on CIFAR-10 with one image a group and on CIFAR with eight.
  [docs/results.md](docs/results.md) has these but for the link on CIFAR-10 in shorter trainings, as it has learning
  rates, gradient batches of 64 and fewer, and a wider BN. With ResNet101, none of these, nor what the link is worth.
- BRN with another momentum than its paper's, or another schedule than that one scaled to the length of a training:
  where its trainings break down, as on CIFAR-10, such a one might hold."""

TRAINING = """\
## Time and energy of training

All runs under `results/runs/`, those of twins and trials that are not published included. The time is that of the
clock, also where runs shared a GPU. Energy, that of the board alone, is therefore an upper bound: that time, times the
most that the board may draw. [docs/runs.md](docs/runs.md) has all runs."""


def zoo_card(checkpoints: Mapping[str, Config], runs: Sequence[Run]) -> str:
    """MODEL_CARD.md.

    Args:
        checkpoints: the configs of all checkpoints, by name.
        runs: the records of all runs.
    """
    rows = [_row(name, config) for name, config in sorted(checkpoints.items())]
    shown = table(rows, list(rows[0])) if rows else NONE
    notes = [data.note for data in DATASETS.values() if data.note and any(row["data"] == data.shown for row in rows)]
    return "\n\n".join([INTRODUCTION, shown, *notes, METHOD, UNTESTED, TRAINING, _training(runs)]) + "\n"


def _row(name: str, config: Config) -> dict[str, Any]:
    def top1(mode: str) -> str | None:
        value = config.accuracy.get(mode, {}).get("top1")
        if value is None:
            return None
        return f"**{value:.2f}**" if mode == config.default_statistics else f"{value:.2f}"

    about = {"checkpoint": f"[{name}](checkpoints/{name}/README.md)", "data": dataset_name(config)}
    group = config.statistics_batch_size or "whole batch"
    return about | {"classes": config.num_classes, "group": group} | {mode: top1(mode) for mode in MODES}


def _training(runs: Sequence[Run]) -> str:
    if not runs:
        return "There are no runs in this tree yet."
    rows = []
    for hardware in sorted({run["hardware"] for run in runs}):
        seconds = sum(run["seconds"] for run in runs if run["hardware"] == hardware)
        power = POWER_LIMIT.get(hardware)
        energy = f"{seconds / 3600 * power / 1000:.1f} kWh" if power else "not known"
        count = sum(run["hardware"] == hardware for run in runs)
        rows.append({"hardware": hardware, "runs": count, "time": duration(seconds), "energy, at most": energy})
    return table(rows, list(rows[0]))
