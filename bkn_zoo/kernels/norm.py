"""The fused norm as PyTorch operators, which autograd, torch.compile and CUDA graphs support.

`norm` combines observe, predict, update, remember and normalize (with the residual sum and the ReLU). If possible, its
kernels are launched without PyTorch's dispatcher, which would take as long as the kernels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bkn_zoo.kernels import norm_launch
from bkn_zoo.kernels.conditions import dense, observed_by_pytorch
from bkn_zoo.kernels.norm_launch import parameter_sizes

_library = torch.library.Library("bkn_zoo", "DEF")
_library.define(
    "norm(Tensor x, Tensor weight, Tensor bias, Tensor? prior_mean, Tensor? prior_var, Tensor? transition, "
    "Tensor? raw_process_noise, Tensor? raw_gain, Tensor? residual, Tensor(a!)[] running, SymInt group, float eps, "
    "float momentum, bool relu, Tensor[] partners, float own) -> (Tensor y, Tensor beliefs)",
    tags=torch.Tag.flexible_layout,  # otherwise inductor would copy features into the traced layout
)
_library.define(
    "norm_backward(Tensor dy, Tensor? dbelief_mean, Tensor? dbelief_var, Tensor x, Tensor? y, Tensor weight, "
    "Tensor bias, Tensor beliefs, Tensor? prior_mean, Tensor? prior_var, Tensor? transition, "
    "Tensor? raw_process_noise, Tensor? raw_gain, SymInt group, float eps, bool relu) "
    "-> (Tensor dx, Tensor dresidual, Tensor dpriors, Tensor dparameters)",
    tags=torch.Tag.flexible_layout,
)


@torch.library.impl(_library, "norm", "CompositeExplicitAutograd")
def _norm(*args: Any) -> tuple[Tensor, Tensor]:
    return norm_launch.forward(*args, alone=False)


@torch.library.impl(_library, "norm_backward", "CompositeExplicitAutograd")
def _norm_backward(*args: Any) -> tuple[Tensor | None, ...]:
    return norm_launch.backward(*args, alone=False)


@torch.library.register_fake("bkn_zoo::norm", lib=_library)
def _norm_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dense(x)), x.new_empty((4, x.shape[0] // rest[9], x.shape[1]), dtype=torch.float32)


@torch.library.register_fake("bkn_zoo::norm_backward", lib=_library)
def _norm_backward_fake(
    dy: Tensor, dmean: Any, dvar: Any, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, beliefs: Tensor,
    prior_mean: Tensor | None, prior_var: Any, transition: Tensor | None, raw_process_noise: Tensor | None,
    raw_gain: Tensor | None, *_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    x = dense(x)
    dresidual = None if y is None else torch.empty_like(x)
    dpriors = None if prior_mean is None else beliefs.new_empty(2, *prior_mean.shape)
    dparameters = beliefs.new_empty(sum(parameter_sizes(weight, transition, raw_process_noise, raw_gain)))
    return torch.empty_like(x), dresidual, dpriors, dparameters


class Norm(torch.autograd.Function):
    """Autograd for `bkn_zoo::norm`. (`torch.library.register_autograd` does not support in-place operators.)"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, prior_mean: Tensor | None, prior_var: Tensor | None,
        transition: Tensor | None, raw_process_noise: Tensor | None, raw_gain: Tensor | None,
        residual: Tensor | None, running: list[Tensor], group: int, eps: float, momentum: float, relu: bool,
        observed: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        launch = torch.ops.bkn_zoo.norm if observed else norm_launch.forward
        below = prior_mean, prior_var, transition, raw_process_noise, raw_gain
        y, beliefs = launch(x, weight, bias, *below, residual, running, group, eps, momentum, relu, [], 0.0)
        # The sign of a sum with a residual cannot be recomputed from x, and the layer above keeps y anyway.
        kept = y if relu and residual is not None else None
        ctx.save_for_backward(x, kept, weight, bias, beliefs, *below)
        ctx.settings, ctx.has_residual = (group, eps, relu), residual is not None
        ctx.set_materialize_grads(False)
        return y, beliefs[0], beliefs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # so that a second derivative raises an error
            return once_differentiable(gradients_of)(ctx, *gradients)
        return gradients_of(ctx, *gradients)


# `Norm.apply` of newer versions of PyTorch. Older versions first look for transforms in every argument.
_apply = super(torch.autograd.Function, Norm).apply


def gradients_of(ctx: Any, dy: Tensor | None, dmean: Tensor | None, dvar: Tensor | None) -> tuple[Any, ...]:
    """The gradients of all arguments of `Norm`."""
    x, kept, weight, bias, beliefs, *below = ctx.saved_tensors
    if dmean is not None or dvar is not None:
        dmean = torch.zeros_like(beliefs[0]) if dmean is None else dmean.contiguous()
        dvar = torch.zeros_like(beliefs[0]) if dvar is None else dvar.contiguous()
    dy = torch.zeros_like(x) if dy is None else dy
    launch: Any = torch.ops.bkn_zoo.norm_backward if observed_by_pytorch(x) else norm_launch.backward
    dx, dresidual, dpriors, dparameters = launch(dy, dmean, dvar, x, kept, weight, bias, beliefs, *below, *ctx.settings)
    if not ctx.has_residual:
        dresidual = None
    elif kept is None:
        dresidual = dy.to(x.dtype)
    _, _, transition, raw_process_noise, raw_gain = below
    sizes = parameter_sizes(weight, transition, raw_process_noise, raw_gain)
    if transition is not None and not ctx.needs_input_grad[5]:
        # A is frozen, so free the memory of its gradient.
        dparameters, sizes[0] = dparameters[sizes[0] :].clone(), 0
    dtransition, dweight, dbias, dnoise, dgain = torch.split_with_sizes(dparameters, sizes)
    below = [None] * 5
    if raw_gain is not None:
        below = [*dpriors.unbind(), None, None, dgain]
    if transition is not None:
        below[2:4] = dtransition.view_as(transition) if sizes[0] else None, dnoise
    return dx, dweight, dbias, *below, dresidual, None, None, None, None, None, None


def fused_norm(
    x: Tensor, weight: Tensor, bias: Tensor, prior_mean: Tensor | None, prior_var: Tensor | None,
    transition: Tensor | None, raw_process_noise: Tensor | None, raw_gain: Tensor | None,
    residual: Tensor | None, running: list[Tensor], group: int, eps: float, momentum: float, relu: bool,
    partners: list[Tensor] | None = None, own: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalized features, and mean and variance of the belief that normalizes them, with gradients.

    Args:
        prior_mean, prior_var, transition, raw_process_noise, raw_gain: parameters of a layer with a prior; otherwise
            None. Without `transition` and `raw_process_noise`, the prior is already the prediction.
        running: the five running averages and the two step counters, which are updated; empty to update none.
        group: images per statistics group.
        partners: for `expected` statistics, the result of `RunningNorm.partners`; there are no gradients then.
        own: the image's own share in these statistics.
    """
    x, weight, bias = dense(x), weight.contiguous(), bias.contiguous()
    if residual is not None:
        residual = residual.to(x.dtype)
    if prior_mean is not None and prior_var is not None:
        prior_mean, prior_var = prior_mean.float().contiguous(), prior_var.float().contiguous()
    if transition is not None:
        transition = transition.contiguous()
    arguments = (
        x, weight, bias, prior_mean, prior_var, transition, raw_process_noise, raw_gain, residual, running, group,
        eps, momentum, relu,
    )  # fmt: skip
    observed = observed_by_pytorch(x)
    if torch.is_grad_enabled() and not partners:
        return Norm.apply(*arguments, True) if observed else _apply(*arguments, False)
    launch = torch.ops.bkn_zoo.norm if observed else norm_launch.forward
    y, beliefs = launch(*arguments, partners or [], own)
    return y, beliefs[0], beliefs[1]
