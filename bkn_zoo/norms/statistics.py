"""Whose statistics normalize an image: the modes, what is observed, how images are grouped, how a belief is applied."""

from typing import NamedTuple

import torch
from torch import Tensor

from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.norms.kalman import Belief

MODES = ("population", "sample", "expected")


class Statistics(NamedTuple):
    """What a forward pass normalizes by; made once per call by the network and handed to every layer.

    Attributes:
        mode: "batch" in training; at inference one of `MODES`.
        group: images per statistics group ("batch"), or the group size met in training ("expected"); None means the
            whole batch.
    """

    mode: str
    group: int | None = None


def choose_statistics(training: bool, mode: str | None, group: int | None, default: str = "population") -> Statistics:
    """The statistics for one call of a module in training or evaluation mode."""
    if group is not None and group < 1:
        raise InputError(f"statistics_batch_size is {group}, but a group needs at least one image (None: whole batch).")
    if training:
        if mode is not None:
            raise InputError(
                f"statistics={mode!r} chooses what normalizes at inference, but the model is in training mode: "
                "call model.eval() first."
            )
        return Statistics("batch", group)
    mode = default if mode is None else mode
    if mode not in MODES:
        raise UnknownNameError(f"unknown statistics {mode!r}: choose one of {', '.join(MODES)}.")
    if mode == "expected" and group is None:
        # One image among a whole large batch hardly moves its statistics: those it expects are the population's.
        return Statistics("population")
    return Statistics(mode, group)


def observe(x: Tensor) -> Belief:
    """Mean and variance of every image's channels over all positions, in float32 (float64 for float64)."""
    var, mean = torch.var_mean(in_full_precision(x).reshape(*x.shape[:2], -1), dim=2, correction=0)
    return Belief(mean, var)


def pool(images: Belief, group: int | None) -> Belief:
    """Statistics of groups of `group` consecutive images, from the statistics of the images."""
    count = images.mean.shape[0]
    group = count if group is None else group
    if count % group:
        raise InputError(
            f"a batch of {count} images cannot be split into statistics groups of {group}: "
            "make the batch a multiple of statistics_batch_size."
        )
    if group == 1:
        return images
    means = images.mean.unflatten(0, (-1, group))
    between, mean = torch.var_mean(means, dim=1, correction=0)
    return Belief(mean, images.var.unflatten(0, (-1, group)).mean(1) + between)


def normalize(
    x: Tensor,
    belief: Belief,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """gamma (x - m) / sqrt(v + eps) + beta, each group by its own belief; then the residual sum and the ReLU."""
    scale = weight * torch.rsqrt(belief.var + eps)
    shift = bias - belief.mean * scale
    y = torch.addcmul(per_image(shift, x), in_full_precision(x), per_image(scale, x)).to(x.dtype)
    return finish(y, residual, relu)


def finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The residual sum and the ReLU that follow a normalization, where the network asks for them."""
    if residual is not None:
        y = y + residual
    return torch.relu(y) if relu else y


def per_image(rows: Tensor, x: Tensor) -> Tensor:
    """Spread (groups, C) over the images of `x` so that it broadcasts against it."""
    groups, channels = rows.shape
    if groups not in (1, x.shape[0]):
        rows = rows.unsqueeze(1).expand(groups, x.shape[0] // groups, channels).reshape(x.shape[0], channels)
    return rows.reshape(rows.shape + (1,) * (x.ndim - 2))


def in_full_precision(x: Tensor) -> Tensor:
    """float32 for half precision, unchanged (and not copied) otherwise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
