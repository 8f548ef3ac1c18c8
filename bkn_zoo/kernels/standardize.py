"""Standardizes the weights of all convolutions of a network in one launch, and their gradients in another.

A row is the weight of one output channel: contiguous memory in both layouts of PyTorch. A table has the address, the
length and the place of every row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024


class Rows(NamedTuple):
    """Each row's address, its length and its offset in a tensor of all rows; and the places of the weights."""

    table: Tensor
    places: list[Any]

    def fit(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights are where the rows are."""
        return self.places == places(weights)


def places(weights: Sequence[Tensor]) -> list[Any]:
    """Address, type and shape of each weight."""
    return [(weight.data_ptr(), weight.dtype, weight.shape) for weight in weights]


def rows_of(weights: Sequence[Tensor]) -> Rows:
    """The rows of dense weights, which have one type and device."""
    sizes = torch.tensor([weight.numel() for weight in weights])
    lengths = torch.tensor([weight[0].numel() for weight in weights])
    counts = torch.tensor([len(weight) for weight in weights])
    first = torch.tensor([weight.data_ptr() for weight in weights]).repeat_interleave(counts)
    length = lengths.repeat_interleave(counts)
    place = length.cumsum(0) - length
    begin = sizes.cumsum(0) - sizes
    address = first + (place - begin.repeat_interleave(counts)) * weights[0].element_size()
    return Rows(torch.stack([address, length, place], 1).to(weights[0].device), places(weights))


@triton.jit
def standardize_row(table, kind, out, moments, eps, BLOCK: tl.constexpr):
    """One program per row: mean, then variance, then the result. `kind` has the type of the weights."""
    row = tl.program_id(0)
    source = tl.load(table + 3 * row).to(kind.dtype)
    length = tl.load(table + 3 * row + 1)
    place = tl.load(table + 3 * row + 2)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        total += tl.load(source + start + i, mask=start + i < length, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / length
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        mask = start + i < length
        off = tl.where(mask, tl.load(source + start + i, mask=mask, other=0.0).to(tl.float32) - mean, 0.0)
        total += off * off
    scale = tl.rsqrt(tl.sum(total, axis=0) + length * eps)
    tl.store(moments + 2 * row, mean)
    tl.store(moments + 2 * row + 1, scale)
    for start in range(0, length, BLOCK):
        mask = start + i < length
        value = (tl.load(source + start + i, mask=mask, other=0.0).to(tl.float32) - mean) * scale
        tl.store(out + place + start + i, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gradient_row(table, kind, gradient, moments, out, BLOCK: tl.constexpr):
    """r (g - mean(g)) - r^3 (w - mean) sum(g (w - mean)), with r = 1 / sqrt(fan_in (var + eps))."""
    row = tl.program_id(0)
    source = tl.load(table + 3 * row).to(kind.dtype)
    length = tl.load(table + 3 * row + 1)
    place = tl.load(table + 3 * row + 2)
    mean = tl.load(moments + 2 * row)
    scale = tl.load(moments + 2 * row + 1)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    product = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, length, BLOCK):
        mask = start + i < length
        g = tl.load(gradient + place + start + i, mask=mask, other=0.0).to(tl.float32)
        total += g
        product += g * (tl.load(source + start + i, mask=mask, other=0.0).to(tl.float32) - mean)
    mean_gradient = tl.sum(total, axis=0) / length
    pull = tl.sum(product, axis=0) * scale * scale
    for start in range(0, length, BLOCK):
        mask = start + i < length
        g = tl.load(gradient + place + start + i, mask=mask, other=0.0).to(tl.float32)
        off = tl.load(source + start + i, mask=mask, other=0.0).to(tl.float32) - mean
        value = scale * (g - mean_gradient - pull * off)
        tl.store(out + place + start + i, value.to(out.dtype.element_ty), mask=mask)


class StandardizeAll(torch.autograd.Function):
    """The standardized weights of many convolutions, as views of one tensor."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, dtype: torch.dtype, eps: float, *weights: Tensor) -> tuple[Tensor, ...]:
        count = len(rows.table)
        moments = torch.empty(count, 2, device=rows.table.device)
        out = torch.empty(sum(map(Tensor.numel, weights)), dtype=dtype, device=rows.table.device)
        with torch.cuda.device_of(rows.table):
            standardize_row[(count,)](rows.table, weights[0], out, moments, eps, BLOCK=BLOCK)
        ctx.rows = rows
        ctx.save_for_backward(moments, *weights)
        parts = _laid_out(out, weights)
        learning = zip(parts, ctx.needs_input_grad[3:], strict=True)
        ctx.mark_non_differentiable(*(part for part, learns in learning if not learns))
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        moments, *weights = ctx.saved_tensors
        # FSDP2 may have gathered the weights again.
        rows: Rows = ctx.rows if ctx.rows.fit(weights) else rows_of(weights)
        # One copy of all gradients: their addresses differ in every step, and a table of them would have to be sent.
        flat = [_in_order(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)]
        joined = torch.cat(flat)
        out = torch.empty_like(joined, dtype=weights[0].dtype)
        gradient_row[(len(rows.table),)](rows.table, weights[0], joined, moments, out, BLOCK=BLOCK)
        return None, None, None, *_laid_out(out, weights)


def _laid_out(values: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Parts of a flat tensor with the shapes and layouts of the weights."""
    parts = values.split([weight.numel() for weight in weights])
    return tuple(part.as_strided(weight.shape, weight.stride()) for part, weight in zip(parts, weights, strict=True))


def _in_order(gradient: Tensor, weight: Tensor) -> Tensor:
    """The values of a gradient in the order of the weight's memory."""
    layout = zip(gradient.stride(), weight.stride(), weight.shape, strict=True)
    if any(own != other and size > 1 for own, other, size in layout):
        gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
