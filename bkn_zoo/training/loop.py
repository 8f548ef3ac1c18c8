"""The training loop, which can be interrupted and resumed."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import InputError, NonFiniteLossError, counted
from bkn_zoo.progress import EVERY
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import Runtime, training_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import evaluate_on, show_top1
from bkn_zoo.training.interruption import Interruption, Stopped
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import REMEDY, Training, best_mode, kept_line, save_state, validation_loss, write_log
from bkn_zoo.training.step import autocast, learning_rate, make_step

EPOCH_SECONDS = 30.0
"""Seconds between saves after epochs. With few images, saving after every epoch would take longer than its steps."""

FIRST_STEPS = 4
"""Steps before the time of the training is estimated."""

LONG = 300.0
"""Seconds after which a shorter training is suggested."""


def fit(
    training: Training, recipe: Recipe, data: Data, folder: Path, runtime: Runtime, save_minutes: float = 5.0
) -> None:  # fmt: skip
    """Train to the end of the recipe, from the current step of `training`.

    Each epoch adds a line to log.jsonl and to `training.history`. The state is saved before the first step, after the
    first and the last epoch, after other epochs if the last save was half a minute ago, every `save_minutes`, and on
    SIGINT or SIGTERM, which then raise `Stopped`. A second SIGINT raises KeyboardInterrupt at once.
    """
    local_batch(recipe)
    per_epoch = len(data.train) // recipe.gradient_batch
    if not per_epoch:
        raise InputError(
            f"{len(data.train)} training images do not fill a batch of {recipe.gradient_batch}: choose a smaller one."
        )
    steps = per_epoch * recipe.epochs
    if not steps and not training.history:
        raise InputError("epochs is 0, which only fine-tuning supports: choose at least 1.")
    training.finished = training.finished or not steps
    runtime = runtime._replace(quiet=runtime.quiet or _rank() > 0)
    step = make_step(training, recipe, runtime.device)
    saves = _Saves(training, recipe, folder, save_minutes, steps)
    with saves.interruption.awaited(), _Progress(training, recipe, data, steps, runtime) as progress:
        if _rank() == 0:
            write_log(training.history, folder)  # without the lines of epochs that will be repeated
            save_state(training, recipe, folder)
        while training.step < steps and not training.finished:
            line = _train_epoch(training, recipe, data, runtime, step, saves, progress)
            with autocast(recipe, runtime.device):
                line["validation"] = evaluate_on(training.result, data, data.validation, runtime, "validation")
            training.seconds = saves.elapsed()
            line["seconds"] = training.seconds - sum(earlier["seconds"] for earlier in training.history)
            training.history.append(line)
            if recipe.keep == "best" and kept_line(training.history, recipe) is line:
                training.keep_weights()
            if _rank() == 0:
                write_log(training.history, folder)
            lowest = min(training.history, key=validation_loss)
            tired = recipe.patience is not None and line["epoch"] - lowest["epoch"] >= recipe.patience
            training.finished = training.step == steps or bool(largest_of_all(int(tired)))
            progress.after_epoch(line)
            saves.after_epoch()


def _train_epoch(
    training: Training, recipe: Recipe, data: Data, runtime: Runtime, step: Callable[[Batch], Tensor],
    saves: "_Saves", progress: "_Progress",
) -> dict[str, Any]:  # fmt: skip
    """Run the remaining steps of the epoch. Returns the beginning of its line in the log."""
    per_epoch = saves.steps // recipe.epochs
    epoch, skip = divmod(training.step, per_epoch)
    losses = list(training.losses)  # of the steps before an interruption
    spent = training.seconds - sum(line["seconds"] for line in training.history) if losses else 0.0
    started = time.monotonic() - spent
    batches = training_batches(
        _at_training_size(data, recipe), local_batch(recipe), epoch, recipe.seed, recipe.augmentation, runtime.device,
        skip, _rank(), processes(), runtime.workers,
    )  # fmt: skip
    for batch in batches:
        for group in training.optimizer.param_groups:
            group["lr"].fill_(learning_rate(recipe, training.step, saves.steps) * group["scale"])
        losses.append(step(batch))
        training.step += 1
        progress.after_step(losses, started)
        if training.step % per_epoch:  # after the last step of an epoch, save only with its line in the history
            saves.within_epoch(losses)
    line: dict[str, Any] = {"epoch": epoch + 1, "step": training.step}
    line["loss"] = mean_losses(losses, training.step).mean().item()
    line["images_per_s"] = _speed(recipe, losses, started)
    training.losses = torch.empty(0)
    if isinstance(data.train, FileImages):
        line["unreadable_images"] = len(data.train.unreadable)
    return line


class _Saves:
    """Decides when the state is saved and whether the training stops, for all processes together."""

    def __init__(self, training: Training, recipe: Recipe, folder: Path, minutes: float, steps: int) -> None:
        self.training, self.recipe, self.folder, self.steps = training, recipe, folder, steps
        self.patience = 60 * minutes
        self.interruption = Interruption(quiet=_rank() > 0)
        self.last = time.monotonic()
        self.begun = self.last - training.seconds  # includes the time before an interruption

    def elapsed(self) -> float:
        """Seconds of training, without interruptions."""
        return time.monotonic() - self.begun

    def within_epoch(self, losses: list[Tensor]) -> None:
        if wish := self._wish(self.patience):
            finite = mean_losses(losses, self.training.step)
            self.training.seconds, self.training.losses = self.elapsed(), finite
            self._save(wish)

    def after_epoch(self) -> None:
        due = self.training.finished or len(self.training.history) == 1
        if wish := self._wish(min(EPOCH_SECONDS, self.patience), due):
            self._save(wish)

    def _wish(self, patience: float, due: bool = False) -> int:
        """1 means save, more is the signal to stop for. Clocks and signals differ between processes, so they agree."""
        return largest_of_all(self.interruption.received or int(due or time.monotonic() - self.last > patience))

    def _save(self, wish: int) -> None:
        if _rank() == 0:
            save_state(self.training, self.recipe, self.folder)
        self.last = time.monotonic()
        if wish > 1:
            raise Stopped(wish, f"stopped at step {self.training.step} of {self.steps}; continue with --resume")


class _Progress:
    """Shows steps, losses and the time left: as a bar or, without a terminal, as a line every half minute."""

    def __init__(self, training: Training, recipe: Recipe, data: Data, steps: int, runtime: Runtime) -> None:
        self.training, self.recipe, self.steps, self.quiet = training, recipe, steps, runtime.quiet
        self.often = min(50, max(steps // max(recipe.epochs, 1) // 4, 1))  # showing a loss waits for the device
        self.advice = _advice(training, recipe, runtime.device)
        self.extra = len(data.validation) / len(data.train)  # time of validation, as a share of that of the steps
        self.start, self.shown = training.step, dict[str, str]()
        self.begun = self.told = time.monotonic()

    def __enter__(self) -> "_Progress":
        # None disables the bar without a terminal.
        self.bar = tqdm(total=self.steps, initial=self.start, unit="step", disable=True if self.quiet else None)
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def _write(self, line: str) -> None:
        if not self.quiet:
            self.bar.write(line)

    def after_step(self, losses: list[Tensor], started: float) -> None:
        self.bar.update()
        if len(losses) % self.often == 0:
            self.shown |= {"loss": f"{mean_losses(losses, self.training.step).mean():.3f}"}
            self.bar.set_postfix(self.shown | {"images": f"{_speed(self.recipe, losses, started):.0f}/s"})
        now, done = time.monotonic(), self.training.step - self.start
        if done == 1:  # the first step also prepares things
            self.begun = now
            return
        per_step = (1 + self.extra) * (now - self.begun) / (done - 1)
        total, left = per_step * (self.steps - self.start), per_step * (self.steps - self.training.step)
        if done == FIRST_STEPS and total > EVERY:
            self._write(f"about {_duration(total)} for all epochs{self._advise(total)}")
        if not sys.stderr.isatty() and now > self.told + EVERY:
            loss = f", loss {self.shown['loss']}" if "loss" in self.shown else ""
            step = f"step {self.training.step} of {self.steps}{loss}"
            self._write(f"{step}, about {_duration(left)} to go{self._advise(left)}")
            self.told = now

    def _advise(self, seconds: float) -> str:
        """The advice, once and only for a long training."""
        if not self.advice or seconds <= LONG:
            return ""
        advice, self.advice = self.advice, ""
        return f"; {advice}"

    def after_epoch(self, line: dict[str, Any]) -> None:
        """Print the line of an epoch, and at the end of the training which weights are kept."""
        training, recipe = self.training, self.recipe
        metrics = line["validation"][best_mode(line["validation"])]
        self.shown |= {"top1": f"{metrics['top1']:.2f}"}
        kept = kept_line(training.history, recipe)
        note = ""
        if recipe.keep == "best" and kept is line:
            is_lowest = line is min(training.history, key=validation_loss)
            note = f", kept so far{'' if is_lowest else ' (within one standard error of the lowest)'}"
        losses = f"loss {line['loss']:.4g}, validation loss {validation_loss(line):.4g}"
        self._write(f"epoch {line['epoch']} of {recipe.epochs}: {losses}, top-1 {show_top1(metrics)}{note}")
        early = training.step < self.steps
        if training.finished and (training.best is not None or early):
            stopped = "stopped: the validation loss no longer falls; " if early else ""
            self._write(f"{stopped}the weights of epoch {kept['epoch']} are kept")


def _advice(training: Training, recipe: Recipe, device: torch.device) -> str:
    """How to shorten a long training."""
    ways = ["use a GPU (many times faster)"] if device.type == "cpu" else []
    if training.history and training.history[0]["epoch"] == 0 and recipe.freeze is not True:
        ways = ["--freeze (keeps the classifier above and stops)"]
    fewer = [f"--epochs {max(recipe.epochs // 3, 1)}"] if recipe.epochs > 1 else []
    return f"to shorten it: {' or '.join(ways + fewer)}" if ways else ""


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def further_images(
    recipe: Recipe, data: Data, device: torch.device, batches: int, workers: int = 0
) -> Iterator[Tensor]:  # fmt: skip
    """Images of one more epoch, in passes as in training, for measurements on its result.

    Args:
        batches: the largest number of gradient batches.
    """
    batch = images_at_a_time(recipe)
    more = training_batches(
        _at_training_size(data, recipe), batch, recipe.epochs, recipe.seed, recipe.augmentation, device, workers=workers
    )
    for images, _ in islice(more, batches * recipe.gradient_batch // batch):
        yield images.contiguous(memory_format=torch.channels_last)


def images_at_a_time(recipe: Recipe) -> int:
    """The number of images per pass of a process, which is also the default group size."""
    return recipe.micro_batch or recipe.gradient_batch // processes()


def _at_training_size(data: Data, recipe: Recipe) -> Data:
    size = recipe.train_size or data.preprocessing.size
    return dataclasses.replace(data, preprocessing=dataclasses.replace(data.preprocessing, size=size))


def largest_of_all(number: int) -> int:
    """The maximum over all processes."""
    if not dist.is_initialized():
        return number
    everyone = torch.tensor(number, device=_reducing_device())
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return int(everyone)


def _reducing_device() -> str:
    """Where processes reduce a number: on the host, which does not wait for a GPU, unless there is NCCL alone."""
    return "cpu" if "cpu" in dist.get_backend_config() else "cuda"


def local_batch(recipe: Recipe) -> int:
    """The images of each process per step; an error if they cannot be split as the recipe says."""
    ranks = processes()
    local, rest = divmod(recipe.gradient_batch, ranks)
    if rest:
        raise InputError(
            f"a gradient batch of {recipe.gradient_batch} cannot be divided among {ranks} processes: choose a multiple."
        )
    pass_size = recipe.micro_batch or local
    if local % pass_size:
        raise InputError(
            f"a batch of {counted(local, 'image')} per process cannot be split into micro-batches of {pass_size}: "
            "use a divisor."
        )
    group = recipe.statistics_batch_size
    if group is not None and pass_size % group and not recipe.freeze:  # frozen norms do not observe
        raise InputError(
            f"statistics_batch_size is {group}, but {counted(pass_size, 'image')} at a time cannot be split into "
            f"groups of that size: choose a number that divides {pass_size}."
        )
    return local


def mean_losses(losses: list[Tensor], steps: int) -> Tensor:
    """The mean losses over all processes. Raises an error if one is not finite, before a spoiled state is saved.

    Args:
        steps: number of steps so far; these losses are of the last ones.
    """
    values = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    good = values.isfinite()
    if not good.all():
        step = steps - len(losses) + int((~good).nonzero()[0, 0])
        raise NonFiniteLossError(f"the loss was not finite at step {step}: {REMEDY}.")
    return values


def _speed(recipe: Recipe, losses: list[Tensor], started: float) -> float:
    return recipe.gradient_batch * len(losses) / (time.monotonic() - started)
