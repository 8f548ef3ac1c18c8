"""The frame that BN, BRN and BKN share: observe, believe, remember, normalize."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.errors import InputError
from bkn_zoo.kernels.conditions import observed_by_pytorch
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.statistics import (
    HALF,
    finish,
    group_size,
    in_full_precision,
    normalize,
    observe,
    pool,
    without_autocast,
)

AVERAGES = {"running_mean": 0.0, "running_var": 1.0, "image_mean": 0.0, "image_var": 1.0, "image_spread": 0.0}
"""The running averages, and where they start."""

REMEMBERED = (*AVERAGES, "num_batches_tracked", "skipped_steps")
"""All that a training step moves, as the kernels take it."""

KalmanArguments = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class RunningNorm(nn.Module):
    """Normalizes by a belief about the input, and remembers beliefs for inference.

    As it stands the belief is the observation, which is batch normalization over statistics groups. A subclass says in
    `believe` how it forms another, and in `scale_and_shift` which scale and shift follow.

    In evaluation mode the layer is frozen: its running averages stay, and where a caller that is in training itself
    passes the statistics of the batch, it normalizes by the population, and its running belief is the prior of the
    layer above.

    Args:
        num_features: channels of the input.
        eps: added to the variance before the square root.
        momentum: step of the running averages; None makes them averages of all steps since the last reset.
        affine: whether it has a scale and a shift, `weight` and `bias`.
        bias: whether a scale comes with a shift.
        track_running_stats: whether it remembers. A layer that does not takes the statistics of the batch at inference
            too, or those of each image ("sample"); "population" and "expected" have nothing to go by, and are refused.
        statistics_batch_size: images per statistics group where a call does not say; None is the whole batch.

    Buffers, which stay in float32 when the layer is cast to half precision:
        running_mean, running_var: the belief, averaged over training (`population`).
        image_mean, image_var, image_spread: what the `expected` mode knows of an image's partners: mean of the images'
            means, mean of their variances, variance of their means.
        num_batches_tracked: training steps seen.
    """

    carries_belief = True  # takes the prior and the statistics beside the features, and returns its belief with them
    fusible = True  # the kernels know this layer's `believe`, and that it leaves `scale_and_shift` as it is
    prior_features: int | None = None  # channels of the layer below, whose belief this one takes
    reported_steps = 0  # of those that were skipped, how many a warning has told of
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
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.statistics_batch_size = statistics_batch_size
        kind: Any = {"device": device, "dtype": dtype}
        self.register_parameter("weight", nn.Parameter(torch.ones(num_features, **kind)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_features, **kind)) if affine and bias else None)
        if not bias:
            self.fusible = False  # the kernels know a scale with a shift

        def buffer(tensor: Tensor) -> Tensor | None:
            return in_full_precision(tensor) if track_running_stats else None

        for name, start in AVERAGES.items():
            self.register_buffer(name, buffer(torch.full((num_features,), start, **kind)))
        self.register_buffer("num_batches_tracked", buffer(torch.tensor(0, device=device)))
        self.register_buffer("skipped_steps", buffer(torch.tensor(0, device=device)), persistent=False)

    @property
    def has_prior(self) -> bool:
        """Whether it predicts something, with which it joins what it observes."""
        return False

    def reset_running_stats(self) -> None:
        """Forget all that was remembered."""
        if self.track_running_stats:
            for name, start in AVERAGES.items():
                getattr(self, name).fill_(start)
            self.num_batches_tracked.zero_()
            self.skipped_steps.zero_()
            self.reported_steps = 0

    def reset_parameters(self) -> None:
        """Put all parameters and buffers where they start."""
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
    ) -> tuple[Tensor, Belief | None]:
        """Normalize `x`, then add `residual` and apply the ReLU where asked.

        Args:
            x: features, (images, channels, ...).
            prior: belief of the layer below; not needed, and None, with population statistics.
            statistics: what to normalize by: at inference "population", "sample" or "expected". By default the batch's
                in training, the population's at inference.

        Returns:
            The normalized features and the belief they were normalized by (None with population statistics, where no
            belief has to travel).
        """
        self.check(x, residual)
        statistics = self.choose(statistics)
        frozen = statistics.mode == "batch" and not self.training and self.track_running_stats
        if frozen or statistics.mode == "population":
            y = self.batch_norm(x, self.running_mean, self.running_var)
            return finish(y, residual, relu), self.population(x.shape[0], statistics.group) if frozen else None
        if statistics.mode == "batch":
            self.check_group(x, statistics.group)
        if self.fused(statistics) and kernels.chosen(x, self.prior_features or 0):
            return self._forward_fused(x, prior, statistics, residual, relu)
        with without_autocast(x):
            images = observe(x)
            if statistics.mode == "batch":
                observed = pool(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.scale_and_shift(belief)
                if self.remembers():
                    self.remember(belief, observed, images, count=x.numel() // observed.mean.numel())
            else:
                observed = images if statistics.mode == "sample" else self.expect(images, statistics.group)
                belief = self.believe(observed, prior)
                weight, bias = self.weight, self.bias
            return normalize(x, belief, weight, bias, self.eps, residual, relu), belief

    def choose(self, statistics: Statistics | str | None) -> Statistics:
        """The statistics of a call, by the layer's own settings where the caller leaves it open."""
        if isinstance(statistics, str) or (statistics is None and self.track_running_stats):
            statistics = choose_statistics(self.training, statistics, self.statistics_batch_size)
        elif statistics is None:  # as every framework's batch normalization does it, at inference too
            statistics = choose_statistics(True, None, self.statistics_batch_size)
        if not self.track_running_stats and statistics.mode in ("population", "expected"):
            raise InputError(
                f"statistics={statistics.mode!r} needs running averages, but this layer was made with "
                "track_running_stats=False: choose statistics='sample', or None for those of the batch."
            )
        return statistics

    def remembers(self) -> bool:
        """Whether a pass with the statistics of the batch moves the running averages."""
        return self.training and self.track_running_stats and not recomputing()

    def population(self, images: int, group: int | None) -> Belief:
        """The running belief, for each group of a batch."""
        groups = images // group_size(images, group)
        return Belief(self.running_mean.expand(groups, -1), self.running_var.expand(groups, -1))

    def batch_norm(self, x: Tensor, mean: Tensor, var: Tensor, training: bool = False, momentum: float = 0.0) -> Tensor:
        """PyTorch's own, with scale and shift in float32, as it wants them beside statistics in float32."""
        weight, bias = (None if p is None else in_full_precision(p) for p in (self.weight, self.bias))
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, self.eps)

    def fused(self, statistics: Statistics) -> bool:
        """Whether the kernels know what is to be done; they have no gradients of `expected` statistics."""
        known = self.fusible and self.affine and self.momentum is not None
        return known and (statistics.mode != "expected" or not torch.is_grad_enabled())

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
            x, weight, bias, *kalman, residual, running, group, self.eps, self.momentum or 0.0, relu,
            partners, own,
        )  # fmt: skip
        return y, Belief(mean, var)

    def own(self, *names: str) -> list[Any]:
        """Parameters. An attribute of a module takes ten times as long; but who wraps a layer may have them there."""
        parameters = self._parameters
        try:
            return [parameters[name] for name in names]
        except KeyError:
            return [getattr(self, name) for name in names]

    def kalman_arguments(self, prior: Belief | None, groups: int) -> KalmanArguments:
        """The prior's mean and variance, A, raw R and raw q, as the kernels take them.

        Without A and R the prior is predicted already; all is None where the belief is the observation.
        """
        return None, None, None, None, None

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        """The belief formed from this layer's observation and the belief of the layer below."""
        return observed

    def scale_and_shift(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """Gamma and beta in training: (channels,), or (groups, channels) where they differ between groups."""
        return self.weight, self.bias

    def trust(self) -> Tensor | float:
        """The share of the observation in the belief."""
        return 1.0

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        if x.ndim < 2 or x.shape[1] != self.num_features:
            raise InputError(f"this layer normalizes {self.num_features} channels, but its input is {tuple(x.shape)}.")
        (weight,) = self.own("weight")
        if weight is not None and x.device != weight.device:
            raise InputError(f"the input is on {x.device} but the layer on {weight.device}: move one of them.")
        if residual is not None and (residual.device != x.device or residual.shape != x.shape):
            there, here = (f"{tuple(t.shape)} on {t.device}" for t in (residual, x))
            raise InputError(f"the residual is {there}, but the input to which it is added is {here}.")
        if self.training and x.numel() == 0:
            raise InputError(f"an input of {tuple(x.shape)} has no values to observe in training.")

    def check_group(self, x: Tensor, group: int | None) -> None:
        """Refuse groups of one value per channel where the belief is the observation: all that is left is the shift."""
        if self.has_prior or x.shape[0] == 0:
            return
        if group_size(x.shape[0], group) * math.prod(x.shape[2:]) == 1:
            raise InputError(
                f"a statistics group of an input of {tuple(x.shape)} has one value per channel, which is its own mean: "
                "take more images (statistics_batch_size, or the batch) or larger ones, or freeze the layer by eval()."
            )

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
        step, unrest = self._step()
        # Deviations from the running mean count too, so that V is right even for gradient batches of one image; the
        # factor takes out what the running mean's own unrest adds.
        spread = spread + (1 - unrest) * (image_mean - self.image_mean).square()
        finite = (mean + var + image_var).isfinite().all()
        for name, value in zip(AVERAGES, (mean, var, image_mean, image_var, spread), strict=True):
            running = getattr(self, name)
            moved = torch.lerp(running, value.to(running.dtype), step)
            # A spread is a square, which may overflow where all else is finite.
            running.copy_(torch.where(finite & moved.isfinite(), moved, running))
        self.num_batches_tracked += finite
        self.skipped_steps += ~finite
        if finite.device.type == "cpu" and not observed_by_pytorch(finite) and not finite:
            self._warn_of_skipped_steps()

    def _step(self) -> tuple[Tensor | float, Tensor | float]:
        """How far the averages move, and the running mean's share in the variance of its distance from a batch's mean.

        With V/N the variance of a batch's mean, that of the running mean is V/N step/(2 - step), or V/(N k) where it is
        the mean of the k batches before; its share is then step/2, or 1/(k + 1).
        """
        if self.momentum is not None:
            return self.momentum, self.momentum / 2
        step = 1 / (self.num_batches_tracked + 1).to(self.running_mean.dtype)
        return step, step

    def _warn_of_skipped_steps(self) -> None:
        self.reported_steps = int(self.skipped_steps)
        message = "a training batch was not finite: its step left the running statistics as they were"
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def train(self, mode: bool = True) -> "RunningNorm":
        # On a GPU, asking after every step would make the host wait for the device, and a compiled step asks nowhere;
        # the switch of mode is soon enough.
        skipped = self.skipped_steps
        asks = not mode and self.training and skipped is not None and not skipped.is_meta
        if asks and not observed_by_pytorch(skipped) and skipped > self.reported_steps:
            self._warn_of_skipped_steps()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningNorm":
        # In half precision a running average would stand still as soon as its steps are smaller than its rounding.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype in HALF:
                self._buffers[name] = before[name].to(buffer.device, torch.float32)  # type: ignore[union-attr]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A plain batch normalization (torchvision's, say) never kept the images' own statistics; the population's, with
        # no spread between images, are what it knows about them.
        own = ["image_mean", "image_var", "image_spread"]
        known = all(f"{prefix}{name}" in state_dict for name in ("running_mean", "running_var"))
        if known and not any(prefix + name in state_dict for name in own):
            mean, var = state_dict[f"{prefix}running_mean"], state_dict[f"{prefix}running_var"]
            # Copies: with `assign`, what is in the state becomes the buffer, and one tensor would be two of them.
            for name, value in zip(own, (mean.clone(), var.clone(), torch.zeros_like(mean)), strict=True):
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.track_running_stats and self.skipped_steps.is_meta and not self.running_mean.is_meta:
            # No state has it, so that nothing was assigned to it.
            self.skipped_steps = torch.zeros_like(self.skipped_steps, device=self.running_mean.device)

    def extra_repr(self) -> str:
        text = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        text += f", bias={self.bias is not None}, track_running_stats={self.track_running_stats}"
        group = self.statistics_batch_size
        return text if group is None else f"{text}, statistics_batch_size={group}"


@contextmanager
def left_in_its_modes(model: nn.Module) -> Iterator[None]:
    """Within it a network may be put into training or evaluation; in the end each module is in its mode of before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def recomputing() -> bool:
    """Whether a backward pass is under way: activation checkpointing runs a layer again there, for the same step."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
