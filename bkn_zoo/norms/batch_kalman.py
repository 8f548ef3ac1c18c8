"""Batch Kalman Normalization (Wang et al. 2018), Algorithm 1."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo import kernels
from bkn_zoo.errors import InputError
from bkn_zoo.kernels.conditions import observed_by_pytorch
from bkn_zoo.norms.kalman import Belief, Factors, predict, update
from bkn_zoo.norms.running import KalmanArguments, RunningNorm
from bkn_zoo.norms.statistics import in_full_precision, without_autocast
from bkn_zoo.torch_internals import saved_tensors_are_hooked

INITIAL_GAIN = 0.5
INITIAL_PROCESS_NOISE = 1.0
BATCHNORM_GAIN = 0.99
"""The gain q after `start_near_batchnorm`: nearly batch normalization, with a gradient (at q = 1 it would be zero)."""

SMALLEST_SLOPE = 1e-4
"""Slope of the sigmoid at q = 0.0001. Below it, and at q = 0 and 1, the gradient of a logit is not scaled further."""

KALMAN = ("transition", "raw_process_noise", "raw_gain")
"""The names of A, R and q among a layer's parameters."""

RAW_GAIN_OF_ONE, RAW_ZERO = 40.0, -1000.0
"""Their sigmoids are exactly 1 and 0. They are finite, because averaging weights would turn infinity into NaN."""


def new_process_noise(size: int, device: Any = None, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A raw process noise at its initial value; R is its softplus. To share R, pass one of size 1 to all layers."""
    return nn.Parameter(inverse_softplus(torch.full((size,), INITIAL_PROCESS_NOISE, device=device, dtype=dtype)))


def inverse_softplus(value: Tensor) -> Tensor:
    """The raw value with this softplus. Zero, such as the variance of a dead channel, gets a finite raw value."""
    return (value + torch.log(-torch.expm1(-value))).clamp_min(RAW_ZERO)


class BatchKalmanNorm(RunningNorm):
    """Normalizes with a belief that combines the layer's observation with a prediction from the layer below.

    This is the base class of `BatchKalmanNorm1d`, `2d` and `3d`. With gain q = 1, or without a prior, this is batch
    normalization. With q = 0 the belief is the prediction, and A, R, q and the center do not learn. Arguments that are
    not listed are those of `nn.BatchNorm2d`.

    Args:
        prior_features: channels of the layer below, whose belief is passed to `forward`; None for a first layer.
        raw_process_noise: a parameter from `new_process_noise` that other layers share; None gives the layer its own,
            with one value per channel.
        transition_shapes: shapes of the blocks of a block diagonal A, as in `kalman.carry`; None for one full matrix.
        transition_rank: A = U V, where U has this many columns and starts at zero, if that has fewer parameters than
            one full matrix; None for the matrix itself. The parameters are `transition.left` and `transition.right`.
        initial_belief: whether a first layer has a prior of its own, as a Kalman filter does. It then predicts the mean
            `center` (initially 0) and the variance R, and has a gain.
        centered: for networks that were trained with batch normalization. Loading the state of a batch norm starts near
            batch normalization, loading a state with a center adds one, and a low gain learns faster (see `logit`).

    Attributes:
        center: a constant in the predicted mean, m' = A m + center. The layer passes the difference between its mean
            and the center to the layer above, whose A then relates deviations. None if there is no center.
    """

    dims: tuple[int, ...]  # numbers of dimensions that inputs may have
    kalman: tuple[str, ...] = (*KALMAN, "center")
    initial_gain = INITIAL_GAIN  # the value of q after `reset_parameters`
    centered = False
    kernels_predict = False  # whether the kernels can predict: they support a full A without a center
    _ready: Tensor | None = None  # A = U V, set by `multiplied_once`
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
        transition_rank: int | None = None,
        initial_belief: bool = False,
        centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, statistics_batch_size, device, dtype, bias
        )
        if initial_belief and prior_features is not None:
            raise InputError("initial_belief=True needs a first layer: leave out prior_features or initial_belief.")
        self.prior_features, self.centered = prior_features, centered
        like = torch.empty(0, device=device, dtype=dtype)
        if prior_features is None:
            self.register_parameter("transition", None)
        else:
            shapes = transition_shapes or [(num_features, prior_features)]
            self.kernels_predict = tuple(shapes[0]) == (num_features, prior_features)
            if transition_rank is not None and transition_rank < 1:
                raise InputError(f"transition_rank is {transition_rank}: choose a number of at least 1, or None.")
            rank = transition_rank or 0
            if self.kernels_predict and 0 < rank * (num_features + prior_features) < num_features * prior_features:
                left, right = like.new_zeros(num_features, rank), like.new_empty(rank, prior_features)
                self.transition = nn.ParameterDict({"left": left, "right": right})
                self._draw_right_factor()
            else:
                blocks = [nn.Parameter(like.new_zeros(shape)) for shape in shapes]
                self.transition = blocks[0] if len(blocks) == 1 else nn.ParameterList(blocks)
        for name in ("raw_process_noise", "raw_gain", "center"):
            self.register_parameter(name, None)
        if prior_features is not None or initial_belief:
            self._add_noise_and_gain(like, raw_process_noise)
        if initial_belief:
            self.set_center(like.new_zeros(num_features))

    def _add_noise_and_gain(self, like: Tensor, raw_process_noise: nn.Parameter | None = None) -> None:
        """Add a prior, with the device and dtype of a tensor."""
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
        """Add this center to the predicted mean. Pass the new parameter to your optimizer."""
        if not self.has_prior:
            self._add_noise_and_gain(self.running_mean if self.weight is None else self.weight.detach())
        self.center = nn.Parameter(center.detach().to(self.raw_gain.dtype, copy=True))
        self.kernels_predict = False

    def reset_parameters(self) -> None:
        """Set all parameters and buffers to their initial values, including an R that layers share."""
        super().reset_parameters()
        if self.has_prior:
            for block in self.transition_blocks:
                nn.init.zeros_(block)
            if self.factors is not None:
                self._draw_right_factor()
            start = inverse_softplus(torch.tensor(INITIAL_PROCESS_NOISE, device="cpu"))
            nn.init.constant_(self.raw_process_noise, start.item())
            self.set_gain(self.initial_gain)
        if self.center is not None:
            nn.init.zeros_(self.center)

    def _draw_right_factor(self) -> None:
        """Draw V with rows of length about 1, so that A = U V learns as fast as a full matrix in their directions."""
        nn.init.normal_(self.transition["right"], std=1 / math.sqrt(self.transition["right"].shape[1]))

    @property
    def factors(self) -> Factors | None:
        """U and V of a layer with `transition_rank`, if its A is their product."""
        found: Any = self._modules.get("transition")
        low_rank = isinstance(found, nn.ParameterDict)
        return Factors(found.left, found.right) if low_rank else None

    @property
    def transition_blocks(self) -> list[nn.Parameter]:
        """The parameters that are zero if A is zero: A or the blocks along its diagonal, or U of A = U V."""
        if self.transition is None:
            return []
        if isinstance(self.transition, nn.ParameterDict):
            return [self.transition["left"]]
        return list(self.transition) if isinstance(self.transition, nn.ParameterList) else [self.transition]

    @property
    def gain(self) -> Tensor:
        """The gain q: the weight of the observation in the belief, between 0 and 1."""
        return torch.sigmoid(in_full_precision(self.logit()))

    def logit(self) -> Tensor:
        """The raw gain. In a `centered` layer with a center, its gradient is that with respect to q.

        The true gradient has a factor q (1 - q), with which a low gain hardly learns.
        """
        raw = self.raw_gain
        if not self.centered or self.center is None or not raw.requires_grad or not torch.is_grad_enabled():
            return raw
        value = raw.detach()
        q = torch.sigmoid(in_full_precision(value))
        scale = 1 / (q * (1 - q)).clamp_min(SMALLEST_SLOPE)
        return value + scale.to(raw.dtype) * (raw - value)

    @torch.no_grad()
    def set_gain(self, gain: float) -> None:
        """Set the gain q to a number from 0 to 1. At both ends it stays there, because its gradient is zero."""
        if not self.has_prior:
            raise InputError("a first layer has no gain: create it with initial_belief=True to give it one.")
        check_gain(gain)
        ends = {0.0: RAW_ZERO, 1.0: RAW_GAIN_OF_ONE}
        self.raw_gain.fill_(ends[gain] if gain in ends else math.log(gain / (1 - gain)))

    @torch.no_grad()
    def start_near_batchnorm(self) -> None:
        """Set A, R, q and center of a layer with a prior so that training starts close to batch normalization."""
        for block in self.transition_blocks:
            block.zero_()
        self.set_gain(BATCHNORM_GAIN)
        if self.raw_process_noise.shape == self.running_var.shape:
            self.raw_process_noise.copy_(inverse_softplus(self.running_var.double()))
        if self.center is not None:
            self.center.copy_(self.running_mean)

    def take_center(self) -> None:
        """Add a center of zeros to a `centered` layer without one, so that values can be loaded into it."""
        if self.centered and self.center is None:
            self.set_center(torch.zeros_like(self.running_mean))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}center" in state_dict:
            self.take_center()
        super()._load_from_state_dict(state_dict, prefix, *args)
        own = any(name.startswith(prefix) and name[len(prefix) :].split(".")[0] in self.kalman for name in state_dict)
        if self.centered and self.has_prior and f"{prefix}running_var" in state_dict and not own:
            self.start_near_batchnorm()

    @property
    def process_noise(self) -> Tensor:
        """The process noise R: the variance that the transition A does not explain."""
        return F.softplus(in_full_precision(self.raw_process_noise))

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters to exclude from weight decay, in the form that timm expects."""
        return no_weight_decay(self)

    def with_prior(self, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Belief | None]:
        y, belief = super().with_prior(x, *args, **options)
        (center,) = self.own("center")
        if center is None or belief is None:
            return y, belief
        return y, Belief(belief.mean - held(in_full_precision(center), self.gain), belief.var)

    def believe(self, observed: Belief, prior: Belief | None) -> Belief:
        if not self.has_prior:
            return observed
        mean, var = self.predicted(prior, observed.mean.shape[0])
        gain = self.gain
        return update(Belief(held(mean, gain), held(var, gain)), observed, gain)

    def predicted(self, prior: Belief | None, groups: int) -> Belief:
        """The predicted belief, from the belief of the layer below or from the initial belief."""
        if self.prior_features is not None:
            return self.predict(self._checked(prior, groups))
        assert self.center is not None
        mean, var = in_full_precision(self.center), self.process_noise
        return Belief(mean.expand(groups, -1), var.expand(groups, self.num_features))

    def predict(self, prior: Belief) -> Belief:
        """The predicted belief, from the belief of the layer below."""
        # A network in half precision keeps its beliefs in full.
        prior = Belief(in_full_precision(prior.mean), in_full_precision(prior.var))
        factors, dtype = self.factors, prior.mean.dtype
        transition = [block.to(dtype) for block in factors or self.transition_blocks]
        mean, var = predict(prior, transition if factors is None else Factors(*transition), self.process_noise)
        return Belief(mean if self.center is None else mean + in_full_precision(self.center), var)

    def kalman_arguments(self, prior: Belief | None, groups: int) -> KalmanArguments:
        if not self.has_prior:
            return None, None, None, None, None
        if self.kernels_predict:
            transition: Any = self._ready
            # Activation checkpointing runs a layer twice, which must save the same tensors, and the second time alone.
            if transition is None or saved_tensors_are_hooked():
                transition = self.factors or self.transition
                if isinstance(transition, Factors):
                    with without_autocast(transition.left):
                        transition = torch.mm(*map(in_full_precision, transition))
            return *self._checked(prior, groups), transition, *self.own("raw_process_noise", "raw_gain")
        with without_autocast(self.raw_gain):
            return *self.predicted(prior, groups), None, None, self.logit()

    def _checked(self, prior: Belief | None, groups: int) -> Belief:
        if prior is None:
            raise InputError("this layer needs the belief of the layer below: pass what its norm returned as `prior`.")
        given, needed = tuple(prior.mean.shape), (groups, self.prior_features)
        if given != needed:
            raise InputError(f"the prior belief is {given}, but this layer needs {needed}: groups by channels below.")
        return prior

    def trust(self) -> Tensor | float:
        return self.gain if self.has_prior else 1.0

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        super().check(x, residual)
        if x.ndim not in self.dims:
            kind, shape = type(self).__name__, tuple(x.shape)
            raise InputError(f"{kind} does not accept an input with {x.ndim} dimensions, {shape}.")

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, prior_features={self.prior_features}"
        if self.has_prior and self.prior_features is None:
            text += ", initial_belief=True"
        return text if self.link is None else f"{text}, below: {', '.join(self.link.below()) or 'none'}"


@contextmanager
def multiplied_once(network: nn.Module, x: Tensor) -> Iterator[None]:
    """Multiply the factors of all layers, those of one shape together, for a training step on `x` with the kernels."""
    kinds: dict[Any, list[tuple[Any, Tensor, Tensor]]] = {}
    suits = network.training and torch.is_grad_enabled() and kernels.chosen(x) and not observed_by_pytorch(x)
    for layer in network.modules() if suits else ():
        if not (isinstance(layer, BatchKalmanNorm) and layer.kernels_predict and layer.training):
            continue
        own = layer.factors
        # A part of a sharded factor, for example, has another type.
        if own and type(own.left) is nn.Parameter:
            kinds.setdefault((own.left.shape, own.right.shape, own.left.device), []).append((layer, *own))
    try:
        for layers, *factors in (zip(*several, strict=True) for several in kinds.values()):
            with without_autocast(x):
                products = torch.bmm(*(in_full_precision(torch.stack(part)) for part in factors)).unbind()
            for layer, product in zip(layers, products, strict=True):
                layer.__dict__["_ready"] = product
        yield
    finally:
        for layer, _, _ in chain(*kinds.values()):
            layer.__dict__.pop("_ready", None)


def held(rows: Tensor, gain: Tensor) -> Tensor:
    """The same, but a constant to the gradient where q = 0."""
    return torch.where(gain > 0, rows, rows.detach()) if torch.is_grad_enabled() else rows


def check_gain(gain: float) -> None:
    if not 0 <= gain <= 1:
        raise InputError(f"the gain is {gain}: choose a number from 0 to 1.")


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
    """Keep shared parameters shared, such as one R for all layers, where PyTorch gives each layer its own copy."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name))
    yield
    for (first, name), *others in places.values():
        for part, other in others:
            setattr(part, other, getattr(first, name))


def tie_state(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Use one parameter in a state dict, the last, for each shared parameter (`load_state_dict(assign=True)`)."""
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
    """For networks whose layers share one R: it stays one parameter when the network is moved or loads a state."""

    def no_weight_decay(self) -> set[str]:
        """Names of A, R and q, to exclude them from weight decay, in the form that timm expects."""
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
