"""That a converted network is what it should be, shown on inputs of the caller's."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bkn_zoo.conversion.converted import Converted
from bkn_zoo.errors import ConversionError
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d

NEGLIGIBLE = 1e-4
"""Of the largest gradient: what is smaller (a bias before a norm, say) is compared with this and not with itself."""


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


def prove(original: nn.Module, converted: nn.Module, *inputs: Any, tolerance: float = 1e-9, seed: int = 0) -> Proof:
    """Check that `converted` computes what `original` does; neither is changed.

    Args:
        original: the network that was converted.
        converted: what `convert` made of it, before it was trained.
        inputs: a batch, as both take it; large enough to train the original on.
        tolerance: of relative differences. Raise it for networks that amplify rounding errors.
        seed: for dropout and the like, so that both draw the same numbers.
    """
    bn, bkn = (copy.deepcopy(model).double() for model in (original, converted))
    inputs = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)
    with torch.no_grad():
        output = _difference(_tensors(bn.eval()(*inputs)), _tensors(bkn.eval()(*inputs)))
    for module in bkn.modules():
        if isinstance(module, Converted):
            module.statistics_batch_size = None
        if isinstance(module, BatchKalmanNorm2d) and module.prior_features is not None:
            module.set_gain(1.0)
    losses = [_step(model.train(), inputs, seed) for model in (bn, bkn)]
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (bn, bkn)]
    proof = Proof(
        output,
        _difference({"loss": losses[0]}, {"loss": losses[1]}),
        _difference(gradients[0], gradients[1]),
        _difference(dict(bn.named_buffers()), dict(bkn.named_buffers())),
    )
    if not max(proof) <= tolerance:
        shown = ", ".join(f"{name} {value:.1e}" for name, value in zip(proof._fields, proof, strict=True))
        raise ConversionError(f"the converted network differs from the original by more than {tolerance:.0e}: {shown}.")
    return proof


def _step(model: nn.Module, inputs: Any, seed: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = _tensors(model(*inputs)).values()
        torch.manual_seed(seed)  # random weights, since a mean of squares after a norm would have no gradient
        loss = torch.stack([(x * torch.randn_like(x)).mean() for x in outputs]).sum()
    loss.backward()
    return loss.detach()


def _tensors(output: Any) -> dict[str, Tensor]:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return {str(number): leaf for number, leaf in enumerate(leaves)}


def _difference(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its own largest value."""
    scales = {name: tensor.abs().max() for name, tensor in expected.items() if tensor.numel()}
    least = NEGLIGIBLE * max(map(float, scales.values()), default=0.0) or 1.0
    differences = [
        float((tensor - given[name]).abs().max()) / max(float(scales[name]), least) if name in given else float("inf")
        for name, tensor in expected.items()
        if name in scales
    ]
    return max(differences, default=0.0)
