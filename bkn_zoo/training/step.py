"""One optimizer step, launched kernel by kernel or replayed from a CUDA graph, and averages over processes."""

import inspect
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.capture import captured, side_stream
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import Training

Part = tuple[Tensor, Tensor]


def make_step(
    training: Training, recipe: Recipe, device: torch.device, weights: Tensor | None = None
) -> Callable[[Batch], Tensor]:
    """One step on one process's share of a gradient batch, with `weights` of classes; returns the mean loss."""
    network: Any = training.model
    alone: Callable[[], Any] = nullcontext  # a context in which gradients are not yet averaged over processes
    if dist.is_initialized():
        with side_stream() if device.type == "cuda" else nullcontext():
            network = parallel(training.model)
        alone = network.no_sync
    if recipe.compile:
        network = torch.compile(network)
    # PyTorch's gradients of depthwise convolutions use one thread on ARM processors.
    slow_depthwise = device.type == "cpu" and platform.machine() in ("aarch64", "arm64") and not recipe.compile
    smoothing, reduction = recipe.label_smoothing, "mean" if weights is None else "none"
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]

    def step(batch: Batch) -> Tensor:
        training.optimizer.zero_grad(set_to_none=True)
        micro = recipe.micro_batch or len(batch.images)
        parts = list(zip(batch.images.split(micro), batch.targets.split(micro), strict=True))
        total = torch.zeros((), device=device)
        for number, (images, targets) in enumerate(_remembered_as_one(parts, training.model), start=1):
            with alone() if number < len(parts) else nullcontext():
                # Without autocast's cache, which a CUDA graph must not share with what runs outside of it.
                precision = autocast(recipe, device, cache_enabled=False)
                with precision, _FastDepthwise() if slow_depthwise else nullcontext():
                    logits = network(images.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing, reduction=reduction)
                loss = (loss if weights is None else (loss * (targets @ weights)).mean()) / len(parts)
                loss.backward()
            total += loss.detach()
        if recipe.clip:
            nn.utils.clip_grad_norm_(parameters, recipe.clip, foreach=True)
        training.optimizer.step()
        share_running_averages(training.model)
        if training.averaged is not None:
            average(training.averaged, training.model, 1 - recipe.ema)
        return total

    if not (recipe.graph and device.type == "cuda"):
        return step
    replayed = captured(lambda images, targets: step(Batch(images, targets)))
    return lambda batch: replayed(*batch)


def autocast(recipe: Recipe, device: torch.device, **options: Any) -> torch.autocast:
    """A context in which a network runs in the precision of a recipe."""
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16", **options)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate at `step` of `steps`."""
    up = max(round(recipe.warmup * steps), 1)
    if step < up:
        return recipe.lr * (step + 1) / up
    done = (step + 1 - up) / max(steps - up, 1)
    down = 1 - done if recipe.schedule == "one_cycle" else (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * down


def parallel(model: nn.Module) -> DistributedDataParallel:
    """The model with gradients averaged over all processes. `share_running_averages` averages running averages."""
    # By default, DDP would copy the buffers of the first process. The second name is that of older versions of torch.
    known, names = inspect.signature(DistributedDataParallel).parameters, ("forward_sync_buffers", "broadcast_buffers")
    option: dict[str, Any] = {next(name for name in names if name in known): False}
    return DistributedDataParallel(model, **option)


def _remembered_as_one(parts: list[Part], model: nn.Module) -> Iterator[Part]:
    """The parts of a step, one per pass, which together update the running averages once, by the mean of all passes."""
    averages, counts = running_averages(model), counters(model)
    if len(parts) == 1 or not averages:
        yield from parts
        return
    before, steps = _joined(averages), _joined(counts)
    moved, taken = torch.zeros_like(before), steps
    for part in parts:
        _copy_joined(before, averages)
        _copy_joined(steps, counts)
        yield part
        moved += _joined(averages)
        taken = torch.maximum(taken, _joined(counts))
    _copy_joined(moved / len(parts), averages)
    _copy_joined(taken, counts)


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, share: float) -> None:
    """Move the averaged weights, and their running averages, by `share` towards those of the model."""
    old, new = ([*module.parameters(), *running_averages(module)] for module in (averaged, model))
    torch._foreach_lerp_(old, new, share)
    if counters(model):
        torch._foreach_copy_(counters(averaged), counters(model))


@torch.no_grad()
def share_running_averages(model: nn.Module) -> None:
    """Give every process the mean of the running averages of all processes, in one message after every step."""
    averages = running_averages(model)
    if dist.is_initialized() and averages:
        together = _joined(averages)
        dist.all_reduce(together)
        _copy_joined(together / dist.get_world_size(), averages)


def running_averages(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def counters(model: nn.Module) -> list[Tensor]:
    """The step counters of norms."""
    return [buffer for buffer in model.buffers() if not buffer.is_floating_point()]


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _copy_joined(values: Tensor, tensors: list[Tensor]) -> None:
    """Copy a result of `_joined` into tensors of the same shapes."""
    parts = values.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])


class _FastDepthwise(TorchFunctionMode):
    """A context in which gradients of depthwise float32 convolutions are about four times as fast on ARM processors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = not kwargs and len(args) == 7 and not torch.is_autocast_enabled("cpu")
        if func is torch.conv2d and plain and torch.is_grad_enabled():
            x, weight, bias, stride, padding, dilation, groups = args
            same = groups == weight.shape[0] == x.shape[1] > 1 and x.dtype == weight.dtype == torch.float32
            if same and bias is None and not isinstance(padding, str) and set(dilation) == {1}:
                return _Depthwise.apply(x, weight, stride, padding)
        return func(*args, **(kwargs or {}))


class _Depthwise(torch.autograd.Function):
    """A convolution of each channel with a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding, groups=len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (high, wide), (down, across) = weight.shape[2:], ctx.stride
        top, left = ctx.padding
        padded = F.pad(x, (left, left, top, top)).permute(0, 2, 3, 1)  # channels last: sums over all else are vectors
        rows, columns = down * gradient.shape[2], across * gradient.shape[3]
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            last = gradient.permute(0, 2, 3, 1)
            seen = [padded[:, i : i + rows : down, j : j + columns : across] for i in range(high) for j in range(wide)]
            sums = [(each[:, : last.shape[1], : last.shape[2]] * last).sum((0, 1, 2)) for each in seen]
            of_weight = torch.stack(sums, dim=1).view_as(weight)
        if ctx.needs_input_grad[0]:  # the gradient, with zeros between its values, by mirrored kernels
            size = padded.shape[1] - high + 1, padded.shape[2] - wide + 1
            spread = gradient.new_zeros((*gradient.shape[:2], *size)).contiguous(memory_format=torch.channels_last)
            spread[:, :, :rows:down, :columns:across] = gradient
            whole = F.conv2d(spread, weight.flip(2, 3), None, 1, (high - 1, wide - 1), groups=len(weight))
            of_x = whole[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        return of_x, of_weight, None, None
