"""Chooses tile sizes and launches the Triton kernels of one norm layer."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bkn_zoo.kernels import norm_jit as jit

# Tiles of the matrix products and sums that ride along with the passes: small, to leave the passes their registers.
GROUPS, CHANNELS = 32, 32  # of a product with beliefs or their gradients; fewer groups where there are fewer
DEPTH = 64  # summed over at a time
SPLIT = 256  # inputs that one program of `predict` sums over in all
STAGES = 1  # of a product's loop: it does not load ahead, which would take shared memory
ROWS, COLUMNS = 256, 16  # of the sums over images and groups


# Triton's own versions of these two, made for kernels, took a seventh of Python's time per layer.
def tiles(size: int, tile: int) -> int:
    """How many of `tile` cover `size`."""
    return -(-size // tile)


def power_of_2(size: int) -> int:
    """The smallest one that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()


class Tiling(NamedTuple):
    """How a pass cuts an image's features: positions and channels per tile, warps per program."""

    block_p: int
    block_c: int
    warps: int


@lru_cache
def choose_tiling(positions: int, channels: int, channels_last: bool, backward: bool) -> Tiling:
    """The tile sizes that were fastest on an H200, in bfloat16, over the shapes of ResNet101.

    They are few, since every one of them has to be compiled.
    """
    if not channels_last:
        block_p = min(1024, max(16, power_of_2(positions)))
        return Tiling(block_p, min(4096 // block_p, power_of_2(channels)), 4)
    if channels <= 64 and positions >= 3136:  # few channels, large maps: the first layers of a network
        return Tiling(128, 32, 4) if backward else Tiling(128, 64, 8)
    block_c = next((size for size in (128, 64, 32) if channels % size == 0), 64)
    return Tiling(4096 // block_c, block_c, 4)


def channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)


def dense(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous in one of the two layouts, else a contiguous copy."""
    return x if channels_last(x) else x.contiguous()


def like(x: Tensor, other: Tensor) -> Tensor:
    """`other` in the dtype and memory layout of `x`; itself where it has them."""
    layout = torch.channels_last if channels_last(x) else torch.contiguous_format
    return other.to(x.dtype).contiguous(memory_format=layout)


def slice_like(x: Tensor, dy: Tensor) -> Tensor:
    """`dy` as the backward kernels take it: laid out as `x`, or as a slice of the channels of such a tensor."""
    if x.ndim != 4 or dy.dtype != x.dtype:
        return like(x, dy)
    height, width = x.shape[2:]
    step = position_stride(dy) if channels_last(x) else 1
    inner = (1, width * step, step) if channels_last(x) else (height * width, width, 1)
    return dy if dy.stride()[1:] == inner and dy.stride(0) >= height * width * step else like(x, dy)


def position_stride(x: Tensor) -> int:
    """From position to position of a channels_last tensor, or of a slice of its channels."""
    return x.stride(3 if x.shape[3] > 1 else 2)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Positions per image, and the steps from channel to channel and from position to position."""
    positions = x.numel() // (x.shape[0] * x.shape[1])
    return (positions, 1, x.shape[1]) if channels_last(x) else (positions, positions, 1)


def floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def precision(x: Tensor) -> str:
    """Of the products with beliefs: float32's, or tf32's for features in half precision, which have no more bits."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def groups_per_tile(groups: int) -> int:
    return min(GROUPS, max(16, power_of_2(groups)))  # a tensor core takes no fewer than 16


def rows_per_tile(group: int) -> int:
    return min(32, power_of_2(group))


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    transition: Tensor | None,
    raw_process_noise: Tensor | None,
    raw_gain: Tensor | None,
    residual: Tensor | None,
    running: list[Tensor],
    group: int,
    eps: float,
    momentum: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalized features, belief mean, belief var, and what was observed: (mean, var) of the groups.

    `running` holds the five running averages and the two step counters, all of which move; empty, none does.
    """
    images, channels = x.shape[:2]
    groups = images // group
    positions, stride_c, stride_p = strides(x)
    tiling = choose_tiling(positions, channels, stride_c == 1, backward=False)
    floor = 0.0 if relu else -math.inf
    blocks = tiles(channels, tiling.block_c)
    has_prior = transition is not None
    y = torch.empty_like(x)
    belief_mean = floats(x, groups, channels)
    belief_var = floats(x, groups, channels)
    observed = floats(x, 2, groups, channels)
    observed_mean, observed_var = observed.unbind(0)
    image_mean, image_var = floats(x, 2, images, channels).unbind(0)
    finite = torch.empty((groups, blocks), dtype=torch.int32, device=x.device)

    unused = belief_mean  # stands for pointers that the kernel, compiled without a prior, does not read
    inputs = stretches = predict_tiles = 0
    tile_groups = groups_per_tile(groups)
    partial = prior = [unused, unused]
    if transition is not None:
        inputs = transition.shape[1]
        stretches = tiles(inputs, SPLIT)
        predict_tiles = stretches * tiles(groups, tile_groups) * tiles(channels, CHANNELS)
        partial = list(floats(x, 2, stretches, groups, channels).unbind(0))
        prior = [present(prior_mean), present(prior_var)]
    noise, gain = raw_process_noise if has_prior else weight, raw_gain if has_prior else weight
    jit.moments[(predict_tiles + blocks * images,)](
        x, image_mean, image_var, *prior, transition if has_prior else unused, *partial,
        channels, positions, stride_c, stride_p, groups, inputs, images, predict_tiles,
        has_prior, tiling.block_p, tiling.block_c, tile_groups, CHANNELS, DEPTH, SPLIT, precision(x),
        num_warps=tiling.warps, num_stages=STAGES,
    )  # fmt: skip
    jit.believe[(blocks, groups)](
        image_mean, image_var, *partial, noise, gain, belief_mean, belief_var, observed_mean, observed_var, finite,
        channels, groups, group, stretches, int(present(noise).numel() > 1),
        has_prior, rows_per_tile(group), tiling.block_c,
    )  # fmt: skip
    remember_blocks = tiles(channels, COLUMNS) if running else 0
    bessel = 1 / max(group * positions - 1, 1)
    jit.normalize[(remember_blocks + blocks * images,)](
        x, y, x if residual is None else residual, weight, bias, belief_mean, belief_var,
        observed_var, gain, image_mean, image_var, finite, *(running or [unused] * 7),
        channels, positions, group, stride_c, stride_p, eps, floor,
        images, groups, finite.numel(), bessel, momentum, remember_blocks,
        has_prior, residual is not None, bool(running), tiling.block_p, tiling.block_c, 1024, ROWS, COLUMNS,
        num_warps=tiling.warps,
    )  # fmt: skip
    return y, belief_mean, belief_var, observed


def backward(
    dy: Tensor,
    dbelief_mean: Tensor | None,
    dbelief_var: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    belief_mean: Tensor,
    belief_var: Tensor,
    observed: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    transition: Tensor | None,
    raw_process_noise: Tensor | None,
    raw_gain: Tensor | None,
    group: int,
    eps: float,
    relu: bool,
) -> tuple[Tensor, ...]:
    """Gradients of x, residual, weight, bias, prior mean, prior var, A, raw R and raw q; absent ones are empty."""
    images, channels = x.shape[:2]
    groups = images // group
    positions, stride_c, stride_p = strides(x)
    dy_size, dy_stride_p = dy.stride(0), position_stride(dy) if channels_last(x) else 1
    tiling = choose_tiling(positions, channels, stride_c == 1, backward=True)
    floor = 0.0 if relu else -math.inf
    blocks = tiles(channels, tiling.block_c)
    has_prior, has_upper, has_residual = transition is not None, dbelief_mean is not None, y is not None
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if has_residual else x.new_empty(0)
    observed_mean, observed_var = observed.unbind(0)
    image_s0, image_s1 = floats(x, 2, images, channels).unbind(0)
    # Rows per group: d predicted mean, d predicted var, d weight, d bias, and the factors b and k of dx.
    rows = floats(x, 6, groups, channels)
    dpredicted_mean, dpredicted_var, dweight_rows, dbias_rows, factor_b, factor_k = rows.unbind(0)
    parts = floats(x, 2, groups, blocks)  # of the sums for q and, where all layers share it, R
    dnoise, dweight, dbias = floats(x, 3, channels).unbind(0)

    unused = belief_mean  # stands for pointers that the kernel, compiled without them, does not read
    gain = raw_gain if has_prior else weight
    upper = (dbelief_mean, dbelief_var) if has_upper else (unused, unused)
    # Its two sums of every value take registers: half a tile leaves room for more programs.
    jit.sums[(blocks * images,)](
        dy, x, x if y is None else y, dresidual, weight, bias, belief_mean, belief_var, image_s0, image_s1,
        channels, positions, group, dy_size, dy_stride_p, stride_c, stride_p, eps, floor,
        has_residual, tiling.block_p // 2, tiling.block_c, num_warps=tiling.warps,
    )  # fmt: skip
    jit.disbelieve[(blocks, groups)](
        image_s0, image_s1, weight, belief_mean, belief_var, observed_mean, observed_var, gain, *upper,
        dpredicted_mean, dpredicted_var, *parts.unbind(0), dweight_rows, dbias_rows, factor_b, factor_k,
        channels, positions, group, eps, has_prior, has_upper, rows_per_tile(group), tiling.block_c,
    )  # fmt: skip
    inputs = prior_tiles = transition_tiles = 0
    tile_groups = groups_per_tile(groups)
    below = [unused, unused, unused, weight]
    dbelow = [unused, unused, unused, dnoise, unused]
    if transition is not None:
        inputs = transition.shape[1]
        prior_tiles = tiles(groups, tile_groups) * tiles(inputs, CHANNELS)
        transition_tiles = tiles(channels, CHANNELS) * tiles(inputs, CHANNELS)
        below = [present(prior_mean), present(prior_var), transition, present(raw_process_noise)]
        dprior_mean, dprior_var = floats(x, groups, inputs), floats(x, groups, inputs)
        dbelow = [dprior_mean, dprior_var, torch.empty_like(transition), dnoise, floats(x)]
    finish_tiles = prior_tiles + transition_tiles + tiles(channels, COLUMNS)
    jit.gradient[(finish_tiles + blocks * images,)](
        dy, x, x if y is None else y, dresidual, dx, weight, bias, belief_mean, belief_var,
        observed_mean, factor_b, factor_k,
        dpredicted_mean, dpredicted_var, *parts.unbind(0), dweight_rows, dbias_rows, *below, *dbelow, dweight, dbias,
        channels, positions, group, dy_size, dy_stride_p, stride_c, stride_p, eps, floor,
        images, groups, inputs, int(below[3].numel() > 1), groups * blocks, prior_tiles, transition_tiles,
        finish_tiles, has_prior, has_residual, tiling.block_p, tiling.block_c,
        tile_groups, DEPTH, CHANNELS, ROWS // 4, COLUMNS, precision(x), num_warps=tiling.warps, num_stages=STAGES,
    )  # fmt: skip
    if not has_prior:
        return dx, dresidual, dweight, dbias, *(x.new_empty(0) for _ in range(5))
    dbelow[3] = dnoise[: below[3].numel()]  # one R for all, or one for every channel
    return dx, dresidual, dweight, dbias, *dbelow


def present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
