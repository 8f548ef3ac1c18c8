"""That a converted network is what it should be, shown on inputs of the caller's."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bkn_zoo.conversion.converted import Converted
from bkn_zoo.errors import ConversionError
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm

NEGLIGIBLE = 1e-4
"""Of the largest gradient: what is smaller (a bias before a norm, say) is compared with this and not with itself."""

TOLERANCE = 1e-9
"""Of relative differences in float64, for networks that do not amplify what rounding does."""

ROUNDINGS, LARGEST_TOLERANCE = 100, 1e-5
"""Where they do: so many times what the last bit of the inputs does to the original, which stands for all the roundings
in between; but a mistake shows as far more than the largest."""


class Proof(NamedTuple):
    """The largest relative differences between a network and its conversion, in float64.

    Attributes:
        output: with `population` statistics.
        loss, gradients, averages: of a training step at gain 1, where BKN is batch normalization.
    """

    output: float
    loss: float
    gradients: float
    averages: float


def prove(
    original: nn.Module, converted: nn.Module, *inputs: Any, tolerance: float | None = None, seed: int = 0
) -> Proof:
    """Check that `converted` computes what `original` does; neither is changed.

    Args:
        original: the network that was converted.
        converted: what `convert` made of it, before it was trained.
        inputs: a batch, as both take it; large enough to train the original on.
        tolerance: of relative differences; by default 1e-9 or, for a network that amplifies rounding errors, a hundred
            times what a change of the inputs in their last bit does to the original itself.
        seed: for dropout and the like, so that both draw the same numbers.
    """
    bn, bkn = (copy.deepcopy(model).double() for model in (original, converted))
    inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    for model in (bn, bkn):
        model.eval()  # which may return nothing, if the network has a train() of its own
    with torch.no_grad():
        output = _difference(_outputs(bn, inputs), _outputs(bkn, inputs))
    for module in bkn.modules():
        if isinstance(module, Converted):
            module.statistics_batch_size = None
        if isinstance(module, BatchKalmanNorm) and module.has_prior:
            module.set_gain(1.0)
    wanted = _step(bn, inputs, seed)
    proof = Proof(output, *map(_difference, wanted, _step(bkn, inputs, seed)))
    allowed = TOLERANCE if tolerance is None else tolerance
    if tolerance is None and not max(proof) <= allowed:
        nudged = _step(copy.deepcopy(original).double(), tree_map(_nudge, inputs), seed)
        allowed = min(max(allowed, ROUNDINGS * max(map(_difference, wanted, nudged))), LARGEST_TOLERANCE)
    if not max(proof) <= allowed:
        shown = ", ".join(f"{name} {value:.1e}" for name, value in zip(proof._fields, proof, strict=True))
        raise ConversionError(f"the converted network differs from the original by more than {allowed:.0e}: {shown}.")
    return proof


def _nudge(x: Any) -> Any:
    """A tensor with the last bits of its numbers changed, not all in one direction."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    signs = 1 - 2 * (torch.arange(x.numel(), dtype=x.dtype, device=x.device) % 2)
    return x * (1 + torch.finfo(x.dtype).eps * signs.reshape(x.shape))


def _step(model: nn.Module, inputs: Any, seed: int) -> tuple[Mapping[str, Tensor], ...]:
    """Loss, gradients and buffers of a training step, the buffers as the forward pass leaves them.

    Where a checkpoint recomputes a part, batch norms of PyTorch move their averages once more in the backward pass.
    """
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = _outputs(model, inputs).values()
        torch.manual_seed(seed)  # random weights, since a mean of squares after a norm would have no gradient
        # Not `randn_like`, which goes by how a tensor lies in memory: that may differ.
        weights = [torch.randn(x.shape, dtype=x.dtype, device=x.device) for x in outputs]
        loss = torch.stack([(x * weight).mean() for x, weight in zip(outputs, weights, strict=True)]).sum()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss.backward()
    # None is a zero: where a forward detaches its features, a belief about them still has a gradient, zero at gain 1.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()}, gradients, buffers


def _outputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Of copies of the inputs, which a network may change in place."""
    output = model(*tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs))
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return {str(number): leaf for number, leaf in enumerate(leaves)}


def _difference(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its own largest value; infinite where one is not finite."""
    scales = {name: tensor.abs().max() for name, tensor in expected.items() if tensor.numel()}
    least = NEGLIGIBLE * max(map(float, scales.values()), default=0.0) or 1.0
    differences = [
        float((tensor - given[name]).abs().max()) / max(float(scales[name]), least) if name in given else float("inf")
        for name, tensor in expected.items()
        if name in scales
    ]
    # NaN is neither larger nor smaller than anything: a maximum would pass over it.
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)
