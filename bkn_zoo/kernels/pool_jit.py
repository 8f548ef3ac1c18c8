"""The device code of the pooling, in Triton, for channels_last tensors.

A program has a tile of BLOCK_H x BLOCK_W positions of one image by BLOCK_C channels. Windows of K x K inputs, with
stride S and padding P, overlap. Shared inputs come from the cache, so memory is read once. MAX is False for averages,
which count the padding.

The winner of a window is stored as its number in the window, K * row + column. Sums have a fixed order, without
atomics, so the same input gives the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def place(columns, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr):
    """The image of this program, and the rows, columns and channels of its tile."""
    across = tl.cdiv(columns, BLOCK_W)
    p = tl.arange(0, BLOCK_H * BLOCK_W)
    row = (tl.program_id(0) // across) * BLOCK_H + p // BLOCK_W
    column = (tl.program_id(0) % across) * BLOCK_W + p % BLOCK_W
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    return tl.program_id(2).to(tl.int64), row, column, c


@triton.jit
def within(row, column, rows, columns):
    return (row >= 0) & (row < rows) & (column >= 0) & (column < columns)


@triton.jit
def widen(value):
    """Convert to float32. The compiler would undo a plain conversion and use twice the registers."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def pool_windows(
    x, y, index, height, width, out_height, out_width, channels,
    MAX: tl.constexpr, INDEXED: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of the output, channel blocks, images)."""
    image, row, column, c = place(out_width, BLOCK_H, BLOCK_W, BLOCK_C)
    c_mask = (c < channels)[None, :]
    wanted = within(row, column, out_height, out_width)
    top, left = row * S - P, column * S - P
    x += image * height * width * channels
    offsets = ((top * width + left) * channels)[:, None] + c[None, :]
    nothing: tl.constexpr = float("-inf") if MAX else 0.0
    result = tl.full((BLOCK_H * BLOCK_W, BLOCK_C), nothing, tl.float32)
    # The winner if all are -inf is the first position that is not padding.
    winner = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), tl.int32)
    winner += (tl.maximum(-top, 0) * K + tl.maximum(-left, 0))[:, None]
    for i in tl.static_range(K):
        for j in tl.static_range(K):
            inside = wanted & within(top + i, left + j, height, width)
            mask = inside[:, None] & c_mask
            value = widen(tl.load(x + (i * width + j) * channels + offsets, mask=mask, other=nothing))
            if MAX:
                wins = (value > result) | (value != value)  # the first of equal values, and the last NaN, as in PyTorch
                winner = tl.where(wins, i * K + j, winner)
                result = tl.maximum(result, value, propagate_nan=tl.PropagateNan.ALL)
            else:
                result += value
    if not MAX:
        result *= 1.0 / (K * K)
    at = ((row * out_width + column) * channels)[:, None] + c[None, :]
    mask = wanted[:, None] & c_mask
    base = image * out_height * out_width * channels
    tl.store(y + base + at, result.to(y.dtype.element_ty), mask=mask)
    if INDEXED:
        tl.store(index + base + at, winner.to(tl.uint8), mask=mask)


@triton.jit
def collect(total, gradient, winner, ROW: tl.constexpr, COLUMN: tl.constexpr, K: tl.constexpr, MAX: tl.constexpr):
    """Add the gradient of a window to that of its input in row ROW and column COLUMN, if these exist."""
    if ROW < K and COLUMN < K:
        if MAX:
            total += tl.where(winner == ROW * K + COLUMN, gradient, 0.0)
        else:
            total += gradient
    return total


@triton.jit
def write(dx, total, row, column, c, height, width, channels, K: tl.constexpr, MAX: tl.constexpr):
    if not MAX:
        total *= 1.0 / (K * K)
    at = ((row * width + column) * channels)[:, None] + c[None, :]
    mask = within(row, column, height, width)[:, None] & (c < channels)[None, :]
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def pool_backward(
    dy, index, dx, height, width, out_height, out_width, channels, dy_size, dy_stride,
    MAX: tl.constexpr, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of cells, channel blocks, images). A cell is the S x S inputs where a window begins; S is 1 or 2.

    All inputs of a cell are in the same few windows, which are read only once.
    """
    first = P // S  # the cells before contain only padding
    image, row, column, c = place((width - 1 + P) // S + 1 - first, BLOCK_H, BLOCK_W, BLOCK_C)
    c_mask = (c < channels)[None, :]
    row += first
    column += first
    dy += image * dy_size
    index += image * out_height * out_width * channels
    dx += image * height * width * channels
    position = row * out_width + column
    dy_offsets = (position * dy_stride)[:, None] + c[None, :]
    offsets = (position * channels)[:, None] + c[None, :]
    d00 = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), tl.float32)
    d01, d10, d11 = d00, d00, d00
    for i in tl.static_range(0, K, S):
        for j in tl.static_range(0, K, S):
            mask = within(row - i // S, column - j // S, out_height, out_width)[:, None] & c_mask
            back = (i // S) * out_width + j // S
            gradient = tl.load(dy - back * dy_stride + dy_offsets, mask=mask, other=0.0).to(tl.float32)
            winner = 0
            if MAX:
                winner = tl.load(index - back * channels + offsets, mask=mask, other=0)
            d00 = collect(d00, gradient, winner, i, j, K, MAX)
            if S == 2:
                d01 = collect(d01, gradient, winner, i, j + 1, K, MAX)
                d10 = collect(d10, gradient, winner, i + 1, j, K, MAX)
                d11 = collect(d11, gradient, winner, i + 1, j + 1, K, MAX)
    top, left = row * S - P, column * S - P
    write(dx, d00, top, left, c, height, width, channels, K, MAX)
    if S == 2:
        write(dx, d01, top, left + 1, c, height, width, channels, K, MAX)
        write(dx, d10, top + 1, left, c, height, width, channels, K, MAX)
        write(dx, d11, top + 1, left + 1, c, height, width, channels, K, MAX)
