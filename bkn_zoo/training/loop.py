"""The training loop: a recipe and a data set in, a trained network out, whatever interrupts it."""

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from bkn_zoo.errors import InputError
from bkn_zoo.training.data import evaluation_batches, training_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import evaluate
from bkn_zoo.training.optimizer import learning_rate
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import REMEDY, Training, TrainingError, save_state, write_log
from bkn_zoo.training.step import make_step


def fit(
    training: Training, recipe: Recipe, data: Data, folder: Path, device: torch.device,
    save_minutes: float = 5.0, workers: int = 0, quiet: bool = False,
) -> None:  # fmt: skip
    """Train to the end of the recipe, from wherever `training` stands.

    After each epoch a line goes to log.jsonl and to `training.history`; the state is saved every `save_minutes`, at the
    end, and when SIGTERM comes (SystemExit is raised then).
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    local = _local_batch(recipe, ranks)
    per_epoch = len(data.train) // recipe.gradient_batch
    if not per_epoch:
        raise InputError(f"{len(data.train)} training images do not fill a batch of {recipe.gradient_batch}: lower it.")
    steps = per_epoch * recipe.epochs
    size = recipe.train_size or data.preprocessing.size
    varied = dataclasses.replace(data, preprocessing=dataclasses.replace(data.preprocessing, size=size))
    step = make_step(training, recipe, device)
    saved = time.monotonic()
    begun = saved - training.seconds  # as if what came before an interruption had come just before now
    if rank == 0:
        write_log(training.history, folder)  # without the lines of epochs that are about to be repeated

    def save_if_needed() -> None:
        nonlocal saved
        wish = 2 if stopping() else int(time.monotonic() - saved > 60 * save_minutes)
        wish = _largest(wish)  # clocks and signals differ between processes, which have to act as one
        if wish:
            _finite(losses, first)
            training.seconds = time.monotonic() - begun
            if rank == 0:
                save_state(training, recipe, folder)
            saved = time.monotonic()
        if wish == 2:
            raise SystemExit(f"stopped at step {training.step}; go on with --resume")

    with (
        _stop_on_sigterm() as stopping,
        tqdm(total=steps, initial=training.step, unit="step", disable=quiet or rank > 0) as bar,
    ):
        shown: dict[str, str] = {}
        while training.step < steps:
            epoch, skip = divmod(training.step, per_epoch)
            started, first = time.monotonic(), training.step
            losses: list[Tensor] = []
            batches = training_batches(
                varied, local, epoch, recipe.seed, recipe.augmentation, device, skip, rank, ranks, workers
            )
            for batch in batches:
                for group in training.optimizer.param_groups:
                    group["lr"].fill_(learning_rate(recipe, training.step, steps) * group["scale"])
                losses.append(step(batch))
                training.step += 1
                bar.update()
                if len(losses) % 50 == 0:
                    shown |= {"loss": f"{_finite(losses, first):.3f}"}
                    bar.set_postfix(shown | {"images": f"{_speed(recipe, losses, started):.0f}/s"})
                if training.step % per_epoch:  # after an epoch's last step only with its line in the history
                    save_if_needed()
            loss = _finite(losses, first)
            line: dict[str, Any] = {"epoch": epoch + 1, "step": training.step, "loss": loss}
            line["images_per_s"] = _speed(recipe, losses, started)
            if isinstance(data.train, FileImages):
                line["unreadable_images"] = len(data.train.unreadable)
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
                batches = evaluation_batches(data, data.validation, 500, device, workers)
                line["validation"] = evaluate(training.result, batches)
            training.seconds = time.monotonic() - begun
            line["seconds"] = training.seconds - sum(earlier["seconds"] for earlier in training.history)
            training.history.append(line)
            best = max(metrics["top1"] for metrics in line["validation"].values())
            shown |= {"top1": f"{best:.2f}"}
            if not bar.disable:
                bar.write(f"epoch {epoch + 1}: loss {loss:.3f}, validation top-1 {best:.2f} %")
            if rank == 0:
                write_log(training.history, folder)
            save_if_needed()
        if rank == 0:
            save_state(training, recipe, folder)


def _largest(number: int) -> int:
    """Of all processes' numbers."""
    if not dist.is_initialized():
        return number
    everyone = torch.tensor(number)
    dist.all_reduce(everyone, dist.ReduceOp.MAX)
    return int(everyone)


def _local_batch(recipe: Recipe, ranks: int) -> int:
    local, rest = divmod(recipe.gradient_batch, ranks)
    if rest:
        raise InputError(f"a gradient batch of {recipe.gradient_batch} cannot be shared by {ranks} processes evenly.")
    pass_size = recipe.micro_batch or local
    if local % pass_size:
        raise InputError(f"a batch of {local} images per process cannot be split into micro-batches of {pass_size}.")
    return local


def _finite(losses: list[Tensor], first: int) -> float:
    """Mean of all processes' losses; raises where one is not finite, so that no state that it spoiled is saved."""
    values = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    good = values.isfinite()
    if not good.all():
        step = first + int((~good).nonzero()[0, 0])
        raise TrainingError(f"the loss was not finite at step {step}: {REMEDY}.")
    return values.mean().item()


def _speed(recipe: Recipe, losses: list[Tensor], started: float) -> float:
    return recipe.gradient_batch * len(losses) / (time.monotonic() - started)


class _stop_on_sigterm:  # noqa: N801
    """Within it, SIGTERM is noted, to be acted on after the step that is under way."""

    def __enter__(self) -> Callable[[], bool]:
        self.received = False
        try:
            self.before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not the main thread, which alone may set handlers
            self.before = None
        return lambda: self.received

    def _note(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
