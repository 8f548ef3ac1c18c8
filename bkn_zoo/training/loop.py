"""The training loop, which can be interrupted and resumed."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import InputError, NonFiniteLossError, counted
from bkn_zoo.progress import bar
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import Runtime, training_batches
from bkn_zoo.training.datasets import Data, FileImages, class_weights
from bkn_zoo.training.evaluation import logits_on, measure_modes, show_top1
from bkn_zoo.training.interruption import Stopped, noted
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import REMEDY, Training, kept_line, metrics_of, save_state, validation_loss, write_log
from bkn_zoo.training.step import autocast, learning_rate, make_step

# Seconds between saves after epochs. With few images, saving after every epoch would take longer than its steps
EPOCH_SECONDS = 30.0


def fit(
    training: Training, recipe: Recipe, data: Data, folder: Path, runtime: Runtime, save_minutes: float = 5.0
) -> None:  # fmt: skip
    """Train to the end of the recipe, from the current step of `training`.

    The state is saved before the first step, after the first and the last epoch, after others if the last save was half
    a minute ago, every `save_minutes`, and on SIGINT or SIGTERM, which then raise `Stopped`; a second SIGINT at once.
    """
    local_batch(recipe, data)
    steps = len(data.train) // recipe.gradient_batch * recipe.epochs
    if not steps and not training.history:
        raise InputError("epochs is 0, which only fine-tuning supports: choose at least 1.")
    training.finished = training.finished or not steps
    runtime = runtime._replace(quiet=runtime.quiet or _rank() > 0)
    weights = class_weights(data).to(runtime.device) if recipe.balance else None
    step = make_step(training, recipe, runtime.device, weights)
    shown = bar(steps - training.step, None if runtime.quiet else "training", "step", lines=True)
    with noted(runtime.quiet) as signals, shown as done, _tensorboard(folder, runtime.log) as writer:
        saves = _Saves(training, recipe, folder, save_minutes, steps, signals)
        if _rank() == 0:
            write_log(training.history, folder)  # without the lines of epochs that will be repeated
            save_state(training, recipe, folder)
            _write_scalars(writer, training.history)
        while training.step < steps and not training.finished:
            line = _train_epoch(training, recipe, data, runtime, step, saves, done)
            with autocast(recipe, runtime.device):
                line["validation"] = validate_epoch(training, recipe, data, runtime)
            training.seconds = saves.elapsed()
            line["seconds"] = training.seconds - sum(earlier["seconds"] for earlier in training.history)
            training.history.append(line)
            if recipe.keep == "best" and kept_line(training.history, recipe) is line:
                training.keep_weights()
            if _rank() == 0:
                write_log(training.history, folder)
                _write_scalars(writer, [line])
            tired = recipe.patience is not None and line["epoch"] - _lowest_epoch(training) >= recipe.patience
            late = training.step >= max(recipe.warmup, 0.5) * steps
            training.finished = training.step == steps or bool(largest_of_all(int(tired and late)))
            if not runtime.quiet:
                _report_epoch(training, recipe, steps)
            saves.if_due([], training.finished or len(training.history) == 1)


def validate_epoch(training: Training, recipe: Recipe, data: Data, runtime: Runtime) -> dict[str, dict[str, float]]:
    """The accuracy on the validation images in one mode: as before, the start's, or for new weights the groups'."""
    mode = "sample" if recipe.statistics_batch_size == 1 else "expected"
    if training.init or recipe.freeze or recipe.statistics_batch_size is None:
        mode = training.result.default_statistics
    mode = mode if mode in runtime.modes else runtime.modes[0]
    # A resumed training may have other modes, whose losses do not compare.
    (mode,) = training.history[-1]["validation"] if training.history else [mode]
    return measure_modes(*logits_on(training.result, data, data.validation, runtime, "validation", [mode]))


def _train_epoch(
    training: Training, recipe: Recipe, data: Data, runtime: Runtime, step: Callable[[Batch], Tensor],
    saves: "_Saves", done: Callable[..., None],
) -> dict[str, Any]:  # fmt: skip
    """Run the remaining steps of the epoch. Returns the beginning of its line in the log."""
    per_epoch = saves.steps // recipe.epochs
    epoch, skip = divmod(training.step, per_epoch)
    losses = list(training.losses)  # of the steps before an interruption
    spent = training.seconds - sum(line["seconds"] for line in training.history) if losses else 0.0
    started = time.monotonic() - spent
    share = local_batch(recipe, data)
    # Showing a loss waits for the device.
    often, note = min(50, max(per_epoch // 4, 1)), ""
    for batch in training_batches(
        _at_training_size(data, recipe), share, epoch, recipe.seed, recipe.augmentation, runtime.device,
        skip, _rank(), processes(), runtime.workers,
    ):  # fmt: skip
        for group in training.optimizer.param_groups:
            group["lr"].fill_(learning_rate(recipe, training.step, saves.steps) * group["scale"])
        losses.append(step(batch))
        training.step += 1
        if len(losses) % often == 0:
            # Of the last steps only: an epoch may have many thousands. All are looked at when it ends.
            note = f"loss {mean_losses(losses[-often:], training.step).mean():.3f}"
        done(1, note)
        if training.step % per_epoch:  # after the last step of an epoch, save only with its line in the history
            saves.if_due(losses)
    line: dict[str, Any] = {"epoch": epoch + 1, "step": training.step}
    line["loss"] = mean_losses(losses, training.step).mean().item()
    line["images_per_s"] = recipe.gradient_batch * len(losses) / (time.monotonic() - started)
    training.losses = torch.empty(0)
    if isinstance(data.train, FileImages):
        line["unreadable_images"] = len(data.train.unreadable)
    return line


class _Saves:
    """Decides when the state is saved and whether the training stops, for all processes together."""

    def __init__(
        self, training: Training, recipe: Recipe, folder: Path, minutes: float, steps: int, signals: list[int]
    ) -> None:
        self.training, self.recipe, self.folder, self.steps, self.signals = training, recipe, folder, steps, signals
        self.patience, self.last = 60 * minutes, time.monotonic()
        # The time before an interruption counts, too.
        self.begun = self.last - training.seconds

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def if_due(self, losses: list[Tensor], due: bool = False) -> None:
        """Save after a step, with the losses of its epoch so far, or after an epoch, with none; then stop if asked."""
        patience = self.patience if losses else min(EPOCH_SECONDS, self.patience)
        # Clocks and signals differ between processes, so they agree: 1 means save, more is the signal to stop for.
        own = self.signals[-1] if self.signals else int(due or time.monotonic() - self.last > patience)
        wish = largest_of_all(own)
        if not wish:
            return
        if losses:
            self.training.losses, self.training.seconds = mean_losses(losses, self.training.step), self.elapsed()
        if _rank() == 0:
            save_state(self.training, self.recipe, self.folder)
        self.last = time.monotonic()
        if wish > 1:
            raise Stopped(wish, f"stopped at step {self.training.step} of {self.steps}; continue with --resume")


def _tensorboard(folder: Path, log: str | None) -> AbstractContextManager[Any]:
    """A writer for TensorBoard, which replaces what is in the folder; or None without a logger."""
    if not log or _rank() > 0:
        return nullcontext()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / "tensorboard", purge_step=0)


def _write_scalars(writer: Any, lines: list[dict[str, Any]]) -> None:
    for line in lines if writer else ():
        values = {name: line[name] for name in ("loss", "images_per_s") if line[name] is not None}
        for mode, metrics in line["validation"].items():
            values |= {f"validation/{mode}/{name}": value for name, value in metrics.items()}
        for name, value in values.items():
            writer.add_scalar(name, value, line["epoch"])


def _lowest_epoch(training: Training) -> int:
    """The epoch with the lowest validation loss. The classifier's first phase, epoch 0, does not count."""
    return min((line for line in training.history if line["epoch"] > 0), key=validation_loss)["epoch"]


def _report_epoch(training: Training, recipe: Recipe, steps: int) -> None:
    """Print the last line of the history, and at the end of the training which weights are kept."""
    line, kept = training.history[-1], kept_line(training.history, recipe)
    note = ", kept so far" if recipe.keep == "best" and kept is line else ""
    losses = f"loss {line['loss']:.4g}, validation loss {validation_loss(line):.4g}"
    top1 = show_top1(metrics_of(line))
    tqdm.write(f"epoch {line['epoch']} of {recipe.epochs}: {losses}, top-1 {top1}{note}")
    if training.finished and training.step < steps:
        since = f"since epoch {_lowest_epoch(training)} (--patience {recipe.patience})"
        tqdm.write(f"stopped: the validation loss has not fallen {since}")
    if training.finished and training.best is not None:
        tqdm.write(f"the weights of epoch {kept['epoch']} are kept")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def further_images(recipe: Recipe, data: Data, runtime: Runtime, batches: int) -> Iterator[Tensor]:
    """Images of one more epoch, in passes as in training, of at most this many gradient batches."""
    batch, sized = images_at_a_time(recipe), _at_training_size(data, recipe)
    numbers = batch, recipe.epochs, recipe.seed
    more = training_batches(sized, *numbers, recipe.augmentation, runtime.device, workers=runtime.workers)
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
    # On the host, which does not wait for a GPU, unless there is NCCL alone.
    everyone = torch.tensor(number, device="cpu" if "cpu" in dist.get_backend_config() else "cuda")
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return int(everyone)


def local_batch(recipe: Recipe, data: Data) -> int:
    """The images of each process per step; an error if they cannot be split as the recipe says."""
    batch, micro, ranks = recipe.gradient_batch, recipe.micro_batch, processes()
    if len(data.train) < batch:
        raise InputError(f"{len(data.train)} training images do not fill a batch of {batch}: choose a smaller one.")
    local, rest = divmod(batch, ranks)
    if rest:
        raise InputError(f"a gradient batch of {batch} cannot be divided among {ranks} processes: choose a multiple.")
    if local % (micro or local):
        told = f"a batch of {counted(local, 'image')} per process cannot be split into micro-batches of {micro}"
        raise InputError(f"{told}: use a divisor.")
    return local


def mean_losses(losses: list[Tensor], steps: int) -> Tensor:
    """The mean losses, of the last of `steps` steps, over all processes; refuses those that are not finite."""
    values = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    good = values.isfinite()
    if not good.all():
        step = steps - len(losses) + int((~good).nonzero()[0, 0])
        raise NonFiniteLossError(f"the loss was not finite at step {step}: {REMEDY}.")
    return values
