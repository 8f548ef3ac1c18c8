"""The norms that BKN is compared with, behind the same interface: they take a prior belief and ignore it."""

import math

import torch
from torch import Tensor, nn

from bkn_zoo.modes import Statistics
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.norms.statistics import finish
from bkn_zoo.torch_internals import recomputing


class BatchNorm2d(RunningNorm):
    """Batch normalization (Ioffe & Szegedy 2015), over statistics groups if the network has them."""

    def __init__(
        self, num_features: int, prior_features: int | None = None, eps: float = 1e-5, momentum: float | None = 0.1
    ) -> None:
        super().__init__(num_features, eps, momentum)

    def with_prior(
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | str | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None]:
        statistics = self.choose(statistics)
        if statistics != Statistics("batch", None) or not self.training or self.momentum is None:
            return super().with_prior(x, prior, statistics, residual, relu)
        # For whole batches, PyTorch's own batch normalization is fastest.
        self.check(x, residual)
        self.check_group(x, None)
        if recomputing():  # update copies, so that autograd saves the same tensors as in the first pass
            running = self.running_mean.clone(), self.running_var.clone()
        else:
            self.num_batches_tracked += 1
            running = self.running_mean, self.running_var
        return finish(self.batch_norm(x, *running, True, self.momentum), residual, relu), None

    def partners(self) -> tuple[Belief, Tensor]:
        # Training on whole batches does not observe single images, so the population replaces an image's partners.
        observed = self.image_spread.any()
        mean = torch.where(observed, self.image_mean, self.running_mean)
        var = torch.where(observed, self.image_var, self.running_var)
        return Belief(mean, var), self.image_spread


class BatchRenorm2d(RunningNorm):
    """Batch renormalization (Ioffe 2017): batch statistics, corrected towards the running statistics within limits.

    The limits grow during training: r_max from 1 at `warmup` steps to 3 at `r_steps`, and d_max from 0 at `warmup`
    steps to 5 at `d_steps`. The defaults are those of the paper for ImageNet. Scale them down for shorter trainings.

    With activation checkpointing, the second pass of a step uses running averages that the first pass has changed.
    """

    fusible = False

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        eps: float = 1e-3,
        momentum: float | None = 0.01,
        warmup: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.warmup, self.r_steps, self.d_steps = warmup, r_steps, d_steps

    def limits(self) -> tuple[Tensor, Tensor]:
        """r_max and d_max at the current training step."""

        def ramp(end: int) -> Tensor:
            return ((self.num_batches_tracked - self.warmup) / max(end - self.warmup, 1)).clamp(0, 1)

        return 1 + 2 * ramp(self.r_steps), 5 * ramp(self.d_steps)

    def scale_and_shift(self, belief: Belief) -> tuple[Tensor, Tensor]:
        with torch.no_grad():  # no gradient passes through r and d
            r_max, d_max = self.limits()
            running_std = torch.sqrt(self.running_var + self.eps)
            r = (torch.sqrt(belief.var + self.eps) / running_std).clamp(1 / r_max, r_max)
            d = ((belief.mean - self.running_mean) / running_std).clamp(-d_max, d_max)
        return self.weight * r, self.bias + self.weight * d


class GroupNorm2d(nn.GroupNorm):
    """Group normalization (Wu & He 2018) with 32 groups, or with `channels_per_group` channels per group.

    If these do not divide the channels of a layer, the greatest common divisor is used.
    """

    carries_belief = True

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        eps: float = 1e-5,
        channels_per_group: int | None = None,
    ) -> None:
        if channels_per_group is None:
            groups = math.gcd(32, num_features)
        else:
            groups = num_features // math.gcd(channels_per_group, num_features)
        super().__init__(groups, num_features, eps)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | str | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None]:
        # Not F.group_norm: it refuses a single image with one value per group, which is a valid input.
        y = torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return finish(y, residual, relu), None
