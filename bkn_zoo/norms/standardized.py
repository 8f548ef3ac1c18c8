"""Convolutions with standardized weights (Qiao et al. 2019): mean 0 and a variance of about 1/fan_in per channel."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.errors import InputError
from bkn_zoo.kernels.conditions import channels_last, observed_by_pytorch
from bkn_zoo.norms.statistics import in_full_precision, without_autocast
from bkn_zoo.torch_internals import saved_tensors_are_hooked

EPS = 1e-4
"""Added to the variance of a channel's weight."""


def standardize(weight: Tensor, eps: float = EPS) -> Tensor:
    """(w - mean) / sqrt(fan_in (var + eps)) for each output channel, in float32 (float64 for float64)."""
    with without_autocast(weight):
        weight = in_full_precision(weight)
        dims = tuple(range(1, weight.ndim))
        var, mean = torch.var_mean(weight, dim=dims, correction=0, keepdim=True)
        return (weight - mean) * torch.rsqrt(weight[0].numel() * (var + eps))


class _Ready(threading.local):
    def __init__(self) -> None:
        self.weights: dict[Tensor, Tensor] = {}


READY = _Ready()
"""The standardized weights by raw weight, within `standardized_once`. Other threads may run the same network."""


class StandardizedConv(nn.Module):
    """Mixin for convolutions: `weight` is the raw weight, and the input is convolved with the standardized one.

    In evaluation mode without gradients, it is kept on CPUs until the raw one changes. PyTorch does not count changes
    of a tensor's `.data` or by fused optimizers, so one number of each channel is compared, too.
    """

    weight: Tensor
    bias: Tensor | None
    _kept: tuple[Any, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.ready_weight()
        if weight is None:
            weight = self.standardized_weight().to(self.weight.dtype)
        return self._conv_forward(x, weight, self.bias)  # type: ignore[operator]

    def ready_weight(self) -> Tensor | None:
        """The result of `standardized_once`, in autocast's precision, where it has the gradients that are needed."""
        # Activation checkpointing runs a layer twice, which must save the same tensors, and the second time alone.
        if torch.compiler.is_compiling() or saved_tensors_are_hooked():
            return None
        raw = self.weight
        ready = READY.weights.get(raw)
        if ready is None or ready.requires_grad != (torch.is_grad_enabled() and raw.requires_grad):
            return None
        # A part of a network may run without autocast, or with gradients within inference mode.
        usable = ready.dtype == raw.dtype or torch.is_autocast_enabled("cuda")
        return ready if usable and not (ready.is_inference() and torch.is_grad_enabled()) else None

    def standardized_weight(self) -> Tensor:
        raw = self.weight
        learns = self.training or (torch.is_grad_enabled() and raw.requires_grad)
        # Elsewhere, comparing numbers would wait for the device. A trace must not depend on earlier calls.
        keeps = not learns and raw.device.type == "cpu" and not torch.jit.is_tracing()
        if not keeps or observed_by_pytorch(constant := raw.detach()) or raw.is_inference():
            return standardize(raw)
        seen = id(raw), raw._version, raw.data_ptr(), raw.shape
        # The first of each channel.
        numbers = constant.as_strided(raw.shape[:1], raw.stride()[:1])
        kept = self._kept
        if kept is None or kept[0] != seen or not torch.equal(kept[1], numbers):
            # Not an inference tensor, which a later call with gradients could not save.
            with torch.inference_mode(False), torch.no_grad():
                kept = seen, numbers.clone(), standardize(constant)
            self._kept = kept
        return kept[2]

    def train(self, mode: bool = True) -> Self:
        self._kept = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_rows", "_captured")}


class StandardizedConv1d(StandardizedConv, nn.Conv1d):
    pass


class StandardizedConv2d(StandardizedConv, nn.Conv2d):
    pass


class StandardizedConv3d(StandardizedConv, nn.Conv3d):
    pass


PLAIN: dict[Any, Any] = {StandardizedConv1d: nn.Conv1d, StandardizedConv2d: nn.Conv2d, StandardizedConv3d: nn.Conv3d}
STANDARDIZED: dict[Any, Any] = {plain: standardized for standardized, plain in PLAIN.items()}


def standardize_convolutions(network: nn.Module, names: Collection[str] | None = None) -> None:
    """Standardize the weights of all or some convolutions, in place: before training, and before loading such weights.

    Transposed, parametrized and depthwise ones, and those with one weight per channel, stay as they are.

    Args:
        names: the names of modules, as in `named_modules`; None: all.
    """
    chosen: Any = dict(network.named_modules())
    for name in chosen if names is None else names:
        if name not in chosen:
            raise InputError(f"there is no module {name!r}: choose names of named_modules().")
        conv = chosen[name]
        kind = STANDARDIZED.get(type(conv))
        if kind and conv.weight[0].numel() > 1 and not 1 < conv.groups == conv.in_channels:
            conv.__class__ = kind


def standardized_convolutions(network: nn.Module) -> list[StandardizedConv]:
    """The convolutions of a network that have standardized weights."""
    return [module for module in network.modules() if isinstance(module, StandardizedConv)]


@torch.no_grad()
def with_constant_weights(network: nn.Module) -> None:
    """Replace convolutions with standardized weights by plain ones with the same result, in place."""
    for module in network.modules():
        kind = PLAIN.get(type(module))
        # Pruning, for example, computes the weight in a hook: such a convolution standardizes it by itself.
        if kind is not None and "weight" in module._parameters:
            weight: Any = module.weight
            # A new parameter: other networks may share the old one.
            constant = standardize(weight).to(weight.dtype)
            module.weight = nn.Parameter(constant, requires_grad=False)
            module.__class__ = kind


def in_one_launch(convs: Sequence[Any]) -> list[nn.Parameter]:
    """The weights of those of these convolutions whose weights a kernel can standardize together."""
    # In evaluation mode, second derivatives are possible, but not those of the kernel.
    learns = torch.is_grad_enabled()
    if not (kernels.HAS_TRITON and convs) or READY.weights or (learns and not convs[0].training):
        return []
    if saved_tensors_are_hooked():
        return []
    # Pruning, for example, computes the weight in a hook. A part of a sharded weight has another type or shape.
    weights = [conv._parameters.get("weight") for conv in convs]
    known = [weight for weight in weights if type(weight) is nn.Parameter and weight.ndim > 2]
    known = [weight for weight in known if weight.is_contiguous() or channels_last(weight)]
    if not known or not kernels.chosen(first := known[0].detach()) or observed_by_pytorch(first):
        return []
    return [weight for weight in known if (weight.dtype, weight.device) == (first.dtype, first.device)]


@contextmanager
def standardized_once(network: nn.Module) -> Iterator[None]:
    """Standardize the weights of a network in one launch, if that is possible, for its calls within this context."""
    convs: list[Any] = standardized_convolutions(network)
    weights = in_one_launch(convs)
    if not weights:
        yield
        return
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weights[0].dtype
    own = convs[0].__dict__
    rows = own.get("_rows")
    capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if rows is None or not rows.fit(weights):
        if capturing:  # a table cannot be sent to the device now
            yield
            return
        own["_rows"] = rows = kernels.rows_of(weights)
    if capturing:  # replays need the table, whatever other calls do
        own["_captured"] = own.get("_captured", {}) | {id(rows): rows}
    ready = kernels.StandardizeAll.apply(rows, dtype, EPS, *weights)
    READY.weights = dict(zip(weights, ready, strict=True))
    try:
        yield
    finally:
        READY.weights = {}
