"""Checks on your inputs that a converted network computes the same as the original."""

import copy
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bkn_zoo.conversion.converted import Converted
from bkn_zoo.conversion.example import left_alone
from bkn_zoo.conversion.ledger import tensors_in
from bkn_zoo.errors import ConversionError
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.torch_internals import tree_map

NEGLIGIBLE = 1e-4
"""Share of the largest gradient. Smaller gradients, such as that of a bias before a norm, are compared with it."""

TOLERANCES = {torch.float64: (1e-9, 1e-5), torch.float32: (1e-4, 1e-2)}
"""Relative differences: the usual limit, and the largest one for networks that amplify rounding errors."""

ROUNDINGS = 100
"""The effect of all roundings of a network, relative to that of the last bit of its inputs."""


class Proof(NamedTuple):
    """The largest relative differences: of the `population` output, and of a training step at gain 1, which is BN."""

    output: float
    loss: float
    gradients: float
    averages: float


def prove(
    original: nn.Module, converted: nn.Module, *inputs: Any, tolerance: float | None = None, **named: Any
) -> Proof:
    """Check that `converted` computes the same as `original`. Neither is changed.

    Args:
        original: the network before its conversion.
        converted: the result of `convert`, before training.
        inputs: the inputs of both, large enough for a training step of the original.
        named: further inputs by name.
        tolerance: largest relative difference; by default 1e-9, or more for a network that amplifies rounding errors:
            a hundred times the effect of the last bit of the inputs, at most 1e-5. In float32, which is used if the
            network supports nothing else, 1e-4 and at most 1e-2.
    """
    try:
        return _prove(original, converted, (inputs, named), torch.float64, tolerance)
    except ConversionError:
        raise
    except Exception:  # the network may support only float32
        return _prove(original, converted, (inputs, named), torch.float32, tolerance)


def _prove(
    original: nn.Module, converted: nn.Module, inputs: Any, dtype: torch.dtype, tolerance: float | None
) -> Proof:
    bn, bkn = (_cast(model, dtype) for model in (original, converted))
    inputs = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    for module in bkn.modules():
        if isinstance(module, Converted):
            module.default_statistics, module.statistics_batch_size = "population", None
    for model in (bn, bkn):
        model.eval()  # not chained, because a custom train() may return nothing
    with torch.no_grad():
        output = _difference(_seeded_outputs(bn, inputs), _seeded_outputs(bkn, inputs))
    for module in bkn.modules():
        if isinstance(module, BatchKalmanNorm) and module.has_prior:
            module.set_gain(1.0)
    wanted = _step(bn, inputs)
    proof = Proof(output, *map(_difference, wanted, _step(bkn, inputs)))
    usual, largest = TOLERANCES[dtype]
    allowed = usual if tolerance is None else tolerance
    if not max(proof) <= allowed:
        # The last bits of the inputs show the rounding errors that the original amplifies, and whether it is random.
        amplified = max(map(_difference, wanted, _step(_cast(original, dtype), tree_map(_nudge, inputs))))
        if tolerance is None:
            allowed = max(usual, min(ROUNDINGS * amplified, largest))
        shown = ", ".join(f"{name} {value:.1e}" for name, value in zip(proof._fields, proof, strict=True))
        if amplified > largest:
            raise ConversionError(
                f"two nearly equal training steps of the original differ by {amplified:.0e}, for example by random "
                f"numbers in its backward pass, so the converted network cannot be compared with it ({shown})."
            )
        if not max(proof) <= allowed:
            raise ConversionError(
                f"the converted network differs from the original by more than {allowed:.0e}: {shown}. Please report "
                "it."
            )
    return proof


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin = copy.deepcopy(model)
    return twin._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _nudge(x: Any) -> Any:
    """A tensor whose numbers change in the last bit, each towards another one of them."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.nextafter(x, x.flatten().flip(0).view_as(x))


def _step(model: nn.Module, inputs: Any) -> tuple[Mapping[str, Tensor], ...]:
    """Loss, gradients and buffers of a training step."""
    model.train()
    outputs = _seeded_outputs(model, inputs)
    # Random weights, because a mean of squares after a norm would have no gradient.
    with seeded(0):
        # Not `randn_like`, whose numbers depend on the memory layout, which may differ.
        weights = {name: torch.randn(x.shape, dtype=x.dtype).to(x.device) for name, x in outputs.items()}
    terms = [(x * weights[name]).mean() for name, x in outputs.items() if x.numel()]
    loss = torch.stack(terms).sum() if terms else torch.zeros(())
    # Before the backward pass, where PyTorch's batch norms update their averages again in a checkpointed part.
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if loss.requires_grad:
        loss.backward()
    # None counts as zero: if a forward detaches features, a belief about them still has a gradient, zero at gain 1.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()}, gradients, buffers


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random numbers of PyTorch, NumPy and Python, and restore their states at the end."""
    with left_alone():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        yield


def _seeded_outputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Call with copies of the inputs, because a network may change them in place."""
    args, named = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)
    with seeded(0):
        output = model(*args, **named)
    return {str(place): x for place, x in enumerate(tensors_in(output)) if x.is_floating_point()}


def _difference(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest value; infinite if one is not finite."""
    expected = {name: tensor for name, tensor in expected.items() if tensor.numel()}
    scales = {name: float(torch.where(x.isfinite(), x, 0).abs().max()) for name, x in expected.items()}
    least = NEGLIGIBLE * max(scales.values(), default=0.0) or 1.0
    largest = 0.0
    for name, x in expected.items():
        if name not in given or given[name].shape != x.shape:
            return math.inf
        # Equal infinities, as in a mask, are no difference.
        difference = float(torch.where(x == given[name], 0, (x - given[name]).abs()).max()) / max(scales[name], least)
        if not math.isfinite(difference):
            return math.inf
        largest = max(largest, difference)
    return largest
