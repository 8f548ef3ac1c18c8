"""Statistics of images: observe them, pool them into groups, and normalize with a belief."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bkn_zoo.norms.kalman import Belief


def observe(x: Tensor) -> Belief:
    """Mean and variance of every image's channels over all positions, in float32 (float64 for float64)."""
    positions = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    var, mean = torch.var_mean(in_full_precision(positions), dim=2, correction=0)
    return Belief(mean, var)


def group_size(count: int, group: int | None) -> int:
    """Images per statistics group in a batch of `count`. The last group may be smaller."""
    whole = max(count, 1)  # an empty batch is zero groups of one
    return whole if group is None else min(group, whole)


def group_count(count: int, group: int | None) -> int:
    """The number of statistics groups in a batch of `count`."""
    return -(-count // group_size(count, group))


def pool(images: Belief, group: int | None) -> Belief:
    """Statistics of groups of `group` consecutive images, from the statistics of the images."""
    count = images.mean.shape[0]
    group = group_size(count, group)
    if group == 1:
        return images
    rest = count % group
    if rest:
        whole, last = (Belief(*(rows[part] for rows in images)) for part in (slice(-rest), slice(-rest, None)))
        return Belief(*map(torch.cat, zip(pool(whole, group), pool(last, rest), strict=True)))
    between, mean = torch.var_mean(_grouped(images.mean, group), dim=1, correction=0)
    return Belief(mean, _grouped(images.var, group).mean(1) + between)


def _grouped(rows: Tensor, group: int) -> Tensor:
    """(N, C) as (groups, images of a group, C)."""
    # `expand` repeats the second size. If the batch size is symbolic, torch.compile would derive n // (n // 2) instead,
    # and inductor cannot divide by that if there is one group.
    return rows.unflatten(0, (-1, group)).expand(-1, group, -1)


def normalize_groups(
    x: Tensor,
    belief: Belief,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
    group: int | None = 1,
) -> Tensor:
    """gamma (x - m) / sqrt(v + eps) + beta, each group with its own belief, then the residual sum and the ReLU."""
    scale = torch.rsqrt(belief.var + eps)
    scale = scale if weight is None else weight * scale
    shift = -belief.mean * scale if bias is None else bias - belief.mean * scale
    y = torch.addcmul(per_image(shift, x, group), in_full_precision(x), per_image(scale, x, group))
    return finish(y, residual, relu).to(x.dtype)


def finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The optional residual sum and ReLU after a normalization, in place."""
    if residual is not None:
        y = y.add_(residual)
    return y.relu_() if relu else y


def per_image(rows: Tensor, x: Tensor, group: int | None) -> Tensor:
    """Spread (groups, C) over the images of `x` so that it broadcasts against it."""
    groups, channels = rows.shape
    if groups not in (1, x.shape[0]):
        size = group_size(x.shape[0], group)
        rows = rows.unsqueeze(1).expand(groups, size, channels).reshape(groups * size, channels)[: x.shape[0]]
    return rows.reshape(rows.shape + (1,) * (x.ndim - 2))


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Turns autocast off: statistics and beliefs are always computed in float32."""
    # Entered only if it changes something: otherwise an exported graph would get a subgraph for every norm.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


HALF = (torch.bfloat16, torch.float16)


def in_full_precision(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged (and not copied) otherwise."""
    return x.float() if x.dtype in HALF else x
