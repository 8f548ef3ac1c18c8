"""The frame that BN, BRN and BKN share: observe, believe, remember, normalize."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.errors import InputError
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.statistics import (
    Statistics,
    choose_statistics,
    finish,
    group_size,
    normalize,
    observe,
    pool,
    without_autocast,
)


class RunningNorm(nn.Module):
    """Normalizes by a belief about the input, and remembers beliefs for inference.

    As it stands the belief is the observation, which is batch normalization over statistics groups. A subclass says in
    `believe` how it forms another, and in `affine` which scale and shift follow.

    Buffers:
        running_mean, running_var: the belief, averaged over training (`population`).
        image_mean, image_var, image_spread: what the `expected` mode knows of an image's partners: mean of the images'
            means, mean of their variances, variance of their means.
        num_batches_tracked: training steps seen.
    """

    fusible = True  # the kernels know this layer's `believe`, and that it leaves `affine` as it is
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    image_mean: Tensor
    image_var: Tensor
    image_spread: Tensor
    skipped_steps: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("image_mean", torch.zeros(num_features))
        self.register_buffer("image_var", torch.ones(num_features))
        self.register_buffer("image_spread", torch.zeros(num_features))
        self.register_buffer("skipped_steps", torch.tensor(0), persistent=False)

    def forward(
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None]:
        """Normalize `x`, then add `residual` and apply the ReLU where asked.

        Args:
            x: features, (images, channels, ...).
            prior: belief of the layer below; not needed, and None, with population statistics.
            statistics: what to normalize by; by default the whole batch in training, the population at inference.

        Returns:
            The normalized features and the belief they were normalized by (None with population statistics, where no
            belief has to travel).
        """
        self.check(x, residual)
        statistics = statistics or choose_statistics(self.training, None, None)
        if statistics.mode == "population":
            running = self.running_mean, self.running_var
            return finish(F.batch_norm(x, *running, self.weight, self.bias, eps=self.eps), residual, relu), None
        with without_autocast(x):
            if self.fusible and statistics.mode in ("batch", "sample") and kernels.chosen(x):
                return self._forward_fused(x, prior, statistics, residual, relu)
            images = observe(x)
            if statistics.mode == "batch":
                observed = pool(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.affine(belief)
                self.remember(belief, observed, images, count=x.numel() // observed.mean.numel())
            else:
                observed = images if statistics.mode == "sample" else self.expect(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.weight, self.bias
            return normalize(x, belief, weight, bias, self.eps, residual, relu), belief

    def _forward_fused(
        self, x: Tensor, prior: Belief | None, statistics: Statistics, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Belief]:
        x = kernels.dense(x)
        residual = residual if residual is None else kernels.like(x, residual)
        group = 1 if statistics.mode == "sample" else group_size(x.shape[0], statistics.group)
        transition, raw_process_noise, raw_gain = self.kalman_parameters(prior, x.shape[0] // group)
        prior_mean = prior_var = None
        if prior is not None and transition is not None:
            prior_mean, prior_var = (part.float().contiguous() for part in prior)
        running: list[Tensor] = []
        if statistics.mode == "batch":
            running = [self.running_mean, self.running_var, self.image_mean, self.image_var, self.image_spread]
            running += [self.num_batches_tracked, self.skipped_steps]
        y, mean, var = kernels.fused_norm(
            x, self.weight, self.bias, prior_mean, prior_var, transition, raw_process_noise, raw_gain, residual,
            running, group, self.eps, self.momentum, relu,
        )  # fmt: skip
        return y, Belief(mean, var)

    def kalman_parameters(
        self, prior: Belief | None, groups: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """A, raw R and raw q, for a prior that fits them; Nones where the belief is the observation."""
        return None, None, None

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        """The belief formed from this layer's observation and the belief of the layer below."""
        return observed

    def affine(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """Scale and shift in training: (channels,), or (groups, channels) where they differ between groups."""
        return self.weight, self.bias

    def trust(self) -> Tensor | float:
        """The share of the observation in the belief."""
        return 1.0

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise InputError(f"this layer normalizes {self.num_features} channels, but its input is {tuple(x.shape)}.")
        if x.device != self.weight.device:
            raise InputError(f"the input is on {x.device} but the layer on {self.weight.device}: move one of them.")
        if residual is not None and (residual.device != x.device or residual.shape != x.shape):
            there, here = (f"{tuple(t.shape)} on {t.device}" for t in (residual, x))
            raise InputError(f"the residual is {there}, but the input to which it is added is {here}.")
        if self.training and x.numel() == 0:
            raise InputError(f"an input of {tuple(x.shape)} has no values to observe in training.")

    def expect(self, images: Belief, group: int | None) -> Belief:
        """The statistics each image would have met in a group of `group` images, in expectation over its partners."""
        own = 0.0 if group is None else 1 / group
        others = 1 - own
        partners, spread = self.partners()
        mean = torch.lerp(partners.mean, images.mean, own)
        # The variance of the union, less what the draw of the partners adds to the variance of its mean:
        # second - mean^2 - V (n-1)/n^2, written as a sum of positive terms so that large means cancel nothing.
        within = torch.lerp(partners.var, images.var, own)
        between = own * others * (images.mean - partners.mean).square() + others**2 * spread
        return Belief(mean, within + between)

    def partners(self) -> tuple[Belief, Tensor]:
        """Mean of the images' means and of their variances, and the variance of their means."""
        return Belief(self.image_mean, self.image_var), self.image_spread

    @torch.no_grad()
    def remember(self, belief: Belief, observed: Belief, images: Belief, count: int) -> None:
        """Move the running averages by `momentum` towards this step's, averaged over its groups.

        The observed part of the variance, over `count` values a group, gets Bessel's correction, as in every
        framework's batch normalization. A step with a value that is not finite leaves the averages as they were, so
        that one bad batch cannot spoil a model.
        """
        mean = belief.mean.mean(0)
        var = (belief.var + self.trust() * observed.var / max(count - 1, 1)).mean(0)
        spread, image_mean = torch.var_mean(images.mean, dim=0, correction=0)
        image_var = images.var.mean(0)
        # Deviations from the running mean count too, so that V is right even for gradient batches of one image; the
        # factor takes out what the running mean's own unrest adds.
        spread = spread + (1 - self.momentum / 2) * (image_mean - self.image_mean).square()
        finite = (mean + var + image_var).isfinite().all()
        self._move(self.running_mean, mean, finite)
        self._move(self.running_var, var, finite)
        self._move(self.image_mean, image_mean, finite)
        self._move(self.image_var, image_var, finite)
        self._move(self.image_spread, spread, finite)
        self.num_batches_tracked += finite
        self.skipped_steps += ~finite
        if finite.device.type == "cpu" and not torch.compiler.is_compiling() and not finite:
            self._warn_of_skipped_steps()

    def _move(self, running: Tensor, value: Tensor, finite: Tensor) -> None:
        running.copy_(torch.where(finite, torch.lerp(running, value.to(running.dtype), self.momentum), running))

    def _warn_of_skipped_steps(self) -> None:
        message = "a training batch was not finite: its step left the running statistics as they were"
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def train(self, mode: bool = True) -> "RunningNorm":
        # On a GPU, asking after every step would make the host wait for the device; the switch of mode is soon enough.
        if not mode and self.training and self.skipped_steps.device.type == "cuda" and self.skipped_steps:
            self._warn_of_skipped_steps()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A plain batch normalization (torchvision's, say) never kept the images' own statistics; the population's, with
        # no spread between images, are what it knows about them.
        own = ["image_mean", "image_var", "image_spread"]
        if f"{prefix}running_mean" in state_dict and not any(prefix + name in state_dict for name in own):
            mean, var = state_dict[f"{prefix}running_mean"], state_dict[f"{prefix}running_var"]
            for name, value in zip(own, (mean, var, torch.zeros_like(mean)), strict=True):
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"
