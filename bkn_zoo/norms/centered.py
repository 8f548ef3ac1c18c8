"""BKN for networks that were trained with batch normalization: it can start from their running statistics."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.norms.batch_kalman import (
    BatchKalmanNorm,
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchKalmanNorm3d,
    inverse_softplus,
)
from bkn_zoo.norms.statistics import in_full_precision

BATCHNORM_GAIN = 0.99
"""The gain q after `start_near_batchnorm`: nearly batch normalization, with a gradient (at q = 1 it would be zero)."""


SMALLEST_SLOPE = 1e-4
"""Slope of the sigmoid at q = 0.0001. Below it, and at q = 0 and 1, the gradient of a logit is not scaled further."""


@torch.no_grad()
def start_near_batchnorm(layer: BatchKalmanNorm) -> None:
    """Set A, R, q and center of a layer with a prior so that training starts close to batch normalization."""
    for block in layer.transition_blocks:
        block.zero_()
    layer.set_gain(BATCHNORM_GAIN)
    if layer.raw_process_noise.shape == layer.running_var.shape:
        layer.raw_process_noise.copy_(inverse_softplus(layer.running_var.double()))
    if layer.center is not None:
        layer.center.copy_(layer.running_mean)


class Centered(BatchKalmanNorm):
    """BKN that gets a center (and, as a first layer, an initial belief) in order to start near its population.

    Loading a state dict with a center adds one. Loading the state of a batch norm starts near batch normalization.

    With a center, the gradient of `raw_gain` is the gradient of the loss with respect to the gain q. The true gradient
    of the logit has a factor q (1 - q), and a step along it changes q by the square of that: at q = 0.01, by a
    ten-thousandth. Without the factor, a low gain can still learn. This is the natural gradient, because the Fisher
    information of the logit is q (1 - q).
    """

    def _get_name(self) -> str:
        return type(self).__name__.replace("Centered", "BatchKalmanNorm")

    def logit(self) -> Tensor:
        raw = self.raw_gain
        if self.center is None or not raw.requires_grad or not torch.is_grad_enabled():
            return raw
        value = raw.detach()
        q = torch.sigmoid(in_full_precision(value))
        scale = 1 / (q * (1 - q)).clamp_min(SMALLEST_SLOPE)
        return value + scale.to(raw.dtype) * (raw - value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}center" in state_dict:
            self.take_center()
        super()._load_from_state_dict(state_dict, prefix, *args)
        own = any(name.startswith(prefix) and name[len(prefix) :].split(".")[0] in self.kalman for name in state_dict)
        if self.has_prior and f"{prefix}running_var" in state_dict and not own:
            start_near_batchnorm(self)

    def take_center(self) -> None:
        """Add a center of zeros, if there is none, so that values can be loaded into it."""
        if self.center is None:
            self.set_center(torch.zeros_like(self.running_mean))


class Centered1d(Centered, BatchKalmanNorm1d):
    """A `BatchKalmanNorm1d` with a center."""


class Centered2d(Centered, BatchKalmanNorm2d):
    """A `BatchKalmanNorm2d` with a center."""


class Centered3d(Centered, BatchKalmanNorm3d):
    """A `BatchKalmanNorm3d` with a center."""


def take_centers(model: nn.Module, names: Iterable[str]) -> None:
    """Add centers to the layers for which the names of stored tensors contain one."""
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "center":
            try:
                norm = model.get_submodule(layer)
            except AttributeError:
                continue  # the comparison of names reports it
            if isinstance(norm, Centered):
                norm.take_center()
