"""The training loop: a recipe and a data set in, a trained network out, whatever interrupts it."""

import dataclasses
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bkn_zoo.checkpoints.provenance import processes
from bkn_zoo.errors import InputError, NonFiniteLossError
from bkn_zoo.training.data import evaluation_batches, training_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import batch_size, evaluate, shown
from bkn_zoo.training.interruption import Interruption, Stopped
from bkn_zoo.training.optimizer import learning_rate
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import REMEDY, Training, best_line, save_state, write_log
from bkn_zoo.training.step import make_step

EPOCH_SECONDS = 30.0
"""Between saves after epochs: a few images make short epochs, whose states would take longer than their steps."""


def fit(
    training: Training, recipe: Recipe, data: Data, folder: Path, device: torch.device,
    save_minutes: float = 5.0, workers: int = 0, quiet: bool = False,
) -> None:  # fmt: skip
    """Train to the end of the recipe, from wherever `training` stands.

    After each epoch a line goes to log.jsonl and to `training.history`. The state is saved before the first step, after
    the first epoch and the last, after those between if the last save is half a minute ago, every `save_minutes`, and
    when SIGINT or SIGTERM comes: `Stopped` is raised then. A second SIGINT is a KeyboardInterrupt, at once.
    """
    rank, ranks = dist.get_rank() if dist.is_initialized() else 0, processes()
    local = local_batch(recipe)
    per_epoch = len(data.train) // recipe.gradient_batch
    if not per_epoch:
        raise InputError(f"{len(data.train)} training images do not fill a batch of {recipe.gradient_batch}: lower it.")
    steps = per_epoch * recipe.epochs
    often = min(50, max(per_epoch // 4, 1))  # that the loss is shown, for which the host waits for the device
    varied = _at_training_size(data, recipe)
    step = make_step(training, recipe, device)
    interruption = Interruption(quiet=rank > 0)
    saved = time.monotonic()
    begun = saved - training.seconds  # as if what came before an interruption had come just before now

    def save_if_needed(epoch_ended: bool = False) -> None:
        nonlocal saved
        patience = min(EPOCH_SECONDS, 60 * save_minutes) if epoch_ended else 60 * save_minutes
        due = epoch_ended and (training.finished or len(training.history) == 1)
        # 1 is to save, more the signal to stop for. Clocks and signals differ between processes, which must act as one.
        wish = _largest(interruption.received or int(due or time.monotonic() - saved > patience))
        if wish:
            finite = _finite(losses, training.step)
            if not epoch_ended:  # whose line has counted them
                training.seconds, training.losses = time.monotonic() - begun, finite
            if rank == 0:
                save_state(training, recipe, folder)
            saved = time.monotonic()
        if wish > 1:
            raise Stopped(wish, f"stopped at step {training.step} of {steps}; go on with --resume")

    with (
        interruption.awaited(),
        # None is off where there is no terminal.
        tqdm(total=steps, initial=training.step, unit="step", disable=True if quiet or rank > 0 else None) as bar,
    ):
        if rank == 0:
            write_log(training.history, folder)  # without the lines of epochs that are about to be repeated
            save_state(training, recipe, folder)
        postfix: dict[str, str] = {}
        while training.step < steps and not training.finished:
            epoch, skip = divmod(training.step, per_epoch)
            losses = list(training.losses)  # of the steps before an interruption, which took this long
            spent = training.seconds - sum(line["seconds"] for line in training.history) if losses else 0.0
            started = time.monotonic() - spent
            batches = training_batches(
                varied, local, epoch, recipe.seed, recipe.augmentation, device, skip, rank, ranks, workers
            )
            for batch in batches:
                for group in training.optimizer.param_groups:
                    group["lr"].fill_(learning_rate(recipe, training.step, steps) * group["scale"])
                losses.append(step(batch))
                training.step += 1
                bar.update()
                if len(losses) % often == 0:
                    postfix |= {"loss": f"{_finite(losses, training.step).mean():.3f}"}
                    bar.set_postfix(postfix | {"images": f"{_speed(recipe, losses, started):.0f}/s"})
                if training.step % per_epoch:  # after an epoch's last step only with its line in the history
                    save_if_needed()
            loss = _finite(losses, training.step).mean().item()
            training.losses = torch.empty(0)
            line: dict[str, Any] = {"epoch": epoch + 1, "step": training.step, "loss": loss}
            line["images_per_s"] = _speed(recipe, losses, started)
            if isinstance(data.train, FileImages):
                line["unreadable_images"] = len(data.train.unreadable)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                batches = evaluation_batches(data, data.validation, batch_size(device), device, workers)
                what = None if quiet or rank > 0 else "validation"
                line["validation"] = evaluate(training.result, batches, what=what, total=len(data.validation))
            training.seconds = time.monotonic() - begun
            line["seconds"] = training.seconds - sum(earlier["seconds"] for earlier in training.history)
            training.history.append(line)
            best = best_line(training.history)
            if recipe.keep == "best" and best is line:
                training.best = {name: tensor.clone() for name, tensor in training.result.state_dict().items()}
            mode = max(line["validation"].values(), key=lambda metrics: metrics["top1"])
            postfix |= {"top1": f"{mode['top1']:.2f}"}
            if not quiet and rank == 0:
                bar.write(f"epoch {epoch + 1} of {recipe.epochs}: loss {loss:.3f}, validation top-1 {shown(mode)}")
            if rank == 0:
                write_log(training.history, folder)
            tired = recipe.patience is not None and line["epoch"] - best["epoch"] >= recipe.patience
            training.finished = training.step == steps or bool(_largest(int(tired)))
            save_if_needed(epoch_ended=True)


def further_images(
    recipe: Recipe, data: Data, device: torch.device, batches: int, workers: int = 0
) -> Iterator[Tensor]:  # fmt: skip
    """What a training passed at a time, for what is asked of its result: images that one more epoch would begin with.

    Args:
        batches: as many gradient batches, at most.
    """
    batch = images_at_a_time(recipe)
    more = training_batches(
        _at_training_size(data, recipe), batch, recipe.epochs, recipe.seed, recipe.augmentation, device, workers=workers
    )
    for images, _ in islice(more, batches * recipe.gradient_batch // batch):
        yield images.contiguous(memory_format=torch.channels_last)


def images_at_a_time(recipe: Recipe) -> int:
    """That a process passes through the network, and so takes statistics of where a recipe says nothing else."""
    return recipe.micro_batch or recipe.gradient_batch // processes()


def _at_training_size(data: Data, recipe: Recipe) -> Data:
    size = recipe.train_size or data.preprocessing.size
    return dataclasses.replace(data, preprocessing=dataclasses.replace(data.preprocessing, size=size))


def _largest(number: int) -> int:
    """Of all processes' numbers."""
    if not dist.is_initialized():
        return number
    everyone = torch.tensor(number)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return int(everyone)


def local_batch(recipe: Recipe) -> int:
    """Each process's images of a step; raises where these cannot be split as the recipe asks."""
    ranks = processes()
    local, rest = divmod(recipe.gradient_batch, ranks)
    if rest:
        raise InputError(f"a gradient batch of {recipe.gradient_batch} cannot be shared by {ranks} processes evenly.")
    pass_size = recipe.micro_batch or local
    if local % pass_size:
        raise InputError(f"a batch of {local} images per process cannot be split into micro-batches of {pass_size}.")
    group = recipe.statistics_batch
    if group is not None and pass_size % group and not recipe.freeze:  # frozen norms observe nothing
        raise InputError(
            f"statistics_batch is {group}, but {pass_size} images at a time cannot be split into groups of so many: "
            "choose a number that divides them."
        )
    return local


def _finite(losses: list[Tensor], steps: int) -> Tensor:
    """The means of all processes' losses; raises where one is not finite, so that no state that it spoiled is saved.

    Args:
        steps: that the training has taken, of which these are the last.
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
