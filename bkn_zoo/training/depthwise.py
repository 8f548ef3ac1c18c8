"""Faster gradients of depthwise convolutions on ARM processors, where PyTorch's are slow and use one thread."""

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def fast_depthwise(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which gradients of depthwise float32 convolutions are about four times as fast on ARM processors."""
    slow = device.type == "cpu" and platform.machine() in ("aarch64", "arm64")
    return _FastDepthwise() if slow else nullcontext()


class _FastDepthwise(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = not kwargs and len(args) == 7 and not torch.is_autocast_enabled("cpu")
        if func is torch.conv2d and plain and torch.is_grad_enabled():
            x, weight, bias, stride, padding, dilation, groups = args
            same = groups == weight.shape[0] == x.shape[1] > 1 and x.dtype == weight.dtype == torch.float32
            if same and bias is None and not isinstance(padding, str) and set(dilation) == {1}:
                return _Depthwise.apply(x, weight, stride, padding)
        return func(*args, **(kwargs or {}))


class _Depthwise(torch.autograd.Function):
    """A convolution of each channel with a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, None, stride, padding, groups=len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (high, wide), (down, across) = weight.shape[2:], ctx.stride
        top, left = ctx.padding
        padded = F.pad(x, (left, left, top, top)).permute(0, 2, 3, 1)  # channels last: sums over all else are vectors
        rows, columns = down * gradient.shape[2], across * gradient.shape[3]
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            last = gradient.permute(0, 2, 3, 1)
            seen = [padded[:, i : i + rows : down, j : j + columns : across] for i in range(high) for j in range(wide)]
            sums = [(each[:, : last.shape[1], : last.shape[2]] * last).sum((0, 1, 2)) for each in seen]
            of_weight = torch.stack(sums, dim=1).view_as(weight)
        if ctx.needs_input_grad[0]:  # the gradient, with zeros between its values, by mirrored kernels
            size = padded.shape[1] - high + 1, padded.shape[2] - wide + 1
            spread = gradient.new_zeros((*gradient.shape[:2], *size)).contiguous(memory_format=torch.channels_last)
            spread[:, :, :rows:down, :columns:across] = gradient
            whole = F.conv2d(spread, weight.flip(2, 3), None, 1, (high - 1, wide - 1), groups=len(weight))
            of_x = whole[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        return of_x, of_weight, None, None
