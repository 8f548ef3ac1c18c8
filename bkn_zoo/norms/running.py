"""The base class of BN, BRN and BKN: observe, form a belief, remember it, normalize."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.errors import InputError, counted
from bkn_zoo.kernels.conditions import dense, observed_by_pytorch
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.statistics import (
    HALF,
    finish,
    group_count,
    group_size,
    in_full_precision,
    normalize_groups,
    observe,
    pool,
    without_autocast,
)
from bkn_zoo.torch_internals import recomputing

AVERAGES = {"running_mean": 0.0, "running_var": 1.0, "image_mean": 0.0, "image_var": 1.0, "image_spread": 0.0}
"""The running averages and their initial values."""

REMEMBERED = (*AVERAGES, "num_batches_tracked", "skipped_steps")
"""All buffers that a training step changes, in the order that the kernels expect."""

KalmanArguments = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class RunningNorm(nn.Module):
    """Normalizes with a belief about the input, and keeps running averages of beliefs for inference.

    In this base class the belief is the observation, which is batch normalization over statistics groups. Subclasses
    override `believe` (how the belief is formed) and `scale_and_shift` (the scale and shift that follow).

    In evaluation mode the layer is frozen. If the network around it is in training, a frozen layer normalizes with
    population statistics, and its running belief is the prior of the layer above.

    Buffers, which stay float32 when the layer is cast to half precision:
        running_mean, running_var: the belief, averaged over training (`population`).
        image_mean, image_var, image_spread: mean of the images' means, mean of their variances and variance of their
            means. The `expected` mode uses them for the other images of a group.
        num_batches_tracked: number of training steps.
    """

    carries_belief = True  # called with features, prior and statistics; returns features and belief
    fusible = True  # the kernels implement `believe` of this class, and `scale_and_shift` is not overridden
    prior_features: int | None = None  # channels of the layer below, whose belief is the prior
    reported_steps = 0  # skipped steps that a warning has reported
    link: Any = None  # in a converted network: supplies the prior and records the belief (conversion/record.py)
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    image_mean: Tensor
    image_var: Tensor
    image_spread: Tensor
    skipped_steps: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        statistics_batch_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.track_running_stats, self.statistics_batch_size = track_running_stats, statistics_batch_size
        kind: Any = {"device": device, "dtype": dtype}
        self.register_parameter("weight", nn.Parameter(torch.ones(num_features, **kind)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_features, **kind)) if affine and bias else None)
        if not bias:
            self.fusible = False  # the kernels support a scale only together with a shift

        def buffer(tensor: Tensor) -> Tensor | None:
            return in_full_precision(tensor) if track_running_stats else None

        for name, start in AVERAGES.items():
            self.register_buffer(name, buffer(torch.full((num_features,), start, **kind)))
        self.register_buffer("num_batches_tracked", buffer(torch.tensor(0, device=device)))
        self.register_buffer("skipped_steps", buffer(torch.tensor(0, device=device)), persistent=False)

    @property
    def has_averages(self) -> bool:
        """Whether there are running averages, even if `track_running_stats` was switched off later."""
        return self._buffers.get("running_mean") is not None

    @property
    def has_prior(self) -> bool:
        """Whether the layer makes a prediction that it combines with its observation."""
        return False

    def reset_running_stats(self) -> None:
        """Set the running averages to their initial values."""
        if self.track_running_stats:
            for name, start in AVERAGES.items():
                getattr(self, name).fill_(start)
            self.num_batches_tracked.zero_()
            self.skipped_steps.zero_()
            self.reported_steps = 0

    def reset_parameters(self) -> None:
        """Set all parameters and buffers to their initial values."""
        self.reset_running_stats()
        if self.affine:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | str | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None] | Tensor:
        """Normalize `x`, (images, channels, ...), then add `residual` and apply ReLU, if asked.

        Args:
            prior: belief of the layer below; population statistics do not need it.
            statistics: at inference "population" (the default), "sample" or "expected".

        Returns:
            The features, and the belief that normalized them, if any. In a converted network, features only.
        """
        if self.link is not None:
            return self.link.normalize(self, x)
        return self.with_prior(x, prior, statistics, residual, relu)

    def with_prior(
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | str | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None]:
        """As `forward`, with the prior in any network."""
        self.check(x, residual)
        statistics = self.choose(statistics)
        frozen = statistics.mode == "batch" and not self.training and self.has_averages
        if frozen or statistics.mode == "population":
            y = finish(self.batch_norm(x, *self.averages()), residual, relu)
            return y, self.population(x.shape[0], statistics.group) if frozen else None
        if statistics.mode != "expected":
            self.check_group(x, statistics.group if statistics.mode == "batch" else 1)
        # The layout of batch normalization's output.
        x = dense(x)
        if self.fused(x, statistics) and kernels.chosen(x, self.prior_features or 0):
            return self._forward_fused(x, prior, statistics, residual, relu)
        with without_autocast(x):
            images = observe(x)
            if statistics.mode == "batch":
                observed = pool(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.scale_and_shift(belief)
                if self.remembers():
                    self.remember(belief, observed, images, statistics.group, math.prod(x.shape[2:]))
            else:
                observed = images if statistics.mode == "sample" else self.expect(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.weight, self.bias
            group = statistics.group if statistics.mode == "batch" else 1
            return normalize_groups(x, belief, weight, bias, self.eps, residual, relu, group), belief

    def choose(self, statistics: Statistics | str | None) -> Statistics:
        """The statistics of a call, with the layer's own settings as default."""
        if isinstance(statistics, str) or (statistics is None and self.has_averages):
            statistics = choose_statistics(self.training, statistics, self.statistics_batch_size)
        elif statistics is None:  # at inference, too, as in PyTorch's batch normalization
            statistics = choose_statistics(True, None, self.statistics_batch_size)
        if not self.has_averages and statistics.mode in ("population", "expected"):
            raise InputError(
                f"statistics={statistics.mode!r} needs running averages, but this layer was created with "
                "track_running_stats=False: choose statistics='sample', or None for statistics of the batch."
            )
        return statistics

    def remembers(self) -> bool:
        """Whether a pass with the statistics of the batch updates the running averages."""
        return self.training and self.track_running_stats and not recomputing()

    def population(self, images: int, group: int | None) -> Belief:
        """The running belief, for each group of a batch."""
        groups = group_count(images, group)
        mean, var = self.averages()
        return Belief(mean.expand(groups, -1), var.expand(groups, -1))

    def averages(self) -> tuple[Tensor, Tensor]:
        """The running mean and variance; copies with gradients: a training step before the backward pass moves them."""
        if torch.is_grad_enabled():
            return self.running_mean.clone(), self.running_var.clone()
        return self.running_mean, self.running_var

    def batch_norm(self, x: Tensor, mean: Tensor, var: Tensor, training: bool = False, momentum: float = 0.0) -> Tensor:
        """PyTorch's batch normalization, which needs scale and shift in float32 if the statistics are float32."""
        weight, bias = (None if p is None else in_full_precision(p) for p in (self.weight, self.bias))
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, self.eps)

    def fused(self, x: Tensor, statistics: Statistics) -> bool:
        """Whether the kernels support this call: equal groups, and no gradients for `expected` statistics."""
        if not (self.fusible and self.affine) or self.momentum is None:
            return False
        if statistics.mode == "batch":
            return x.shape[0] % group_size(x.shape[0], statistics.group) == 0
        return statistics.mode != "expected" or not torch.is_grad_enabled()

    def _forward_fused(
        self, x: Tensor, prior: Belief | None, statistics: Statistics, residual: Tensor | None, relu: bool
    ) -> tuple[Tensor, Belief]:
        group = group_size(x.shape[0], statistics.group) if statistics.mode == "batch" else 1
        kalman = self.kalman_arguments(prior, x.shape[0] // group)
        running: list[Tensor] = []
        partners: list[Tensor] = []
        if statistics.mode == "batch" and self.remembers():
            buffers: dict[str, Any] = self._buffers  # as in `check`
            running = [buffers[name] for name in REMEMBERED]
        elif statistics.mode == "expected":
            (mean, var), spread = self.partners()
            partners = [mean, var, spread]
        own = 0.0 if statistics.group is None else 1 / statistics.group
        weight, bias = self.own("weight", "bias")
        y, mean, var = kernels.fused_norm(
            x, weight, bias, *kalman, residual, running, group, self.eps, self.momentum or 0.0, relu, partners, own,
        )  # fmt: skip
        return y, Belief(mean, var)

    def own(self, *names: str) -> list[Any]:
        """Parameters by name. Reading attributes takes ten times as long, but wrappers such as FSDP may need it."""
        parameters = self._parameters
        try:
            return [parameters[name] for name in names]
        except KeyError:
            return [getattr(self, name) for name in names]

    def kalman_arguments(self, prior: Belief | None, groups: int) -> KalmanArguments:
        """The arguments of `kernels.fused_norm` from prior_mean to raw_gain."""
        return None, None, None, None, None

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        """The belief formed from this layer's observation and the belief of the layer below."""
        return observed

    def scale_and_shift(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """Scale and shift in training: (channels,), or (groups, channels) if they differ between groups."""
        return self.weight, self.bias

    def trust(self) -> Tensor | float:
        """The weight of the observation in the belief."""
        return 1.0

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            channels = counted(self.num_features, "channel")
            raise InputError(f"this layer normalizes {channels}, but its input has the shape {tuple(x.shape)}.")
        (weight,) = self.own("weight")
        if weight is not None and x.device != weight.device:
            raise InputError(f"the input is on {x.device} but the layer on {weight.device}: move one of them.")
        if residual is not None and (residual.device != x.device or residual.shape != x.shape):
            there, here = (f"{tuple(t.shape)} on {t.device}" for t in (residual, x))
            raise InputError(f"the residual is {there}, but the input is {here}: they must agree.")
        if self.training and x.numel() == 0:
            raise InputError(f"an input of {tuple(x.shape)} has no values to observe in training.")

    def check_group(self, x: Tensor, group: int | None) -> None:
        """Refuse groups with one value per channel if the belief is the observation: the output would be the shift."""
        if not self.has_prior:
            refuse_single_values(x, group, self.training)

    def expect(self, images: Belief, group: int | None) -> Belief:
        """The expected statistics of a group of `group` images that contains this image, over all possible partners."""
        own = 0.0 if group is None else 1 / group
        others = 1 - own
        partners, spread = self.partners()
        mean = torch.lerp(partners.mean, images.mean, own)
        # The expected variance is second - mean^2 - V (n-1)/n^2 (docs/paper.md, 3.5). As a sum of positive terms it
        # stays exact for large means.
        within = torch.lerp(partners.var, images.var, own)
        between = own * others * (images.mean - partners.mean).square() + others**2 * spread
        return Belief(mean, within + between)

    def partners(self) -> tuple[Belief, Tensor]:
        """Mean of the images' means and of their variances, and the variance of their means."""
        return Belief(self.image_mean, self.image_var), self.image_spread

    @torch.no_grad()
    def remember(self, belief: Belief, observed: Belief, images: Belief, group: int | None, positions: int) -> None:
        """Move the running averages by `momentum` towards this step's, averaged over its images, if all are finite.

        The observed part of the variance gets Bessel's correction, as in PyTorch's batch normalization.
        """
        count = images.mean.shape[0]
        size = group_size(count, group)
        sizes = belief.mean.new_full((len(belief.mean), 1), size)
        if count % size:
            sizes[-1] = count % size
        share = sizes / count
        mean = (share * belief.mean).sum(0)
        var = (share * (belief.var + self.trust() * observed.var / (sizes * positions - 1).clamp_min(1))).sum(0)
        spread, image_mean = torch.var_mean(images.mean, dim=0, correction=0)
        image_var = images.var.mean(0)
        step, unrest = self._step()
        # Deviations from the running mean count, too, so that V is right even for gradient batches of one image. The
        # factor removes the variance of the running mean itself.
        spread = spread + (1 - unrest) * (image_mean - self.image_mean).square()
        finite = (mean + var + image_var).isfinite().all()
        for name, value in zip(AVERAGES, (mean, var, image_mean, image_var, spread), strict=True):
            running = getattr(self, name)
            moved = torch.lerp(running, value.to(running.dtype), step)
            # A spread is a square, which may overflow if everything else is finite.
            running.copy_(torch.where(finite & moved.isfinite(), moved, running))
        self.num_batches_tracked += finite
        self.skipped_steps += ~finite
        if finite.device.type == "cpu" and not observed_by_pytorch(finite) and not finite:
            self._warn_of_skipped_steps()

    def _step(self) -> tuple[Tensor | float, Tensor | float]:
        """The step of the averages, and the share of the running mean in the variance of the batch mean less it."""
        if self.momentum is not None:
            return self.momentum, self.momentum / 2
        step = 1 / (self.num_batches_tracked + 1).to(self.running_mean.dtype)
        return step, step

    def _warn_of_skipped_steps(self) -> None:
        self.reported_steps = int(self.skipped_steps)
        message = "a training batch was not finite: its step did not update the running statistics"
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def train(self, mode: bool = True) -> "RunningNorm":
        # On a GPU, a check after every step would make the host wait for the device, and a compiled step cannot check.
        # So check when the mode changes.
        skipped = self.skipped_steps
        asks = not mode and self.training and skipped is not None and not skipped.is_meta
        if asks and not observed_by_pytorch(skipped) and skipped > self.reported_steps:
            self._warn_of_skipped_steps()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningNorm":
        # In half precision a running average would stop changing when its steps become smaller than the rounding.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype in HALF:
                self._buffers[name] = before[name].to(buffer.device, torch.float32)  # type: ignore[union-attr]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Batch normalization (torchvision's, for example) does not store statistics of single images. Use those of the
        # population instead, without a spread between images.
        own = ["image_mean", "image_var", "image_spread"]
        known = all(f"{prefix}{name}" in state_dict for name in ("running_mean", "running_var"))
        if known and not any(prefix + name in state_dict for name in own):
            mean, var = state_dict[f"{prefix}running_mean"], state_dict[f"{prefix}running_var"]
            # Copies: with `assign`, tensors of the state become buffers, and one tensor would become two of them.
            for name, value in zip(own, (mean.clone(), var.clone(), torch.zeros_like(mean)), strict=True):
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.has_averages and self.skipped_steps.is_meta and not self.running_mean.is_meta:
            # It is not in any state dict, so nothing was assigned to it.
            self.skipped_steps = torch.zeros_like(self.skipped_steps, device=self.running_mean.device)

    def extra_repr(self) -> str:
        text = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        text += f", bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        group = self.statistics_batch_size
        return text if group is None else f"{text}, statistics_batch_size={group}"


def refuse_single_values(x: Tensor, group: int | None, training: bool) -> None:
    """Refuse statistics groups with one value per channel."""
    size = group_size(x.shape[0], group)
    if x.shape[0] == 0 or (x.shape[0] % size or size) * math.prod(x.shape[2:]) > 1:
        return
    advice = "statistics='population', or larger images."
    if training:
        advice = "more images per group (statistics_batch_size), larger images, or freeze the layer with eval()."
    raise InputError(f"a statistics group of an input of {tuple(x.shape)} has one value per channel: use {advice}")


@contextmanager
def left_in_its_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode (training or evaluation) of each module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
