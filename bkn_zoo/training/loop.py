"""The training loop: a recipe and a data set in, a trained network out, whatever interrupts it."""

import copy
import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from bkn_zoo.errors import BknZooError, CheckpointError, InputError
from bkn_zoo.models import Network
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.data import evaluation_batches, training_batches
from bkn_zoo.training.datasets import Data, FileImages
from bkn_zoo.training.evaluation import evaluate
from bkn_zoo.training.recipes import Recipe

KALMAN = ("transition", "raw_process_noise", "raw_gain")
STATE, LOG = "state.pt", "log.jsonl"
REMEDY = "start anew with a lower learning rate (the last saved state is from before, but would lead there again)"


class TrainingError(BknZooError):
    """A training that cannot go on."""


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weight decay for convolutions and linear layers only; A, R and q with a learning rate of their own."""
    groups: dict[str, list[Tensor]] = {"decayed": [], "plain": [], "kalman": []}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in KALMAN:
            groups["kalman"].append(parameter)
        else:
            groups["decayed" if parameter.ndim >= 2 else "plain"].append(parameter)
    decay = {"decayed": recipe.weight_decay, "plain": 0.0, "kalman": 0.0}
    scale = {"decayed": 1.0, "plain": 1.0, "kalman": recipe.kalman_lr}
    return [
        {"params": members, "weight_decay": decay[name], "scale": scale[name]}
        for name, members in groups.items()
        if members
    ]


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    # A learning rate on the device can change between replays of a CUDA graph.
    lr: Any = torch.zeros((), device=device)
    groups = [{**group, "lr": lr.clone()} for group in parameter_groups(model, recipe)]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum, nesterov=True, fused=True)
    on_gpu = device.type == "cuda"  # where a CUDA graph may capture its steps
    adamw: Any = torch.optim.AdamW(groups, lr=lr, betas=(recipe.momentum, 0.999), fused=True, capturable=on_gpu)
    adamw._warned_capturable_if_run_uncaptured = True  # no warning of the steps before the capture, which must be
    return adamw


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """At `step` of `steps`."""
    up = max(round(recipe.warmup * steps), 1)
    if step < up:
        return recipe.lr * (step + 1) / up
    done = (step + 1 - up) / max(steps - up, 1)
    down = 1 - done if recipe.schedule == "one_cycle" else (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * down


@dataclass
class Training:
    """What changes while a network is trained, and all that has to be saved of it."""

    model: Network
    averaged: Network | None
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0  # that the steps took, and the validation after each epoch
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def result(self) -> Network:
        return self.model if self.averaged is None else self.averaged


def begin(recipe: Recipe, model: Network, device: torch.device) -> Training:
    model = model.to(device).to(memory_format=torch.channels_last)
    model.statistics_batch_size = recipe.statistics_batch
    averaged = copy.deepcopy(model).eval().requires_grad_(False) if recipe.ema else None
    return Training(model, averaged, make_optimizer(model, recipe, device))


def save_state(training: Training, recipe: Recipe, folder: Path) -> None:
    """Write everything that going on needs: complete, or not at all."""
    for name, parameter in training.model.named_parameters():
        spoiled = parameter.isnan() if name.endswith(".raw_gain") else ~parameter.isfinite()  # a gain of 1 is infinite
        if spoiled.any():
            raise TrainingError(f"{name} was not finite after step {training.step - 1}: {REMEDY}.")
    state = {
        "model": training.model.state_dict(),
        "averaged": None if training.averaged is None else training.averaged.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "step": training.step,
        "seconds": training.seconds,
        "history": json.dumps(training.history),
        "recipe": json.dumps(dataclasses.asdict(recipe)),
    }
    scratch = folder / f".{STATE}.tmp"
    try:
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, folder / STATE)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        scratch.unlink(missing_ok=True)
        raise TrainingError(
            f"{folder / STATE} could not be written ({error}): make room; the last one stays."
        ) from error


def write_log(history: list[dict[str, Any]], folder: Path) -> None:
    """One line per epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in history))
    except OSError as error:
        raise TrainingError(
            f"{folder / LOG} could not be written ({error.strerror}): make room; the last saved state stays."
        ) from error


def load_state(training: Training, recipe: Recipe, folder: Path, device: torch.device) -> None:
    path = folder / STATE
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: there is no training to resume there.")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        theirs, ours = json.loads(state["recipe"]), json.loads(json.dumps(dataclasses.asdict(recipe)))
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({reason}): start the training anew.") from None
    changed = [name for name in ours if ours[name] != theirs.get(name) and name not in ("graph", "compile")]
    if changed:
        name = changed[0]
        raise CheckpointError(f"{path} is of a training with {name} = {theirs.get(name)!r}, not {ours[name]!r}.")
    try:
        training.model.load_state_dict(state["model"])
        if training.averaged is not None:
            training.averaged.load_state_dict(state["averaged"])
        training.optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError):
        raise CheckpointError(
            f"{path} is of a {recipe.model} whose tensors differ, perhaps for other classes: resume with its own data."
        ) from None
    training.step, training.seconds = state["step"], state["seconds"]
    training.history = json.loads(state["history"])


def make_step(training: Training, recipe: Recipe, device: torch.device) -> Callable[[Batch], Tensor]:
    """One optimizer step on one process's share of a gradient batch; returns the mean loss, on the device."""
    network: Any = training.model
    alone: Callable[[], Any] = nullcontext  # within it, gradients are not yet shared with other processes
    if dist.is_initialized():
        # Every process normalizes by its own groups; `share_running_averages` joins what they remember.
        network = DistributedDataParallel(training.model, broadcast_buffers=False)
        alone = network.no_sync
    if recipe.compile:
        network = torch.compile(network)
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    half = recipe.precision == "bfloat16"

    def step(batch: Batch) -> Tensor:
        training.optimizer.zero_grad(set_to_none=True)
        micro = recipe.micro_batch or len(batch.images)
        parts = list(zip(batch.images.split(micro), batch.targets.split(micro), strict=True))
        total = torch.zeros((), device=device)
        for number, (images, targets) in enumerate(parts, start=1):
            with alone() if number < len(parts) else nullcontext():
                # Without autocast's cache, which a CUDA graph must not share with what runs outside of it.
                with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
                    logits = network(images.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing) / len(parts)
                loss.backward()
            total += loss.detach()
        if recipe.clip:
            nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        training.optimizer.step()
        share_running_averages(training.model)
        if training.averaged is not None:
            average(training.averaged, training.model, 1 - recipe.ema)
        return total

    return _graphed(step) if recipe.graph and device.type == "cuda" and not dist.is_initialized() else step


def _graphed(step: Callable[[Batch], Tensor], eager_steps: int = 3) -> Callable[[Batch], Tensor]:
    """The same, replayed from a CUDA graph after a few steps that are launched one kernel at a time."""
    graph, buffers, loss, taken = torch.cuda.CUDAGraph(), None, None, 0

    def run(batch: Batch) -> Tensor:
        nonlocal buffers, loss, taken
        taken += 1
        if taken <= eager_steps:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                result = step(batch)
            torch.cuda.current_stream().wait_stream(side)
            return result
        if buffers is None:
            buffers = Batch(*(part.clone() for part in batch))
            # "thread_local": the thread in which a DataLoader pins memory may go on meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                loss = step(buffers)
        for buffer, part in zip(buffers, batch, strict=True):
            buffer.copy_(part)
        graph.replay()
        assert loss is not None
        return loss.clone()

    return run


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, share: float) -> None:
    """Move the averaged weights, and the running averages with them, by `share` towards the model's."""

    def values(module: nn.Module) -> list[Tensor]:
        return [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.is_floating_point())]

    def counts(module: nn.Module) -> list[Tensor]:
        return [buffer for buffer in module.buffers() if not buffer.is_floating_point()]

    torch._foreach_lerp_(values(averaged), values(model), share)
    if counts(model):
        torch._foreach_copy_(counts(averaged), counts(model))


@torch.no_grad()
def share_running_averages(model: nn.Module) -> None:
    """Give every process the mean of all processes' running averages.

    After every step, in one message: done only where a state is saved, the clock would decide what they become.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if dist.is_initialized() and buffers:
        together = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(together)
        together /= dist.get_world_size()
        parts = together.split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


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
