"""Max and average pooling with Triton kernels, for channels_last tensors on a GPU.

PyTorch's backward pass of channels_last max pooling takes several times longer than its memory traffic needs. These
kernels store one byte per output for it. PyTorch stores eight, and the input.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bkn_zoo import kernels
from bkn_zoo.kernels.conditions import LIMIT, observed_by_pytorch

if kernels.HAS_TRITON:  # otherwise `kernels.chosen` is false
    from bkn_zoo.kernels import pool_jit as jit
    from bkn_zoo.kernels.launch import Kernel, Launches
    from bkn_zoo.kernels.norm_launch import position_stride

LARGEST_WINDOW = 8  # positions are stored in a byte, and the loops over a window are unrolled
PLANS = 1024  # cached launches per direction
MOST_IMAGES = 2**16 - 1  # in a CUDA grid


def max_pool(x: Tensor, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False) -> Tensor:
    """Like `F.max_pool2d`, in value and gradient."""
    if not fused(x, kernel, stride, padding):
        return F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    if learning(x):
        return Pooling.apply(x, kernel, stride, padding, ceil_mode, True)
    return torch.ops.bkn_zoo.pool(x, kernel, stride, padding, ceil_mode, True, False)[0]


def average_pool(x: Tensor, kernel: int, stride: int, padding: int = 0) -> Tensor:
    """Like `F.avg_pool2d`, which counts the padding, in value and gradient."""
    if not fused(x, kernel, stride, padding):
        if 0 < 2 * padding <= kernel and x.is_cuda and not torch.compiler.is_compiling():
            # Gradients of PyTorch's padding are wrong here up to version 2.12:
            # github.com/pytorch/pytorch/issues/188344.
            x, padding = F.pad(x, [padding] * 4), 0
        return F.avg_pool2d(x, kernel, stride, padding)
    return Pooling.apply(x, kernel, stride, padding, False, False)


def fused(x: Tensor, kernel: int, stride: int, padding: int) -> bool:
    """Whether the kernels pool `x`. Otherwise PyTorch does, and reports invalid inputs.

    A compiler gets PyTorch's own operator, which it fuses with its neighbours, unless there is a gradient: some
    versions (such as 2.11) would then keep the input only to know its size.
    """
    if (
        not kernels.chosen(x)
        or (torch.compiler.is_compiling() and not learning(x))
        or x.ndim != 4
        or not x.is_contiguous(memory_format=torch.channels_last)
    ):
        return False
    images, channels, height, width = x.shape
    return (
        stride in (1, 2)
        and 0 <= 2 * padding <= kernel <= min(LARGEST_WINDOW, height + 2 * padding, width + 2 * padding)
        and images <= MOST_IMAGES
        and x.numel() > 0
        and reach(height, width, channels) < LIMIT
    )


def reach(height: int, width: int, step: int) -> int:
    """Upper bound of offsets in an image whose positions are `step` apart. Windows may reach over its edges."""
    return (height + LARGEST_WINDOW) * (width + LARGEST_WINDOW) * step


def learning(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class Tile(NamedTuple):
    """The tile of a program: positions (outputs forward, cells of stride x stride inputs backward) by channels."""

    height: int
    width: int
    channels: int


@lru_cache
def choose_tile(rows: int, columns: int, channels: int) -> Tile:
    """Eight values per thread for four warps, which are 16 bytes of bfloat16.

    With more, Triton would use different layouts for values and winners, and exchange them through shared memory. There
    are few tiles, because each has to be compiled.
    """
    block_c = 64 if channels > 32 else 32  # 64 channels of 16 bits are one cache line
    positions = 1024 // block_c
    shapes = [(positions // width, width) for width in (4, 8, positions)]

    def computed(shape: tuple[int, int]) -> int:
        height, width = shape
        return -(-rows // height) * -(-columns // width)

    return Tile(*min(shapes, key=computed), block_c)


def plan(
    function: Any, tensors: tuple[str, ...], images: int, rows: int, columns: int, window: tuple[int, ...],
    values: dict[str, Any],
) -> "Launches":  # fmt: skip
    """The launch of `function` for rows and columns of positions in each image."""
    tile = choose_tile(rows, columns, values["channels"])
    tiles = -(-rows // tile.height) * -(-columns // tile.width)
    values |= dict(zip("KSP", window, strict=True))
    values |= {"BLOCK_H": tile.height, "BLOCK_W": tile.width, "BLOCK_C": tile.channels}
    across = -(-values["channels"] // tile.channels), images
    return Launches([Kernel(function, tiles, across=across)], tensors, values, 0)


@lru_cache(PLANS)
def plan_forward(
    shape: tuple[int, ...], out: tuple[int, int], maximum: bool, indexed: bool, window: tuple[int, ...]
) -> "Launches":
    images, channels, height, width = shape
    values = {
        "height": height, "width": width, "out_height": out[0], "out_width": out[1], "channels": channels,
        "MAX": maximum, "INDEXED": indexed,
    }  # fmt: skip
    return plan(jit.pool_windows, ("x", "y", "index"), images, *out, window, values)


@lru_cache(PLANS)
def plan_backward(
    shape: tuple[int, ...], size: tuple[int, int], dy_size: int, dy_stride: int, maximum: bool, window: tuple[int, ...]
) -> "Launches":
    images, channels, out_height, out_width = shape
    _, stride, padding = window
    rows, columns = ((each - 1 + padding) // stride - padding // stride + 1 for each in size)
    values = {
        "height": size[0], "width": size[1], "out_height": out_height, "out_width": out_width, "channels": channels,
        "dy_size": dy_size, "dy_stride": dy_stride, "MAX": maximum,
    }  # fmt: skip
    return plan(jit.pool_backward, ("dy", "index", "dx"), images, rows, columns, window, values)


def out_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    room = size + 2 * padding - kernel
    if not ceil_mode:
        return room // stride + 1
    # The last window may reach over the end, but must begin before it.
    return min(-(-room // stride), (size + padding - 1) // stride) + 1


def empty_channels_last(x: Tensor, height: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty channels_last tensor with the images and channels of `x`."""
    shape = *x.shape[:2], height, width
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=torch.channels_last)


def pooled_like(
    x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool, maximum: bool, indexed: bool
) -> tuple[Tensor, Tensor]:
    """Empty tensors for the output and the winners."""
    height, width = (out_size(size, kernel, stride, padding, ceil_mode) for size in x.shape[2:])
    index = empty_channels_last(x, height, width, torch.uint8) if indexed else x.new_empty(0, dtype=torch.uint8)
    return empty_channels_last(x, height, width), index


def forward(
    x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool, maximum: bool, indexed: bool
) -> tuple[Tensor, Tensor]:
    y, index = pooled_like(x, kernel, stride, padding, ceil_mode, maximum, indexed)
    launches = plan_forward(tuple(x.shape), tuple(y.shape[2:]), maximum, indexed, (kernel, stride, padding))
    launches(x, y, index, alone=True)
    return y, index


def backward(dy: Tensor, index: Tensor, height: int, width: int, maximum: bool, *window: int) -> Tensor:
    dy = channel_slice(dy)
    dx = empty_channels_last(dy, height, width)
    launches = plan_backward(tuple(dy.shape), (height, width), dy.stride(0), position_stride(dy), maximum, window)
    launches(dy, index, dx, alone=True)
    return dx


def channel_slice(dy: Tensor) -> Tensor:
    """`dy` itself if it is channels_last or a slice of channels of such a tensor (after a concatenation), or a copy.

    A slice is also copied if offsets in the whole tensor would be too large.
    """
    step = position_stride(dy)
    height, width = dy.shape[2:]
    taken = dy.stride()[1:3] == (1, step * width) and reach(height, width, step) < LIMIT
    return dy if taken else dy.contiguous(memory_format=torch.channels_last)


_library = torch.library.Library("bkn_zoo", "FRAGMENT")
_library.define(
    "pool(Tensor x, int kernel, int stride, int padding, bool ceil_mode, bool maximum, bool indexed) "
    "-> (Tensor y, Tensor index)"
)
_library.define(
    "pool_backward(Tensor dy, Tensor index, SymInt height, SymInt width, bool maximum, int kernel, int stride, "
    "int padding) -> Tensor"
)
torch.library.impl(_library, "pool", "CompositeExplicitAutograd")(forward)
torch.library.impl(_library, "pool_backward", "CompositeExplicitAutograd")(backward)
torch.library.register_fake("bkn_zoo::pool", pooled_like, lib=_library)


@torch.library.register_fake("bkn_zoo::pool_backward", lib=_library)
def _pool_backward_fake(dy: Tensor, index: Tensor, height: int, width: int, *_: Any) -> Tensor:
    return empty_channels_last(dy, height, width)


class Pooling(torch.autograd.Function):
    """Autograd for `bkn_zoo::pool`. A maximum needs its winners for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int, ceil_mode: bool, maximum: bool) -> Tensor:
        launch = torch.ops.bkn_zoo.pool if observed_by_pytorch(x) else forward
        y, index = launch(x, kernel, stride, padding, ceil_mode, maximum, maximum)
        ctx.save_for_backward(index)
        ctx.arguments = *x.shape[2:], maximum, kernel, stride, padding
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        launch = torch.ops.bkn_zoo.pool_backward if observed_by_pytorch(dy) else backward
        return launch(dy, *ctx.saved_tensors, *ctx.arguments), None, None, None, None, None
