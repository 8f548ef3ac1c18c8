"""The training loop, which can be interrupted and resumed."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import InputError, NonFiniteLossError, counted
from bkn_zoo.training.batch import Batch
from bkn_zoo.training.data import evaluation_batches, training_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import batch_size, evaluate, shown
from bkn_zoo.training.interruption import Interruption, Stopped
from bkn_zoo.training.optimizer import learning_rate
from bkn_zoo.training.pace import Pace
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import (
    REMEDY,
    Training,
    best_mode,
    kept_line,
    save_state,
    validation_loss,
    write_log,
)  # fmt: skip
from bkn_zoo.training.step import make_step

EPOCH_SECONDS = 30.0
"""Seconds between saves after epochs. With few images, saving after every epoch would take longer than its steps."""


def fit(
    training: Training, recipe: Recipe, data: Data, folder: Path, device: torch.device,
    save_minutes: float = 5.0, workers: int = 0, quiet: bool = False,
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
    first = _rank() == 0
    step = make_step(training, recipe, device)
    saves = _Saves(training, recipe, folder, save_minutes, steps)
    with (
        saves.interruption.awaited(),
        # None disables the bar without a terminal.
        tqdm(total=steps, initial=training.step, unit="step", disable=None if first and not quiet else True) as bar,
    ):
        if first:
            write_log(training.history, folder)  # without the lines of epochs that will be repeated
            save_state(training, recipe, folder)
        postfix: dict[str, str] = {}
        write = bar.write if first and not quiet else lambda line: None
        extra, advice = len(data.validation) / len(data.train), _advice(training, recipe, device)
        pace = Pace(write, training.step, steps, extra, advice)
        while training.step < steps and not training.finished:
            line = _train_epoch(training, recipe, data, device, workers, step, saves, bar, postfix, pace)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                batches = evaluation_batches(data, data.validation, batch_size(device), device, workers)
                what = "validation" if first and not quiet else None
                line["validation"] = evaluate(training.result, batches, what=what, total=len(data.validation))
            training.seconds = saves.elapsed()
            line["seconds"] = training.seconds - sum(earlier["seconds"] for earlier in training.history)
            training.history.append(line)
            best = recipe.keep == "best" and kept_line(training.history, recipe) is line
            if best:
                training.best = {name: tensor.clone() for name, tensor in training.result.state_dict().items()}
            lowest = min(training.history, key=validation_loss)
            mode = line["validation"][best_mode(line["validation"])]
            postfix |= {"top1": f"{mode['top1']:.2f}"}
            kept = f", kept so far{'' if line is lowest else ' (within one standard error of the lowest)'}"
            write(f"epoch {line['epoch']} of {recipe.epochs}: {_told(line, shown(mode))}{kept if best else ''}")
            if first:
                write_log(training.history, folder)
            tired = recipe.patience is not None and line["epoch"] - lowest["epoch"] >= recipe.patience
            training.finished = training.step == steps or bool(_largest(int(tired)))
            if training.finished and (training.best is not None or training.step < steps):
                stopped = "stopped: the validation loss no longer falls; " if training.step < steps else ""
                write(f"{stopped}the weights of epoch {kept_line(training.history, recipe)['epoch']} are kept")
            saves.after_epoch()


def _told(line: Mapping[str, Any], top1: str) -> str:
    return f"loss {line['loss']:.4g}, validation loss {validation_loss(line):.4g}, top-1 {top1}"


def _advice(training: Training, recipe: Recipe, device: torch.device) -> str:
    """How to shorten a long training."""
    ways = ["use a GPU (many times faster)"] if device.type == "cpu" else []
    if training.history and training.history[0]["epoch"] == 0 and recipe.freeze is not True:
        ways = ["--freeze (keeps the classifier above and stops)"]
    fewer = [f"--epochs {max(recipe.epochs // 3, 1)}"] if recipe.epochs > 1 else []
    return f"to shorten it: {' or '.join(ways + fewer)}" if ways else ""


def _train_epoch(
    training: Training, recipe: Recipe, data: Data, device: torch.device, workers: int,
    step: Callable[[Batch], Tensor], saves: "_Saves", bar: Any, postfix: dict[str, str], pace: Pace,
) -> dict[str, Any]:  # fmt: skip
    """Run the remaining steps of the epoch. Returns the beginning of its line in the log."""
    per_epoch = saves.steps // recipe.epochs
    often = min(50, max(per_epoch // 4, 1))  # steps between shown losses, because showing one waits for the device
    epoch, skip = divmod(training.step, per_epoch)
    losses = list(training.losses)  # of the steps before an interruption
    spent = training.seconds - sum(line["seconds"] for line in training.history) if losses else 0.0
    started = time.monotonic() - spent
    batches = training_batches(
        _at_training_size(data, recipe), local_batch(recipe), epoch, recipe.seed, recipe.augmentation, device, skip,
        _rank(), processes(), workers,
    )  # fmt: skip
    for batch in batches:
        for group in training.optimizer.param_groups:
            group["lr"].fill_(learning_rate(recipe, training.step, saves.steps) * group["scale"])
        losses.append(step(batch))
        training.step += 1
        bar.update()
        pace.after_step(postfix.get("loss", ""))
        if len(losses) % often == 0:
            postfix |= {"loss": f"{_finite(losses, training.step).mean():.3f}"}
            bar.set_postfix(postfix | {"images": f"{_speed(recipe, losses, started):.0f}/s"})
        if training.step % per_epoch:  # after the last step of an epoch, save only with its line in the history
            saves.within_epoch(losses)
    loss = _finite(losses, training.step).mean().item()
    training.losses = torch.empty(0)
    line: dict[str, Any] = {"epoch": epoch + 1, "step": training.step, "loss": loss}
    line["images_per_s"] = _speed(recipe, losses, started)
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
            finite = _finite(losses, self.training.step)
            self.training.seconds, self.training.losses = self.elapsed(), finite
            self._save(wish)

    def after_epoch(self) -> None:
        due = self.training.finished or len(self.training.history) == 1
        if wish := self._wish(min(EPOCH_SECONDS, self.patience), due):
            self._save(wish)

    def _wish(self, patience: float, due: bool = False) -> int:
        """1 means save, more is the signal to stop for. Clocks and signals differ between processes, so they agree."""
        return _largest(self.interruption.received or int(due or time.monotonic() - self.last > patience))

    def _save(self, wish: int) -> None:
        if _rank() == 0:
            save_state(self.training, self.recipe, self.folder)
        self.last = time.monotonic()
        if wish > 1:
            raise Stopped(wish, f"stopped at step {self.training.step} of {self.steps}; continue with --resume")


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


def _largest(number: int) -> int:
    """The maximum over all processes."""
    if not dist.is_initialized():
        return number
    everyone = torch.tensor(number)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return int(everyone)


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
    group = recipe.statistics_batch
    if group is not None and pass_size % group and not recipe.freeze:  # frozen norms do not observe
        raise InputError(
            f"statistics_batch is {group}, but {counted(pass_size, 'image')} at a time cannot be split into groups of "
            f"that size: choose a number that divides {pass_size}."
        )
    return local


def _finite(losses: list[Tensor], steps: int) -> Tensor:
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
