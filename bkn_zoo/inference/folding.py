"""Prepares copies of a network that are faster at inference, for population statistics or for statistics of the image.

With population statistics, every norm is folded into the convolution before it. With statistics of the image (`sample`,
`expected`), parts of the norms that do not depend on the image are computed once.
"""

import copy
import functools
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.models.inception import Inception, side_by_side
from bkn_zoo.models.network import BeliefNetwork, Branch, ConvNorm, State
from bkn_zoo.modes import Statistics
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.norms.kalman import Belief, Factors, carry, carry_variance
from bkn_zoo.norms.running import RunningNorm, refuse_single_values
from bkn_zoo.norms.standardized import with_constant_weights
from bkn_zoo.norms.statistics import finish, in_full_precision

SMALL_TRANSITION = 2**17
"""Numbers in the largest A = U V that is multiplied out: two products are faster than seven operations with U and V."""

AnyNetwork = TypeVar("AnyNetwork", bound=BeliefNetwork)
"""A network of the zoo, or any network that was converted as a whole."""


@torch.no_grad()
def prepare(model: AnyNetwork, statistics: Statistics, as_stored: bool = False) -> AnyNetwork:
    """A faster copy of `model`, for population statistics or for those of an image; `as_stored` as in `frozen`."""
    for name, module in model.named_modules():
        if isinstance(module, RunningNorm) and has_hooks(module):
            raise InputError(
                f"{name} has hooks, which engines do not call: remove them first, or call the network itself."
            )
    if statistics.mode == "population":
        return join(fold_norms(model))
    network = frozen(model, as_stored)
    for name, module in list(network.named_modules()):
        if isinstance(module, RunningNorm):
            _replace(network, name, ImageNorm(module, statistics))
    return join(network)


@torch.no_grad()
def fold_norms(model: AnyNetwork) -> AnyNetwork:
    """A copy of `model` for population statistics only, with norms folded into the convolutions before them.

    Not folded are GroupNorm, whose statistics are the image's, norms without a convolution before them, and norms after
    a convolution with hooks or computed weights (pruned, parametrized).
    """
    network = frozen(model)
    for name, (conv, pooled) in _convolutions(network).items():
        norm: Any = network.get_submodule(name)
        scale = torch.rsqrt(norm.running_var + norm.eps)
        scale = scale if norm.weight is None else norm.weight * scale
        shift = (0 if norm.bias is None else norm.bias) - norm.running_mean * scale
        bias = torch.zeros_like(shift) if conv.bias is None else conv.bias * scale
        weight = conv.weight * scale.reshape(-1, *[1] * (conv.weight.ndim - 1))
        conv.weight = nn.Parameter(weight, requires_grad=False)  # a new parameter, because others may share the old one
        conv.bias = nn.Parameter(bias if pooled else bias + shift, requires_grad=False)
        _replace(network, name, FoldedNorm(shift if pooled else None))
    return network


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _takes_in(conv: nn.Module) -> bool:
    """Whether the weights of a convolution are its own parameters, without hooks."""
    plain = type(conv) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and "forward" not in vars(conv)
    return plain and not has_hooks(conv)  # pruning computes weights in a hook


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a norm by a layer. In a converted network, the layer gets the links of the norm."""
    norm: Any = network.get_submodule(name)
    if norm.link is not None:
        norm.link.attach(layer, norm)
    network.set_submodule(name, layer)


def frozen(model: AnyNetwork, as_stored: bool = False) -> AnyNetwork:
    """A copy in float32 and evaluation mode, without gradients, which shares unchanged weights but no buffers.

    With `as_stored`, weights with two or more dimensions stay in 16 bits, as in checkpoints.
    """
    shared: dict[int, Any] = {id(weight): nn.Parameter(weight.data, False) for weight in model.parameters()}
    computed = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    # Such as pruned weights.
    shared |= {id(tensor): tensor.detach() for tensor in computed}
    # So that PyTorch counts changes by the network's own code.
    with torch.inference_mode(False):
        shared |= {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    network = copy.deepcopy(model, shared)
    network.eval()
    with_constant_weights(network)
    for tensor in (*network.parameters(), *network.buffers()):
        stays = tensor.dtype == torch.float32 or (as_stored and tensor.dtype == torch.float16 and tensor.ndim > 1)
        if tensor.is_floating_point() and not stays:
            tensor.data = tensor.data.float()
    return network


def in_precision(network: AnyNetwork, dtype: torch.dtype) -> AnyNetwork:
    """Convert the weights of `network` to a precision. Norms and statistics stay float32."""
    norms = [module for module in network.modules() if isinstance(module, RunningNorm | ImageNorm)]
    inner = nn.ParameterList, nn.ParameterDict  # modules inside norms, which only hold parameters
    parts = [part for norm in norms for part in norm.modules() if part is norm or isinstance(part, inner)]
    for module in set(network.modules()).difference(parts):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    return network


def _convolutions(network: Any) -> dict[str, tuple[nn.Conv2d, bool]]:
    """For each norm, by name, the convolution whose output it takes, and whether through an average pooling.

    A converted network stores this. For other networks, a small image passes through to find out.
    """
    if network.foldable is not None:
        norms = {name for name, module in network.named_modules() if isinstance(module, RunningNorm)}  # not replaced
        convs = {name: network.get_submodule(conv) for name, conv in network.foldable.items() if name in norms}
        return {name: (cast(nn.Conv2d, conv), False) for name, conv in convs.items() if _takes_in(conv)}
    source: dict[int, tuple[nn.Conv2d, bool]] = {}
    found: dict[str, tuple[nn.Conv2d, bool]] = {}
    alive = []  # keeps tensors alive, so that their ids are unique

    def watch(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        alive.append(output)
        if isinstance(module, nn.Conv2d):
            source[id(output)] = module, False
        elif id(args[0]) in source and isinstance(module, RunningNorm):
            found[name] = source[id(args[0])]
        elif id(args[0]) in source:
            source[id(output)] = source[id(args[0])][0], True

    hooks = [
        module.register_forward_hook(functools.partial(watch, name))
        for name, module in network.named_modules()
        if _takes_in(module)
        or isinstance(module, RunningNorm)
        or (isinstance(module, nn.AvgPool2d) and not has_hooks(module))
    ]
    network(torch.zeros(1, 3, network.stride, network.stride, device=next(network.parameters()).device), "population")
    for hook in hooks:
        hook.remove()
    return found


def in_float32(output: Any) -> Tensor:
    """Check the output of a network, which may be anything for a converted network."""
    if not isinstance(output, Tensor):
        raise InputError(
            f"engines support networks with one output tensor, but this one returns a {type(output).__name__}: convert "
            "a module around it that returns one tensor."
        )
    return output.float()


class FoldedNorm(nn.Module):
    """The rest of a norm that was folded into a convolution: the residual sum and the ReLU.

    After a pooling it has the shift, too: a bias before the pooling would be diluted by zero padding.
    """

    shift: Tensor | None
    link: Any = None  # as in RunningNorm

    def __init__(self, shift: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("shift", None if shift is None else shift[:, None, None])

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return self.with_prior(x, *args, **options) if self.link is None else self.link.normalize(self, x)

    def with_prior(
        self, x: Tensor, prior: None, statistics: Statistics, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, None]:
        if statistics.mode != "population":
            raise InputError(f"a folded network supports only statistics='population', not {statistics.mode!r}.")
        return finish(x if self.shift is None else x + self.shift, residual, relu), None


class ImageNorm(nn.Module):
    """A norm for `sample` and `expected` statistics only, in as few operations as possible.

    Numbers are tensors, because an operation with a Python number costs twice as much.
    """

    own: Any  # these two are tensors, or values in a graph that is being built
    partners_var: Any
    link: Any = None  # as in RunningNorm
    low_rank = False  # whether A is used as a product of two factors

    def __init__(self, norm: RunningNorm, statistics: Statistics) -> None:
        super().__init__()
        if not type(norm).__module__.startswith("bkn_zoo."):  # a subclass may predict or update differently
            raise InputError(
                f"engines support {type(norm).__name__} only with statistics='population': choose it, or call the "
                "network itself."
            )
        self.believes = isinstance(norm, BatchKalmanNorm)
        self.prior_features = norm.prior_features
        self.has_prior = norm.has_prior
        self.eps = nn.Buffer(torch.tensor(norm.eps))
        self.weight = nn.Buffer(torch.ones(norm.num_features)) if norm.weight is None else norm.weight
        self.bias = nn.Buffer(torch.zeros(norm.num_features)) if norm.bias is None else norm.bias
        if norm.has_averages:
            partners, spread = norm.partners()
            self.image_mean, self.image_var = nn.Buffer(partners.mean), nn.Buffer(partners.var)
            self.image_spread = nn.Buffer(spread)
            weigh([self], torch.tensor(1 / (statistics.group or 1)))
        if isinstance(norm, BatchKalmanNorm) and self.has_prior:
            gain = norm.gain.repeat(norm.num_features)
            self.gain, self.distrust = nn.Buffer(gain), nn.Buffer(1 - gain)
            if norm.factors is not None:
                left, right = (in_full_precision(factor.detach()) for factor in norm.factors)
                self.low_rank = len(left) * right.shape[1] > SMALL_TRANSITION
            if self.low_rank:
                # Buffers, because factors in 16 bits become new tensors here, and `JoinedInception` merges by name.
                self.left, self.right = nn.Buffer(left), nn.Buffer(right)
                self.left_of_variance = nn.Buffer((1 - norm.gain).sqrt() * left)
            else:
                self.transition = norm.transition if norm.factors is None else nn.Parameter(left @ right, False)
                blocks = norm.transition_blocks if norm.factors is None else [self.transition]
                squares = [nn.Parameter((1 - norm.gain) * block.float().square(), False) for block in blocks]
                if squares:
                    self.transition_squared = squares[0] if len(squares) == 1 else nn.ParameterList(squares)
            self.process_noise = nn.Buffer((1 - gain) * norm.process_noise)
        center = getattr(norm, "center", None)
        self.center = None if center is None else nn.Buffer(in_full_precision(center))

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return self.with_prior(x, *args, **options) if self.link is None else self.link.normalize(self, x)

    def with_prior(
        self, x: Tensor, prior: Any, statistics: Statistics, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Belief | None]:
        if statistics.mode == "sample" and not self.has_prior:
            refuse_single_values(x, 1, training=False)
        mean, var = _observe(x)
        if statistics.mode == "expected":  # as RunningNorm.expect
            deviation = mean - self.image_mean
            pulled = self.own * deviation
            rest = deviation - pulled
            mean, var = mean - rest, self.own * var + (pulled * rest + self.partners_var)
        if self.has_prior:  # as predict and update
            predicted_mean, predicted_var = self._predict(prior)
            innovation = mean - predicted_mean
            var = predicted_var + self.gain * (var + self.distrust * innovation * innovation)
            # In 16 bits, `mean - distrust * innovation` has no digit left if the gain is small.
            mean = self.gain * mean + self.distrust * predicted_mean
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        broadcast = mean.shape + (1,) * (x.ndim - 2)
        y = torch.addcmul(shift.reshape(broadcast), in_full_precision(x), scale.reshape(broadcast))
        told = mean if self.center is None else mean - self.center
        return finish(y, residual, relu).to(x.dtype), Belief(told, var) if self.believes else None

    def _predict(self, prior: Any) -> tuple[Any, Any]:
        """The predicted mean, and (1 - q) times the predicted variance."""
        if self.low_rank:
            mean = F.linear(F.linear(prior.mean, self.right), self.left, self.center)
            return mean, carry_variance(prior.var, Factors(self.left_of_variance, self.right)) + self.process_noise
        if self.transition is None:  # a first layer with an initial belief
            return self.center, self.process_noise
        mean = _carry(prior.mean, self.transition, self.center)
        return mean, _carry(prior.var, self.transition_squared, self.process_noise)


def weigh(norms: list[ImageNorm], own: Any) -> None:
    """Set the share of an image's own statistics in `expected`, a tensor or a value in a graph; 1 is `sample`."""
    others = 1 - own
    var, spread = (torch.cat([getattr(norm, name) for norm in norms]) for name in ("image_var", "image_spread"))
    variances = (others * (var + others * spread)).split([len(norm.image_var) for norm in norms], 0)
    for norm, partners_var in zip(norms, variances, strict=True):
        for name, value in {"own": own, "partners_var": partners_var}.items():
            norm._buffers.pop(name, None)
            setattr(norm, name, nn.Buffer(value) if issubclass(type(value), Tensor) else value)


def _carry(rows: Tensor, transition: Any, added: Tensor | None = None) -> Tensor:
    """`carry` and a sum, in one operation if A is a full matrix."""
    if isinstance(transition, Tensor) and transition.ndim == 2:
        return F.linear(rows, transition, added)
    carried = carry(rows, [transition] if isinstance(transition, Tensor) else list(transition))
    return carried if added is None else carried + added


def _observe(x: Tensor) -> Belief:
    """The mean and variance of each image, on a CPU or in a graph."""
    if torch.compiler.is_compiling():
        return _observe_plainly(in_full_precision(x))
    if len(x) > 1:
        means, variances = zip(*map(_observe, x.split(1)), strict=True)
        return Belief(torch.cat(means), torch.cat(variances))
    # For one image. In channels_last it is ten times as fast as torch.var_mean, and as exact.
    mean, var = torch.batch_norm_update_stats(in_full_precision(x), None, None, 0.0)
    return Belief(mean.unsqueeze(0), var.unsqueeze(0))


def _observe_plainly(x: Tensor) -> Belief:
    """The same in operations that every runtime supports and that are fastest in OpenVINO, for exported graphs."""
    positions = x.shape[2:]
    if len(positions) == 2:
        mean = _spatial_mean(x)
        deviation = x - mean
        return Belief(mean.flatten(1), _spatial_mean(deviation * deviation).flatten(1))
    x = x.flatten(2) if positions else x.unsqueeze(2)
    mean = x.mean(2, keepdim=True)
    deviation = x - mean
    return Belief(mean.squeeze(2), (deviation * deviation).mean(2))


def _spatial_mean(x: Tensor) -> Tensor:
    """The mean of the means of rows, because a runtime may sum in f16, as OpenVINO does on Arm by default."""
    return F.avg_pool2d(F.avg_pool2d(x, (1, x.shape[3])), (x.shape[2], 1))


def join(network: AnyNetwork) -> AnyNetwork:
    """Merge equal first layers of the branches of Inception blocks into one convolution and norm, in place."""
    for name, module in list(network.named_modules()):
        if isinstance(module, Inception) and not any(map(has_hooks, module.modules())):
            branches: list[Any] = list(module.branches)
            heads = [branch[0] for branch in branches if _may_be_joined(branch[0])]
            heads = [head for head in heads if _alike(head, heads[0])]
            if len(heads) > 1:
                network.set_submodule(name, JoinedInception(branches, heads))
    return network


def _may_be_joined(layer: nn.Module) -> bool:
    """Whether this is a 1x1 convolution with a norm that treats each channel separately."""
    return (
        isinstance(layer, ConvNorm)
        and _takes_in(layer.conv)
        and (layer.conv.kernel_size, layer.conv.stride, layer.pool) == ((1, 1), (1, 1), None)
        and isinstance(layer.norm, FoldedNorm | ImageNorm)
    )


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether layers have the same parts, with equal numbers that apply to all channels."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(t.ndim > 0 or torch.equal(t, theirs[n]) for n, t in mine.items())


class JoinedInception(nn.Module):
    """An Inception block with merged first layers (`heads`), because every operation counts in a small network."""

    def __init__(self, branches: list[Branch], heads: list[ConvNorm]) -> None:
        super().__init__()
        self.begun = [branch[0] in heads for branch in branches]
        self.branches = nn.ModuleList(branch[1:] if branch[0] in heads else branch for branch in branches)
        self.widths = [head.conv.out_channels for head in heads]
        self.head = copy.deepcopy(heads[0])
        self.head.conv.out_channels = sum(self.widths)
        states = [head.state_dict() for head in heads]
        for name, tensor in self.head.state_dict(keep_vars=True).items():
            parts = [state[name] for state in states]
            if name.startswith("norm.left"):  # U of A = U V: each branch has its own V
                tensor.data = torch.block_diag(*parts)
            elif tensor.ndim > 0:  # a scalar is the same for all
                tensor.data = torch.cat(parts)

    def forward(self, state: State, statistics: Statistics) -> State:
        x, belief = self.head(state, statistics)
        beliefs: list[Belief | None] = [None] * len(self.widths)
        if belief is not None:
            beliefs = list(map(Belief, belief.mean.split(self.widths, 1), belief.var.split(self.widths, 1)))
        heads = iter(zip(x.split(self.widths, 1), beliefs, strict=True))
        pairs = zip(self.branches, self.begun, strict=True)
        return side_by_side([branch(next(heads) if begun else state, statistics) for branch, begun in pairs])
