"""Chooses tile sizes and launches the Triton kernels of one norm layer."""

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bkn_zoo.kernels import norm_jit as jit
from bkn_zoo.kernels.conditions import CHANNELS_LAST, LIMIT, channels_last, dense
from bkn_zoo.kernels.launch import Kernel, Launches

# Tiles of the matrix products and sums that run with the passes. They are small, to leave registers to the passes.
GROUPS, CHANNELS = 32, 32  # of a product with beliefs or their gradients; fewer groups if there are fewer
DEPTH = 64  # summed over at a time
SPLIT = 256  # inputs that one program of `predict` sums over in total
ROWS, COLUMNS = 256, 16  # of the sums over images and groups
FLAGS = 1024  # checked together

PROGRAMS = 4  # per multiprocessor, enough to keep it busy
SMALLEST_PIECE = 64  # positions
MOST_PIECES = 64  # of an image; a divisor of ROWS
PLANS = 4096  # cached per direction; a network with images of many sizes has many

FORWARD = (
    "x", "y", "residual", "weight", "bias", "beliefs", "prior_mean", "prior_var", "transition", "raw_noise", "raw_gain",
    "running_mean", "running_var", "image_mean", "image_var", "image_spread", "steps", "skipped",
)  # fmt: skip
BACKWARD = (
    "dy", "x", "y", "weight", "bias", "beliefs", "upper_dmean", "upper_dvar",
    "prior_mean", "prior_var", "transition", "raw_noise", "raw_gain",
    "dx", "dresidual", "dpriors", "dparameters",
)  # fmt: skip


# Triton's own versions of these two are for kernels, and slow on the host.
def tiles(size: int, tile: int) -> int:
    """The number of tiles that cover `size`."""
    return -(-size // tile)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`, which is positive."""
    return 1 << (size - 1).bit_length()


class Tiling(NamedTuple):
    """How a pass divides the features of an image.

    Attributes:
        pieces: equal parts, each with its own programs.
        block_p, block_c: positions and channels per tile.
        warps: per program.
        busy: whether there are enough programs in a pass to hide the latency of each.
        merged: whether the last program of the first pass runs the small step between the passes. In a busy pass this
            would cost registers in all programs.
    """

    pieces: int
    block_p: int
    block_c: int
    warps: int
    busy: bool
    merged: bool = False


def choose_tiling(
    images: int, channels: int, positions: int, channels_last: bool, backward: bool, processors: int
) -> Tiling:
    """The tile sizes that were fastest on an H200, in bfloat16, over the shapes of ResNet101.

    There are few of them, because each has to be compiled.
    """
    wanted = PROGRAMS * processors
    if not channels_last:
        block_p = min(1024, max(16, power_of_2(positions)))
        block_c = min(4096 // block_p, power_of_2(channels))
        return Tiling(1, block_p, block_c, 4, images * tiles(channels, block_c) >= wanted)
    if channels <= 64 and positions >= 3136:  # few channels, large maps: the first layers of a network
        block_p, block_c, warps = (128, 32, 4) if backward else (128, 64, 8)
    else:
        block_c = next((size for size in (128, 64, 32) if channels % size == 0), 64)
        block_p, warps = 4096 // block_c, 4
    if images >= processors or images * tiles(channels, block_c) >= wanted:
        return Tiling(1, block_p, block_c, warps, True)
    block_c, pieces = 32, 1
    programs = images * tiles(channels, block_c)
    while (
        programs * pieces < wanted
        and positions % (2 * pieces) == 0
        and positions // (2 * pieces) >= SMALLEST_PIECE
        and pieces < MOST_PIECES
    ):
        pieces *= 2
    return Tiling(pieces, 128 if positions // pieces > 64 else 64, block_c, 4, False, merged=block_c == CHANNELS)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def like(x: Tensor, other: Tensor) -> Tensor:
    """`other` in the dtype and memory layout of `x`; itself if it already has them."""
    if other.dtype == x.dtype and other.stride() == x.stride():
        return other
    layout = CHANNELS_LAST[x.ndim] if channels_last(x) else torch.contiguous_format
    return other.to(x.dtype).contiguous(memory_format=layout)


def slice_like(x: Tensor, dy: Tensor) -> Tensor:
    """`dy` in a layout that the backward kernels support: that of `x`, or a slice of channels of such a tensor.

    A slice is used only if its offsets fit. Volumes are treated as maps, with all their planes below each other.
    """
    if x.ndim == 5:
        x, dy = x.flatten(2, 3), dy.flatten(2, 3)
    if x.ndim != 4 or dy.dtype != x.dtype or dy.stride() == x.stride():
        return like(x, dy)
    height, width = x.shape[2:]
    step = position_stride(dy) if channels_last(x) else 1
    inner = (1, width * step, step) if channels_last(x) else (height * width, width, 1)
    image = height * width * step
    return dy if dy.stride()[1:] == inner and image <= dy.stride(0) and image < LIMIT else like(x, dy)


def position_stride(x: Tensor) -> int:
    """The distance between positions of a channels_last tensor, or of a slice of its channels."""
    return x.stride(3 if x.shape[3] > 1 else 2)


def groups_per_tile(groups: int) -> int:
    return min(GROUPS, max(16, power_of_2(groups)))  # a tensor core needs at least 16


class Shape(NamedTuple):
    """Everything that the launches of a layer depend on, except the addresses and dtypes of tensors.

    Attributes:
        has_prior: whether the layer has a prior.
        inputs: channels of the layer below, if the kernels predict from its belief; otherwise 0.
        noise_stride: 1 if every channel has its own R, 0 if there is one for all.
        residual: whether a residual is added (forward), or the output is kept for its gradient (backward).
    """

    images: int
    channels: int
    positions: int
    group: int
    channels_last: bool
    has_prior: bool
    inputs: int
    noise_stride: int
    residual: bool
    relu: bool
    eps: float
    precision: str
    processors: int

    def tiling(self, backward: bool) -> Tiling:
        return choose_tiling(self.images, self.channels, self.positions, self.channels_last, backward, self.processors)

    def values(self, tiling: Tiling) -> dict[str, Any]:
        """The arguments of the kernels of both directions."""
        group = self.group * tiling.pieces
        groups = self.images // self.group
        positions = self.positions // tiling.pieces
        return {
            "channels": self.channels, "positions": positions,
            "stride_c": 1 if self.channels_last else self.positions,
            "stride_p": self.channels if self.channels_last else 1,
            "pieces": self.images * tiling.pieces, "groups": groups, "group": group, "inputs": self.inputs,
            "noise_stride": self.noise_stride, "eps": self.eps, "floor": 0.0 if self.relu else -math.inf,
            "HAS_PRIOR": self.has_prior, "PREDICTS": self.inputs > 0, "HAS_RESIDUAL": self.residual,
            "PIECES": tiling.pieces, "MERGED": tiling.merged,
            "BLOCK_P": tiling.block_p, "BLOCK_C": tiling.block_c, "BLOCK_R": min(32, power_of_2(group)),
            "BLOCK_G": groups_per_tile(groups), "BLOCK_O": CHANNELS, "BLOCK_I": DEPTH, "PRECISION": self.precision,
            "ROWS": ROWS, "COLUMNS": COLUMNS,
        }  # fmt: skip


@lru_cache(PLANS)
def plan_forward(shape: Shape, remembers: bool, momentum: float, own: float | None) -> Launches:
    tiling = shape.tiling(backward=False)
    groups, pieces = shape.images // shape.group, shape.images * tiling.pieces
    blocks = tiles(shape.channels, tiling.block_c)
    stretches = tiles(shape.inputs, SPLIT)
    predict_tiles = stretches * tiles(groups, groups_per_tile(groups)) * tiles(shape.channels, CHANNELS)
    remember_blocks = tiles(shape.channels, COLUMNS) if remembers else 0
    values = shape.values(tiling) | {
        "stretches": stretches, "predict_tiles": predict_tiles, "remember_blocks": remember_blocks,
        "bessel": 1 / max(shape.group * shape.positions - 1, 1), "momentum": momentum,
        "own": 0.0 if own is None else own, "EXPECT": own is not None, "REMEMBER": remembers,
        "SPLIT": SPLIT, "BLOCK_F": FLAGS,
    }  # fmt: skip
    stages = 1 if tiling.busy else 3  # prefetching needs shared memory, which a busy pass needs itself
    kernels = [
        Kernel(jit.moments, predict_tiles + blocks * pieces, tiling.warps, stages),
        Kernel(jit.believe, blocks * groups),
        Kernel(jit.normalize_pieces, remember_blocks + blocks * pieces, tiling.warps),
    ]
    counters = 0
    if tiling.merged:
        kernels = [kernel for kernel in kernels if kernel.function is not jit.believe]
        counters = blocks * (groups + tiles(groups, groups_per_tile(groups)))
    work = 2 * (pieces + stretches * groups) * shape.channels + groups * blocks
    return Launches(kernels, FORWARD, values, work, counters)


@lru_cache(PLANS)
def plan_backward(shape: Shape, dy_size: int, dy_stride_p: int, has_upper: bool) -> Launches:
    tiling = shape.tiling(backward=True)
    groups, pieces = shape.images // shape.group, shape.images * tiling.pieces
    blocks = tiles(shape.channels, tiling.block_c)
    prior_tiles = tiles(groups, groups_per_tile(groups)) * tiles(shape.inputs, CHANNELS)
    transition_tiles = tiles(shape.channels, CHANNELS) * tiles(shape.inputs, CHANNELS)
    finish_tiles = prior_tiles + transition_tiles + tiles(shape.channels, COLUMNS)
    values = shape.values(tiling) | {
        "dy_size": dy_size, "dy_stride_p": dy_stride_p, "HAS_UPPER": has_upper,
        "prior_tiles": prior_tiles, "transition_tiles": transition_tiles, "finish_tiles": finish_tiles,
        "BLOCK_H": tiling.block_p // 2,  # two sums per value need registers, so use half a tile
    }  # fmt: skip
    stages = 1 if tiling.busy else 3
    kernels = [
        Kernel(jit.sums, blocks * pieces, tiling.warps),
        Kernel(jit.disbelieve, blocks * groups),
        Kernel(jit.gradient, finish_tiles + blocks * pieces, tiling.warps, stages),
    ]
    if tiling.merged:
        kernels = [kernel for kernel in kernels if kernel.function is not jit.disbelieve]
    work = (2 * pieces + 6 * groups) * shape.channels + 2 * groups * blocks
    return Launches(kernels, BACKWARD, values, work, blocks * groups if tiling.merged else 0)


def describe(
    x: Tensor, transition: Tensor | None, raw_process_noise: Tensor | None, raw_gain: Tensor | None, group: int,
    residual: bool, relu: bool, eps: float,
) -> Shape:  # fmt: skip
    inputs = 0 if transition is None else transition.shape[1]
    noises = 0 if raw_process_noise is None else raw_process_noise.numel()
    return _describe(
        x.shape, channels_last(x), x.dtype, processors(x.device), raw_gain is not None, inputs, noises, group,
        residual, relu, eps,
    )  # fmt: skip


@lru_cache(PLANS)
def _describe(
    size: torch.Size, channels_last: bool, dtype: torch.dtype, processors: int, has_prior: bool, inputs: int,
    noises: int, group: int, residual: bool, relu: bool, eps: float,
) -> Shape:  # fmt: skip
    images, channels, *positions = size
    # The precision of products with beliefs: float32, or tf32 for features in half precision, which have no more bits.
    precision = "tf32x3" if dtype == torch.float32 else "tf32"
    return Shape(
        images, channels, math.prod(positions), group, channels_last, has_prior, inputs, int(noises > 1), residual,
        relu, eps, precision, processors,
    )  # fmt: skip


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
    partners: list[Tensor],
    own: float,
    *,
    alone: bool = True,
) -> tuple[Tensor, Tensor]:
    """Normalized features; and mean and variance of the belief and of the observation, (4, groups, channels).

    `running` contains the five running averages and the two step counters, which are updated; empty to update none.
    With `partners`, as in `RunningNorm.expect`, the observation is the expected one for an image with the share `own`.
    `alone` is as in `Launches`.
    """
    x, residual = dense(x), residual if residual is None else like(x, residual)
    shape = describe(x, transition, raw_process_noise, raw_gain, group, residual is not None, relu, eps)
    launches = plan_forward(shape, bool(running), momentum, own if partners else None)
    y = torch.empty_like(x)
    beliefs = x.new_empty(4, shape.images // group, shape.channels, dtype=torch.float32)
    unused = beliefs  # placeholder for arguments that the compiled kernels do not read
    below = (unused,) * 5
    if transition is not None:
        below = prior_mean, prior_var, transition, raw_process_noise, raw_gain  # type: ignore[assignment]
    elif raw_gain is not None:
        below = prior_mean, prior_var, unused, unused, raw_gain  # type: ignore[assignment]
    if not running:
        running = [unused, unused, *(partners or [unused] * 3), unused, unused]
    launches(x, y, x if residual is None else residual, weight, bias, beliefs, *below, *running, alone=alone)
    return y, beliefs


def backward(
    dy: Tensor,
    dbelief_mean: Tensor | None,
    dbelief_var: Tensor | None,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    beliefs: Tensor,
    prior_mean: Tensor | None,
    prior_var: Tensor | None,
    transition: Tensor | None,
    raw_process_noise: Tensor | None,
    raw_gain: Tensor | None,
    group: int,
    eps: float,
    relu: bool,
    *,
    alone: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of x, residual and both priors, and of the parameters, one after another as in `parameter_sizes`.

    The gradient of the residual is None without `y`, and those of the priors without a gain q. There are few
    allocations, because each takes as long as a launch from Python.
    """
    x = dense(x)
    dy, y = slice_like(x, dy), y if y is None else like(x, y)
    shape = describe(x, transition, raw_process_noise, raw_gain, group, y is not None, relu, eps)
    step = position_stride(dy) if shape.channels_last else 1
    launches = plan_backward(shape, dy.stride(0), step, dbelief_mean is not None)
    dx = torch.empty_like(x)
    dparameters = beliefs.new_empty(sum(parameter_sizes(weight, transition, raw_process_noise, raw_gain)))
    dresidual = None if y is None else torch.empty_like(x)
    below, dpriors = (beliefs,) * 5, None  # placeholders for arguments that the compiled kernels do not use
    if transition is not None:
        below = prior_mean, prior_var, transition, raw_process_noise, raw_gain  # type: ignore[assignment]
        dpriors = beliefs.new_empty(2, beliefs.shape[1], shape.inputs)
    elif raw_gain is not None:
        below, dpriors = (*below[:4], raw_gain), beliefs.new_empty(2, *beliefs.shape[1:])
    upper = (beliefs, beliefs) if dbelief_mean is None or dbelief_var is None else (dbelief_mean, dbelief_var)
    launches(
        dy, x, x if y is None else y, weight, bias, beliefs, *upper, *below, dx, x if dresidual is None else dresidual,
        beliefs if dpriors is None else dpriors, dparameters, alone=alone,
    )  # fmt: skip
    return dx, dresidual, dpriors, dparameters


def parameter_sizes(
    weight: Tensor, transition: Tensor | None, raw_process_noise: Tensor | None, raw_gain: Tensor | None
) -> list[int]:
    """Sizes of A, weight, bias, raw R and raw q, whose gradients are in one tensor; 0 if there is none.

    A comes first, because its gradient is large, and faster to read at the beginning of an allocation.
    """
    noises = 0 if raw_process_noise is None else raw_process_noise.numel()
    inner = 0 if transition is None else transition.numel()
    return [inner, weight.numel(), weight.numel(), noises, 0 if raw_gain is None else 1]
