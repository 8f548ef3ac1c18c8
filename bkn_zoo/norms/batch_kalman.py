"""Batch Kalman Normalization (Wang et al. 2018), Algorithm 1."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.norms.kalman import Belief, predict, update
from bkn_zoo.norms.running import KalmanArguments, RunningNorm
from bkn_zoo.norms.statistics import Statistics, in_full_precision, without_autocast

INITIAL_GAIN = 0.5
INITIAL_PROCESS_NOISE = 1.0
KALMAN = ("transition", "raw_process_noise", "raw_gain")
"""The names of A, R and q among a layer's parameters."""

RAW_GAIN_OF_ONE = 40.0
"""Its sigmoid is 1 in float32 and in float64, and it is finite: a mean of weights, say, would make infinity NaN."""

RAW_ZERO = -1000.0
"""Its sigmoid and its softplus are 0 in float32 and in float64; it is finite, and exact in 16 bits."""


def new_process_noise(
    size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """A raw process noise at its starting value; R is its softplus. Hand one of size 1 to all layers to share R."""
    return nn.Parameter(inverse_softplus(torch.full((size,), INITIAL_PROCESS_NOISE, device=device, dtype=dtype)))


def inverse_softplus(value: Tensor) -> Tensor:
    """The raw value whose softplus this is; a zero, as the variance of a dead channel is, gets a finite one."""
    return (value + torch.log(-torch.expm1(-value))).clamp_min(RAW_ZERO)


class BatchKalmanNorm(RunningNorm):
    """Normalizes by a belief that joins what the layer observes with what the layer below believed.

    The base of `BatchKalmanNorm1d`, `2d` and `3d`, which say in `dims` what inputs they take.

    With gain q = 1, or without a prior, this is batch normalization. With q = 0 it believes what it predicts, and none
    of A, R, q and center learns. The arguments not listed here are those of `RunningNorm` and, where it has them, of
    `nn.BatchNorm2d`.

    Args:
        num_features: channels of the input.
        prior_features: channels of the layer below, whose belief is passed to `forward`; None for a first layer.
        raw_process_noise: a parameter from `new_process_noise` that other layers share; None gives the layer its own,
            one value per channel.
        transition_shapes: of the blocks of a block diagonal A, as `kalman.carry` takes them; None for one full matrix.
        initial_belief: whether a first layer has a prior of its own, as a Kalman filter starts from one: it predicts
            the mean `center` (which starts at 0) and the variance R, and has a gain.

    Attributes:
        center: the mean that is predicted where A adds nothing: m' = A m + center. The layer above is told how far
            the mean is from there, so that its A relates deviations. None where there is no such mean.
    """

    dims: tuple[int, ...]
    kalman: tuple[str, ...] = (*KALMAN, "center")
    initial_gain = INITIAL_GAIN  # where `reset_parameters` puts q
    kernels_predict = False  # whether the kernels can: they know a full A, and no center
    transition: Any
    raw_process_noise: nn.Parameter
    raw_gain: nn.Parameter
    center: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        prior_features: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        bias: bool = True,
        statistics_batch_size: int | None = None,
        raw_process_noise: nn.Parameter | None = None,
        transition_shapes: Sequence[tuple[int, ...]] | None = None,
        initial_belief: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, statistics_batch_size, device, dtype, bias
        )
        if initial_belief and prior_features is not None:
            raise InputError(
                "initial_belief is for a first layer: one with prior_features has the belief of the layer below."
            )
        self.prior_features = prior_features
        like = torch.empty(0, device=device, dtype=dtype)
        if prior_features is None:
            self.register_parameter("transition", None)
        else:
            shapes = transition_shapes or [(num_features, prior_features)]
            blocks = [nn.Parameter(like.new_zeros(shape)) for shape in shapes]
            self.transition = blocks[0] if len(blocks) == 1 else nn.ParameterList(blocks)
            self.kernels_predict = blocks[0].shape == (num_features, prior_features)
        for name in ("raw_process_noise", "raw_gain", "center"):
            self.register_parameter(name, None)
        if prior_features is not None or initial_belief:
            self._add_noise_and_gain(like, raw_process_noise)
        if initial_belief:
            self.set_center(like.new_zeros(num_features))

    def _add_noise_and_gain(self, like: Tensor, raw_process_noise: nn.Parameter | None = None) -> None:
        """Have a prior, with the device and dtype of a tensor."""
        if raw_process_noise is None:
            raw_process_noise = new_process_noise(self.num_features, like.device, like.dtype)
        self.raw_process_noise = raw_process_noise
        self.raw_gain = nn.Parameter(like.new_zeros(1))
        self.set_gain(self.initial_gain)

    @property
    def has_prior(self) -> bool:
        parameters = self._parameters  # as in `own`
        return parameters["raw_gain"] is not None if "raw_gain" in parameters else hasattr(self, "raw_gain")

    def set_center(self, center: Tensor) -> None:
        """Predict this mean where A adds nothing; an optimizer has to be told of the new parameter."""
        if not self.has_prior:
            self._add_noise_and_gain(self.running_mean if self.weight is None else self.weight.detach())
        self.center = nn.Parameter(center.detach().to(self.raw_gain.dtype, copy=True))
        self.kernels_predict = False

    def reset_parameters(self) -> None:
        """Put all parameters and buffers where they start, an R that layers share too."""
        super().reset_parameters()
        if self.has_prior:
            for block in self.transition_blocks:
                nn.init.zeros_(block)
            start = inverse_softplus(torch.tensor(INITIAL_PROCESS_NOISE, device="cpu"))
            nn.init.constant_(self.raw_process_noise, start.item())
            self.set_gain(self.initial_gain)
        if self.center is not None:
            nn.init.zeros_(self.center)

    @property
    def transition_blocks(self) -> list[nn.Parameter]:
        """The blocks of A along its diagonal: one full matrix, unless the layer was made with `transition_shapes`."""
        if self.transition is None:
            return []
        return list(self.transition) if isinstance(self.transition, nn.ParameterList) else [self.transition]

    @property
    def gain(self) -> Tensor:
        """q, how far the observation is trusted."""
        return torch.sigmoid(in_full_precision(self.logit()))

    def logit(self) -> Tensor:
        """What q is the sigmoid of."""
        return self.raw_gain

    @torch.no_grad()
    def set_gain(self, gain: float) -> None:
        """Set q, in [0, 1]. Both ends are for good, since the gradient of q is zero there.

        q = 1 makes the layer batch normalization. With q = 0 it normalizes by what it predicts: with A = 0, by the
        center and R, as a frozen batch norm does by its running statistics.
        """
        if not self.has_prior:
            raise InputError("a first layer without an initial belief has no gain: it believes what it observes.")
        check_gain(gain)
        ends = {0.0: RAW_ZERO, 1.0: RAW_GAIN_OF_ONE}
        self.raw_gain.fill_(ends[gain] if gain in ends else math.log(gain / (1 - gain)))

    @property
    def process_noise(self) -> Tensor:
        """R, the variance that the transition leaves unexplained."""
        return F.softplus(in_full_precision(self.raw_process_noise))

    def no_weight_decay(self) -> set[str]:
        """The parameters that weight decay would pull towards arbitrary values, by name, as timm asks for them."""
        return no_weight_decay(self)

    def forward(
        self,
        x: Tensor,
        prior: Belief | None = None,
        statistics: Statistics | str | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
    ) -> tuple[Tensor, Belief | None]:
        y, belief = super().forward(x, prior, statistics, residual, relu)
        (center,) = self.own("center")
        if center is None or belief is None:
            return y, belief
        return y, Belief(belief.mean - self.held(in_full_precision(center)), belief.var)

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        if not self.has_prior:
            return observed
        mean, var = self.predicted(prior, observed.mean.shape[0])
        return update(Belief(self.held(mean), self.held(var)), observed, self.gain)

    def held(self, rows: Tensor) -> Tensor:
        """The same, but a constant to the gradient where q = 0."""
        gain = torch.sigmoid(in_full_precision(self.raw_gain.detach()))  # without the operations of a gradient
        return torch.where(gain > 0, rows, rows.detach())

    def predicted(self, prior: Belief | None, groups: int) -> Belief:
        """What this layer believes before it observes: from the belief of the layer below, or its initial belief."""
        if self.prior_features is not None:
            return self.predict(self._checked(prior, groups))
        assert self.center is not None
        mean, var = in_full_precision(self.center), self.process_noise
        return Belief(mean.expand(groups, -1), var.expand(groups, self.num_features))

    def predict(self, prior: Belief) -> Belief:
        """What the belief of the layer below makes of this layer's channels."""
        # A network in half precision keeps its beliefs in full.
        prior = Belief(in_full_precision(prior.mean), in_full_precision(prior.var))
        blocks = [block.to(prior.mean.dtype) for block in self.transition_blocks]
        mean, var = predict(prior, blocks, self.process_noise)
        return Belief(mean if self.center is None else mean + in_full_precision(self.center), var)

    def kalman_arguments(self, prior: Belief | None, groups: int) -> KalmanArguments:
        if not self.has_prior:
            return None, None, None, None, None
        if self.kernels_predict:
            transition, raw_process_noise, raw_gain = self.own(*KALMAN)
            return *self._checked(prior, groups), transition, raw_process_noise, raw_gain
        with without_autocast(self.raw_gain):
            return *self.predicted(prior, groups), None, None, self.logit()

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
        return self.gain if self.has_prior else 1.0

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        super().check(x, residual)
        if x.ndim not in self.dims:
            raise InputError(f"{type(self).__name__} cannot take an input of {x.ndim} dimensions, {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, prior_features={self.prior_features}"
        return f"{text}, initial_belief=True" if self.has_prior and self.prior_features is None else text


def check_gain(gain: float) -> None:
    if not 0 <= gain <= 1:
        raise InputError(f"the gain must lie in [0, 1], not at {gain}.")


class BatchKalmanNorm1d(BatchKalmanNorm):
    """BKN for fully connected features, (images, channels), or sequences, (images, channels, length)."""

    dims = (2, 3)


class BatchKalmanNorm2d(BatchKalmanNorm):
    """BKN for feature maps of images, (images, channels, height, width)."""

    dims = (4,)


class BatchKalmanNorm3d(BatchKalmanNorm):
    """BKN for volumes and video, (images, channels, depth, height, width)."""

    dims = (5,)


def no_weight_decay(module: nn.Module) -> set[str]:
    """The names of A, R, q and centers of all layers in a network."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, layer in module.named_modules()
        if isinstance(layer, BatchKalmanNorm)
        for name, _ in layer.named_parameters()
        if name.partition(".")[0] in layer.kalman
    }


@contextmanager
def tied(module: nn.Module) -> Iterator[None]:
    """Within it, PyTorch may give each layer parameters of its own, as on leaving the meta device: what was one is one
    again in the end, such as the R of all layers.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    yield
    for (first, name), *others in places.values():
        for part, other in others:
            setattr(part, other, getattr(first, name))


def tie_state(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Let a state to be assigned (`load_state_dict(assign=True)`) have one parameter for what is one in the module.

    PyTorch makes a parameter of each tensor otherwise. Of several the last counts, as where they are copied.
    """
    places: dict[nn.Parameter, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append(f"{prefix}{path}.{name}" if path else f"{prefix}{name}")
    for parameter, names in places.items():
        given = [state_dict[name] for name in names if isinstance(state_dict.get(name), Tensor)]
        if len(names) > 1 and given:
            one = given[-1]
            if not isinstance(one, nn.Parameter):
                one = nn.Parameter(one, requires_grad=parameter.requires_grad)
            state_dict.update(dict.fromkeys(names, one))


class OneNoise(nn.Module):
    """For networks whose layers share R: it stays one parameter, wherever the network goes and whatever it loads."""

    def no_weight_decay(self) -> set[str]:
        """The names of A, R and q, which weight decay would pull towards arbitrary values; timm asks for them so."""
        return no_weight_decay(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with tied(self):
            super()._apply(fn, recurse)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            tie_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
