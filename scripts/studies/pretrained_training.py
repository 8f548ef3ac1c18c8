"""Trains one arm of the study `pretrained`: a step is captured in a CUDA graph once and replayed for all trainings.

A step with one small image leaves most of a GPU idle. So several trainings of an arm run at a time, each in its own
thread and CUDA stream, with its own copy of the network.
"""

import copy
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from bkn_zoo.conversion.measure import recommend
from torch import Tensor, nn

import bkn_zoo
from bkn_zoo.conversion import Converted, measure
from bkn_zoo.modes import MODES
from bkn_zoo.norms.batch_kalman import no_weight_decay
from bkn_zoo.training.capture import captured
from bkn_zoo.training.evaluation import measure_accuracy as measure_top1
from studies.pretrained_data import VOID, Images, Splits, as_input, splits, training_batches, unlabelled
from studies.pretrained_networks import (
    built,
    gains,
    into_training,
    pretrained,
    reset_head,
    start,
)
from studies.pretrained_plan import Arm, Experiment, Training

EVALUATED = {"classification": 250, "segmentation": 20}  # images at a time
WARMUP, CLIP, DECAY = 0.1, 5.0, 0.01
# Learning rates relative to that of pretrained weights. AdamW moves all equally far otherwise: new weights have far to
# go, and so have the logits of gains.
RATES = {"weights": 1.0, "others": 1.0, "head": 10.0, "gains": 30.0}


ONE = threading.Lock()
"""Held by the thread that changes the first network or captures a step."""


class Learner:
    """A network with its optimizer and its captured step for one batch size; trainings reset them in place.

    Args:
        weights: of the classes in the loss; by default all pixels and images count the same.
    """

    def __init__(
        self, model: nn.Module, experiment: Experiment, device: torch.device, weights: Tensor | None = None
    ) -> None:
        self.model, self.device, self.weights = model, device, weights
        self.half = experiment.precision == "bfloat16"
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        on_gpu = device.type == "cuda"
        groups = [{**group, "lr": torch.zeros((), device=device)} for group in parameter_groups(model)]
        self.optimizer = torch.optim.AdamW(groups, lr=torch.zeros((), device=device), fused=True, capturable=on_gpu)
        self.optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        self.step = captured(self._step)
        self.warm = False

    def _step(self, images: Tensor, labels: Tensor, rate: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"].copy_(rate * group["scale"])
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            outputs = self.model(images)
        loss = F.cross_entropy(outputs.float(), labels, self.weights, ignore_index=VOID)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def reset(self, state: Mapping[str, Tensor], seed: int) -> None:
        """In place, as a captured step needs it."""
        own = self.model.state_dict()
        for name, value in state.items():
            own[name].copy_(value)
        reset_head(self.model, seed)
        for values in self.optimizer.state.values():
            for value in values.values():
                value.zero_()

    def train(self, training: Training, arm: Arm, chosen: Splits, state: Mapping[str, Tensor]) -> list[float]:
        """Returns the mean loss of each tenth of the steps; stops where it is not finite."""
        into_training(self.model, arm.arm)
        rates = torch.tensor(schedule(training), device=self.device)
        batches = training_batches(training, arm.experiment, chosen)
        if not self.warm and self.device.type == "cuda":  # the first steps are not replayed; they do not count
            images, labels = next(training_batches(training, arm.experiment, chosen))
            with ONE:
                for _ in range(5):
                    self.step(images, labels, rates[0])
            self.warm = True
        self.reset(state, training.seed)
        losses, total, first = [], torch.zeros((), device=self.device), 0
        for number, (images, labels) in enumerate(batches):
            total += self.step(images, labels, rates[number])
            if (number + 1) * 10 // training.steps > number * 10 // training.steps:
                losses.append(total.item() / (number + 1 - first))
                total.zero_()
                first = number + 1
                if not math.isfinite(losses[-1]):
                    break
        return losses


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for weights only; the head and the gains with learning rates of their own."""
    found: dict[str, list[Tensor]] = {kind: [] for kind in RATES}
    kalman = no_weight_decay(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "gains" if name.endswith("raw_gain") else "others" if name in kalman else ""
            kind = "head" if name.startswith(("classifier.", "decoder.")) else kind
            found[kind or ("weights" if parameter.ndim >= 2 else "others")].append(parameter)
    return [
        {"params": params, "weight_decay": DECAY * (kind == "weights"), "scale": RATES[kind]}
        for kind, params in found.items()
        if params
    ]


def class_weights(chosen: Splits, balance: float) -> Tensor | None:
    """Weights for the loss: (median frequency of the classes / frequency of a class) to the power `balance`."""
    if balance == 0:
        return None
    labels = chosen.train[1]
    counts = torch.stack([(labels == each).sum() for each in range(chosen.classes)]).float()
    return (counts.median() / counts) ** balance


def schedule(training: Training) -> list[float]:
    """Linear warmup, then a cosine to zero."""
    steps = training.steps
    up = max(round(WARMUP * steps), 1)
    return [
        training.rate * min((step + 1) / up, (1 + math.cos(math.pi * max(step + 1 - up, 0) / max(steps - up, 1))) / 2)
        for step in range(steps)
    ]


class Copy:
    """A copy of an arm's network that one training at a time uses, with its CUDA stream."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.learners: dict[int, Learner] = {}  # by batch size
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def alone(self) -> Any:
        """A context in which work is launched on this copy's stream."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()


class Work:
    """The trainings of an arm, by one process.

    Args:
        arm: which arm of which experiment.
        found: the images, by split.
        weights: file of the pretrained weights.
        streams: number of trainings at a time.
    """

    def __init__(
        self, arm: Arm, found: Mapping[str, Images], weights: Path, device: torch.device, streams: int = 1
    ) -> None:
        self.arm, self.experiment, self.device = arm, arm.experiment, device
        self.splits = {target: splits(found, target) for target in arm.experiment.targets}
        classes = next(iter(self.splits.values())).classes
        self.model = built(pretrained(self.experiment, classes, weights), arm.arm).to(device)
        self.untouched = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.images = {target: unlabelled(chosen, self.experiment) for target, chosen in self.splits.items()}
        self.states: dict[Any, dict[str, Tensor]] = {}
        self.copies = [Copy(copy.deepcopy(self.model), device) for _ in range(streams)]
        self.idle: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for each in self.copies:
            self.idle.put(each)

    def state(self, training: Training) -> dict[str, Tensor]:
        """The values that a training starts from, except those of the head."""
        target, batch = training.target, training.batch
        key = (target, batch, training.gain)
        with ONE:
            if key not in self.states:
                self.model.load_state_dict(self.untouched)
                start(self.model, self.arm.arm, batch, self.images[target], training.gain)
                self.states[key] = {name: value.clone() for name, value in self.model.state_dict().items()}
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # the other streams may use them now
        return self.states[key]

    def train(self, training: Training) -> dict[str, Any]:
        """Train and measure; returns what the record says of this training."""
        begun, state, chosen = time.monotonic(), self.state(training), self.splits[training.target]
        copied = self.idle.get()
        try:
            with copied.alone():
                record = self.trained(copied, training, chosen, state)
        finally:
            self.idle.put(copied)
        return {**record, "seconds": round(time.monotonic() - begun, 2)}

    def trained(self, copied: Copy, training: Training, chosen: Splits, state: Mapping[str, Tensor]) -> dict[str, Any]:
        model = copied.model
        if isinstance(model, Converted):
            model.statistics_batch_size = training.batch
        if training.batch not in copied.learners:
            weights = class_weights(chosen, self.experiment.balance)
            copied.learners[training.batch] = Learner(model, self.experiment, self.device, weights)
        losses = copied.learners[training.batch].train(training, self.arm, chosen, state)
        record: dict[str, Any] = {"loss": [round(loss, 4) for loss in losses]}
        model.eval()
        if all(map(math.isfinite, losses)):
            record["validation"] = self.evaluate(model, chosen.validation)
            if training.stage == "final":
                record["test"] = self.evaluate(model, chosen.test)
        else:
            record["failed"] = "the loss was not finite"
        if final := gains(model):
            record["gains"] = [round(value, 4) for value in (min(final), mean(final), max(final))]
        return record

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, images_and_labels: Images) -> dict[str, float]:
        """The metric in percent, by mode. Each image is normalized by itself: none depends on others in its batch."""
        images, labels = images_and_labels
        segments = self.experiment.task == "segmentation"
        only = ("sample",) if self.arm.arm == "gn" else ("population",)
        result = {}
        for mode in MODES if isinstance(model, Converted) else only:
            outputs = []
            for part in images.split(EVALUATED[self.experiment.task]):
                pixels = as_input(part, self.experiment)
                chosen = {"statistics": mode} if isinstance(model, Converted) else {}
                output = model(pixels, **chosen)
                outputs.append(output.argmax(1).byte() if segments else output)
            predicted = torch.cat(outputs)
            metric = mean_iou(predicted, labels) if segments else measure_top1(predicted, labels)["top1"]
            result[mode] = round(metric, 3)
        return result


FACT_IMAGES = 60  # per domain


@torch.no_grad()
def facts(experiment: Experiment, found: Mapping[str, Images], weights: Path, device: torch.device) -> dict[str, Any]:
    """What is known before training, for each target: T, V and gains, averaged over norms, and the advice."""
    experiment = dataclasses.replace(experiment, measured=min(experiment.measured, FACT_IMAGES))
    return {
        target: measured_before(experiment, splits(found, target), weights, device) for target in experiment.targets
    }


def measured_before(experiment: Experiment, chosen: Splits, weights: Path, device: torch.device) -> dict[str, Any]:
    original, images = pretrained(experiment, chosen.classes, weights).to(device), unlabelled(chosen, experiment)
    norms = measure(bkn_zoo.convert(original), images if len(images) > 1 else next(iter(images.values())))
    advice = {batch: recommend(norms, batch) for batch in (1, 2, 4)}
    return {
        "images": sum(len(batch) for batches in images.values() for batch in batches),
        "T": mean(norm.shift for norm in norms.values()),
        "between": mean(norm.between for norm in norms.values()),
        "V": mean(norm.spread for norm in norms.values()),
        "norms": {name: [round(value, 5) for value in norm[:3]] for name, norm in norms.items()},
        "gains": {batch: mean(norm.gain(batch) for norm in norms.values()) for batch in advice},
        "shares": {batch: mean(norm.share(batch) for norm in norms.values()) for batch in advice},
        "advice": {batch: each.choice for batch, each in advice.items()},
        "errors": {batch: each.errors for batch, each in advice.items()},
    }


def mean_iou(predicted: Tensor, labels: Tensor) -> float:
    """Mean over the classes of intersection over union, in percent, counted over all images; void does not count."""
    seen = labels != VOID
    classes = int(max(labels[seen].max(), predicted.max())) + 1
    pairs = labels[seen].long() * classes + predicted[seen].long()
    counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).double()
    both = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - both
    return 100 * (both[union > 0] / union[union > 0]).mean().item()
