"""The fused norm as PyTorch operators, so that autograd, torch.compile and CUDA graphs take it for one of their own.

`norm` is observe, predict, update, remember and normalize (with the residual sum and the ReLU) in one.
"""

from typing import Any

import torch
from torch import Tensor

from bkn_zoo.kernels import norm_launch

_library = torch.library.Library("bkn_zoo", "DEF")
_library.define(
    "norm(Tensor x, Tensor weight, Tensor bias, Tensor? prior_mean, Tensor? prior_var, Tensor? transition, "
    "Tensor? raw_process_noise, Tensor? raw_gain, Tensor? residual, Tensor(a!)[] running, SymInt group, float eps, "
    "float momentum, bool relu) -> (Tensor y, Tensor belief_mean, Tensor belief_var, Tensor observed)"
)
_library.define(
    "norm_backward(Tensor dy, Tensor? dbelief_mean, Tensor? dbelief_var, Tensor x, Tensor? y, Tensor weight, "
    "Tensor bias, Tensor belief_mean, Tensor belief_var, Tensor observed, Tensor? prior_mean, Tensor? prior_var, "
    "Tensor? transition, Tensor? raw_process_noise, Tensor? raw_gain, SymInt group, float eps, bool relu) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias, Tensor dprior_mean, Tensor dprior_var, "
    "Tensor dtransition, Tensor draw_process_noise, Tensor draw_gain)"
)
_library.impl("norm", norm_launch.forward, "CompositeExplicitAutograd")
_library.impl("norm_backward", norm_launch.backward, "CompositeExplicitAutograd")


@torch.library.register_fake("bkn_zoo::norm", lib=_library)
def _norm_fake(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shape = x.shape[0] // rest[9], x.shape[1]
    beliefs = [x.new_empty(shape, dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(x), *beliefs, x.new_empty((2, *shape), dtype=torch.float32)


@torch.library.register_fake("bkn_zoo::norm_backward", lib=_library)
def _norm_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, y, weight, bias = args[3:7]
    below = args[10:15]

    def like(tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if tensor is None else torch.empty_like(tensor)

    return like(x), like(y), like(weight), like(bias), *map(like, below)


class Norm(torch.autograd.Function):
    """Autograd for `bkn_zoo::norm`. (`torch.library.register_autograd` takes only operators that change nothing.)"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, prior_mean: Tensor | None, prior_var: Tensor | None,
        transition: Tensor | None, raw_process_noise: Tensor | None, raw_gain: Tensor | None,
        residual: Tensor | None, running: list[Tensor], group: int, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        kalman = prior_mean, prior_var, transition, raw_process_noise, raw_gain
        y, belief_mean, belief_var, observed = torch.ops.bkn_zoo.norm(
            x, weight, bias, *kalman, residual, running, group, eps, momentum, relu
        )
        # The sign of a sum with a residual cannot be computed again from x; the layer above keeps y anyway.
        kept = y if relu and residual is not None else None
        ctx.save_for_backward(x, kept, weight, bias, belief_mean, belief_var, observed, *kalman)
        ctx.group, ctx.eps, ctx.relu, ctx.has_residual = group, eps, relu, residual is not None
        ctx.set_materialize_grads(False)
        return y, belief_mean, belief_var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dy, dmean, dvar = grads
        x, kept, *saved = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else norm_launch.slice_like(x, dy)
        if dmean is not None or dvar is not None:
            belief_mean = saved[2]
            dmean = torch.zeros_like(belief_mean) if dmean is None else dmean.contiguous()
            dvar = torch.zeros_like(belief_mean) if dvar is None else dvar.contiguous()
        dx, dresidual, *rest = torch.ops.bkn_zoo.norm_backward(
            dy, dmean, dvar, x, kept, *saved, ctx.group, ctx.eps, ctx.relu
        )
        parameters = [saved[0], saved[1], *saved[5:]]  # weight, bias, and the five of the Kalman step
        gradients = [None if p is None else g.to(p.dtype) for p, g in zip(parameters, rest, strict=True)]
        if not ctx.has_residual:
            dresidual = None
        elif kept is None:
            dresidual = dy
        return dx, *gradients, dresidual, None, None, None, None, None
