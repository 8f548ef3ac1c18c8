"""The two steps of Batch Kalman Normalization, as pure functions on beliefs.

Both use only the diagonal of the covariance, because normalization needs no more. `predict_full` and `update_full` are
the paper's equations with full matrices, for tests and for measuring what the diagonal ignores.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Belief(NamedTuple):
    """Mean and variance per channel, one row per group of images: two tensors of shape (groups, channels)."""

    mean: Tensor
    var: Tensor


class Factors(NamedTuple):
    """A matrix of low rank r as a product: left, (C_out, r), times right, (r, C_in)."""

    left: Tensor
    right: Tensor


def predict(prior: Belief, transition: Tensor | Factors | Sequence[Tensor], process_noise: Tensor) -> Belief:
    """Map the belief of the layer below through x_k = A x_{k-1} + u, u ~ N(0, R).

    A is a matrix, (C_out, C_in), its factors, or its blocks as in `carry`; R is (C_out,) or one number.
    """
    if isinstance(transition, Factors):
        mean = F.linear(F.linear(prior.mean, transition.right), transition.left)
        return Belief(mean, carry_variance(prior.var, transition) + process_noise)
    blocks = [transition] if isinstance(transition, Tensor) else transition
    squares = [block.square() for block in blocks]
    return Belief(carry(prior.mean, blocks), carry(prior.var, squares) + process_noise)


def carry_variance(rows: Tensor, factors: Factors) -> Tensor:
    """Multiply rows, (groups, C_in), by A*A, the elementwise square of A = U V, without A itself.

    Output o is the quadratic form u_o' S u_o, where S = V diag(rows) V' is r x r and u_o is the row o of U.
    """
    left, right = factors
    inner = F.linear(rows.unsqueeze(1) * right, right)
    return (F.linear(inner, left) * left.T).sum(1)


def carry(rows: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Multiply rows, (groups, C_in), by the block diagonal matrix of these blocks.

    A block is a full matrix, (outputs, inputs); a stack of matrices that is block diagonal itself, (blocks, outputs,
    inputs), as for a grouped convolution; or a diagonal, (channels,), as for a depthwise convolution.
    """
    widths = [block.shape[-1] * (block.shape[0] if block.ndim == 3 else 1) for block in blocks]
    carried = []
    # Even a split into one part costs a copy in the backward pass.
    parts = rows.split(widths, dim=1) if len(blocks) > 1 else (rows,)
    for part, block in zip(parts, blocks, strict=True):
        if block.ndim == 1:
            carried.append(part * block)
        elif block.ndim == 2:
            carried.append(F.linear(part, block))
        else:
            rows_of_blocks = part.unflatten(1, (block.shape[0], -1))
            carried.append(torch.einsum("gbi,boi->gbo", rows_of_blocks, block).flatten(1))
    return carried[0] if len(carried) == 1 else torch.cat(carried, dim=1)


def update(predicted: Belief, observed: Belief, gain: Tensor) -> Belief:
    """Mix prediction and observation: gain q = 1 uses only the observation, q = 0 only the prediction.

    The last term of the variance exists because the two parts of a mixture have different means.
    """
    q, p = gain, 1 - gain
    innovation = observed.mean - predicted.mean
    return Belief(
        torch.lerp(predicted.mean, observed.mean, q),  # exact at both ends
        p * predicted.var + q * observed.var + p * q * innovation.square(),
    )


def concatenate(beliefs: Sequence[Belief | None]) -> Belief | None:
    """The belief about concatenated features, or None if the norm in use has no beliefs."""
    held = [belief for belief in beliefs if belief is not None]
    if not held:
        return None
    return Belief(torch.cat([b.mean for b in held], dim=1), torch.cat([b.var for b in held], dim=1))


def predict_full(mean: Tensor, cov: Tensor, transition: Tensor, process_noise: Tensor) -> tuple[Tensor, Tensor]:
    """`predict` with a full covariance: mean (C_in,), cov (C_in, C_in), process_noise (C_out, C_out)."""
    return transition @ mean, transition @ cov @ transition.T + process_noise


def update_full(
    predicted: tuple[Tensor, Tensor], observed: tuple[Tensor, Tensor], gain: Tensor
) -> tuple[Tensor, Tensor]:
    """`update` with full covariances: each pair is a mean (C,) and a covariance (C, C)."""
    (m, cov), (xbar, s) = predicted, observed
    q, p = gain, 1 - gain
    innovation = xbar - m
    return p * m + q * xbar, p * cov + q * s + p * q * torch.outer(innovation, innovation)
