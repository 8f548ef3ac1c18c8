"""BKN for networks that were trained with batch normalization: it can start from the statistics which they know."""

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
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.statistics import in_full_precision

BATCHNORM_GAIN = 0.99
"""q after `start_near_batchnorm`: nearly batch normalization, but with a gradient (at q = 1 it would be zero)."""


@torch.no_grad()
def start_near_batchnorm(layer: BatchKalmanNorm) -> None:
    """Put A, R and q of a layer with one below it where training starts from nearly batch normalization."""
    for block in layer.transition_blocks:
        block.zero_()
    layer.set_gain(BATCHNORM_GAIN)
    if layer.raw_process_noise.shape == layer.running_var.shape:
        # A dead channel has no variance, where the inverse of softplus would be minus infinity.
        layer.raw_process_noise.copy_(inverse_softplus(layer.running_var.clamp_min(layer.eps)))


class Centered(BatchKalmanNorm):
    """BKN which, once it has a center, predicts that as the mean where A adds nothing: m' = A m + center.

    What it tells the layer above is how far the mean is from there, so that A relates deviations. Without a center, or
    without a layer below, this is BKN. A state dict that has a center brings it; with one of a batch norm, the layer
    starts near batch normalization.
    """

    kalman = (*BatchKalmanNorm.kalman, "center")
    center: nn.Parameter | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_parameter("center", None)

    def set_center(self, center: Tensor) -> None:
        """Start from this mean; an optimizer has to be told of the new parameter."""
        self.center = nn.Parameter(center.detach().to(self.raw_gain.dtype, copy=True))
        self.kernels_predict = False  # they know no center

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.center is not None:
            nn.init.zeros_(self.center)

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, Belief | None]:
        y, belief = super().forward(*inputs, **named)
        if belief is not None and self.center is not None:
            belief = Belief(belief.mean - in_full_precision(self.center), belief.var)
        return y, belief

    def predict(self, prior: Belief) -> Belief:
        predicted = super().predict(prior)
        if self.center is None:
            return predicted
        return Belief(predicted.mean + in_full_precision(self.center), predicted.var)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}center" in state_dict:
            self.take_center()
        super()._load_from_state_dict(state_dict, prefix, *args)
        own = any(name.startswith(prefix) and name[len(prefix) :].split(".")[0] in self.kalman for name in state_dict)
        if self.prior_features is not None and f"{prefix}running_var" in state_dict and not own:
            start_near_batchnorm(self)

    def take_center(self) -> None:
        """Have one, for the values to come."""
        if self.center is None and self.prior_features is not None:
            self.set_center(torch.zeros_like(self.running_mean))


class Centered1d(Centered, BatchKalmanNorm1d):
    """A `BatchKalmanNorm1d` with a center."""


class Centered2d(Centered, BatchKalmanNorm2d):
    """A `BatchKalmanNorm2d` with a center."""


class Centered3d(Centered, BatchKalmanNorm3d):
    """A `BatchKalmanNorm3d` with a center."""


def take_centers(model: nn.Module, names: Iterable[str]) -> None:
    """Have those centers that the names of stored tensors speak of."""
    for name in names:
        layer, _, kind = name.rpartition(".")
        if kind == "center":
            try:
                norm = model.get_submodule(layer)
            except AttributeError:
                continue  # which is for who compares the names to say
            if isinstance(norm, Centered):
                norm.take_center()
