"""Batch Kalman Normalization (Wang et al. 2018), Algorithm 1."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.norms.kalman import Belief, predict, update
from bkn_zoo.norms.running import RunningNorm

INITIAL_GAIN = 0.5
INITIAL_PROCESS_NOISE = 1.0


def new_process_noise(size: int) -> nn.Parameter:
    """A raw process noise at its starting value; R is its softplus. Hand one of size 1 to all layers to share R."""
    return nn.Parameter(inverse_softplus(torch.full((size,), INITIAL_PROCESS_NOISE)))


def inverse_softplus(value: Tensor) -> Tensor:
    return value + torch.log(-torch.expm1(-value))


class BatchKalmanNorm2d(RunningNorm):
    """Normalizes by a belief that joins what the layer observes with what the layer below believed.

    With gain q = 1, or without a layer below, this is batch normalization.

    Args:
        num_features: channels of the input.
        prior_features: channels of the layer below, whose belief is passed to `forward`; None for a first layer.
        eps: added to the variance before the square root.
        momentum: step of the running averages.
        raw_process_noise: a parameter from `new_process_noise` that other layers share; None gives the layer its own,
            one value per channel.
    """

    dims: tuple[int, ...] = (4,)

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        eps: float = 1e-5,
        momentum: float = 0.1,
        raw_process_noise: nn.Parameter | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.prior_features = prior_features
        if prior_features is not None:
            self.transition = nn.Parameter(torch.zeros(num_features, prior_features))
            self.raw_process_noise = new_process_noise(num_features) if raw_process_noise is None else raw_process_noise
            self.raw_gain = nn.Parameter(torch.zeros(()))
            self.set_gain(INITIAL_GAIN)

    @property
    def gain(self) -> Tensor:
        """q, how far the observation is trusted."""
        return torch.sigmoid(self.raw_gain)

    @torch.no_grad()
    def set_gain(self, gain: float) -> None:
        """Set q, in (0, 1]; q = 1 makes the layer batch normalization for good, since its gradient is then zero."""
        if self.prior_features is None:
            raise InputError("a first layer has no gain: it believes what it observes.")
        if not 0 < gain <= 1:
            raise InputError(f"the gain must lie in (0, 1], not at {gain}.")
        self.raw_gain.fill_(math.log(gain / (1 - gain)) if gain < 1 else math.inf)

    @property
    def process_noise(self) -> Tensor:
        """R, the variance that the transition leaves unexplained."""
        return F.softplus(self.raw_process_noise)

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        if self.prior_features is None:
            return observed
        prior = self._checked(prior, observed.mean.shape[0])
        transition = self.transition.to(observed.mean.dtype)  # a network in half precision keeps its beliefs in full
        return update(predict(prior, transition, self.process_noise), observed, self.gain)

    def kalman_parameters(
        self, prior: Belief | None, groups: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.prior_features is None:
            return None, None, None
        self._checked(prior, groups)
        return self.transition, self.raw_process_noise, self.raw_gain

    def _checked(self, prior: Belief | None, groups: int) -> Belief:
        if prior is None:
            raise InputError("this layer has a layer below: pass the belief that its norm returned as `prior`.")
        if prior.mean.shape != (groups, self.prior_features):
            raise InputError(
                f"the prior belief is {tuple(prior.mean.shape)}, but this layer needs {(groups, self.prior_features)}: "
                "groups of this batch by channels of the layer below."
            )
        return prior

    def trust(self) -> Tensor | float:
        return 1.0 if self.prior_features is None else self.gain

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        super().check(x, residual)
        if x.ndim not in self.dims:
            raise InputError(f"{type(self).__name__} cannot take an input of {x.ndim} dimensions, {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, prior_features={self.prior_features}"


class BatchKalmanNorm1d(BatchKalmanNorm2d):
    """The same for fully connected features, (images, channels), or sequences, (images, channels, length)."""

    dims = (2, 3)
