"""How each kind of operation transforms the tags of its inputs: one small handler per kind, in the table HANDLERS.

PyTorch shows the planner every operation as one of its basic operations: `x + y`, `x.add_(y)` and `torch.add(x, y)` are
all "add". For operations that are not in the table, the planner guesses, and reports the guess.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bkn_zoo.conversion.ledger import NOTHING, UNKNOWN, Ledger, Tag, fit_shape, moved, together, without
from bkn_zoo.torch_internals import memory_of, tree_leaves


class NeedsValuesError(Exception):
    """The plan depends on values of tensors, which the meta device does not have."""


@dataclass
class Operation:
    """One operation: its arguments, result, and the tensors among its arguments that have a tag."""

    ledger: Ledger
    function: Any
    args: Any
    kwargs: Any
    result: Any
    tags: dict[int, Tag]
    tensors: list[Tensor]

    @property
    def name(self) -> str:
        return basic_name(self.function)

    @property
    def first(self) -> Tag:
        return self.tag(self.tensors[0])

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the result, or of the first of several."""
        result = self.result[0] if isinstance(self.result, tuple | list) else self.result
        return result.shape

    def tag(self, tensor: Any) -> Tag:
        return self.tags[id(tensor)]

    def given(self, name: str, default: Any = None) -> Any:
        """An argument by its name in PyTorch's schema."""
        arguments = {argument.name: argument.default_value for argument in self.function._schema.arguments}
        arguments |= dict(zip(arguments, self.args, strict=False)) | self.kwargs
        return arguments.get(name, default)


def basic_name(function: Any) -> str:
    """The basic name: `add` for aten::add.Tensor, aten::add_.Scalar and so on."""
    return str(function._schema.name).rpartition("::")[2].strip("_")


def move_with_features(o: Operation) -> Any:
    """Channels and images move with the features."""
    if o.name == "as_strided" and o.result.shape == o.args[0].shape and o.result.stride() == o.args[0].stride():
        return Tag(o.first.channels, o.first.images)
    function = torch.reshape if o.name in ("view", "unsafe_view", "reshape_alias") else o.function
    return moved(function, o.args[:2] if function is torch.reshape else o.args, o.kwargs, o.tags)


def select(o: Operation) -> Any:
    """A move by an index, whose rows are known only when the network runs."""
    x, *index = o.args
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(index)):
        raise NeedsValuesError
    if id(x) not in o.tags:
        return None
    function = lambda numbers: o.function(numbers, *index, **o.kwargs)  # noqa: E731
    tag = moved(function, (x,), {}, {id(x): o.tag(x)})
    rows = index[0][:1] if isinstance(index[0], list | tuple) else [x] if o.given("dim") in (None, 0) else []
    if any(isinstance(given, Tensor) for given in rows):
        tag.images = torch.full_like(tag.images, UNKNOWN)
    return tag


def sum_(o: Operation) -> Tag:
    """Passes on the belief of the main branch, which is the deeper one."""
    ledger = o.ledger
    tensors = [x for x in o.tensors if not (o.name == "where" and x is o.args[0])] or o.tensors
    deepest = max(tensors, key=lambda x: ledger.depth_of(o.tag(x)))
    return ledger.renumbered(fit_shape(o.tag(deepest).channels, o.shape), _images(o))


def product(o: Operation) -> Tag:
    """Passes on the belief about the factor that is not a gate, otherwise about the shallower factor."""
    ledger = o.ledger
    tags = [o.tag(x) for x in o.tensors]
    kept = min([t for t in tags if not ledger.is_gate(t)] or tags, key=ledger.depth_of)
    gate = all(map(ledger.is_gate, tags))
    return ledger.renumbered(fit_shape(kept.channels, o.shape), _images(o), gate=gate)


def gate(o: Operation) -> Tag:
    """Makes a gate."""
    return o.ledger.renumbered(fit_shape(o.first.channels, o.shape), _images(o), gate=True)


def pass_on(o: Operation) -> Tag:
    """Keeps channels, except along a dimension whose size changes or that is sorted: there images mix, too."""
    tag, sizes = o.first, o.tensors[0].shape
    if len(sizes) != len(o.shape):
        return o.ledger.vague(o.result)
    changed = [dim for dim, size in enumerate(sizes) if o.shape[dim] != size]
    changed += [] if o.given("dim") is None else [o.given("dim")]
    channels = tag.channels
    if any(channels.shape[dim] > 1 for dim in changed):
        channels = torch.full_like(channels, NOTHING)
    return o.ledger.renumbered(fit_shape(channels, o.shape), fit_shape(without(tag.images, changed), o.shape))


def pad(o: Operation) -> Tag:
    """Padding: added channels are unknown; added positions belong to their channel."""
    tag, amounts = o.first, list(o.given("pad"))
    for place in range(0, len(amounts), 2):
        dim = -1 - place // 2
        if tag.channels.shape[dim] == 1 and o.shape[dim] > sum(amounts[place : place + 2]):
            amounts[place : place + 2] = [0, 0]
    channels = torch.constant_pad_nd(tag.channels, amounts, NOTHING)
    return o.ledger.renumbered(fit_shape(channels, o.shape), fit_shape(tag.images, o.shape))


def fold_patches(o: Operation) -> Tag:
    """Adds overlapping patches. The positions of a patch are next to each other in the input, channel by channel."""
    x, positions = o.tensors[0], prod(o.given("kernel_size"))

    def patches(numbers: Tensor) -> Tensor:
        return numbers.expand(*numbers.shape[:-2], x.shape[-2], -1).unflatten(-2, (-1, positions))

    channels = patches(o.first.channels).amax((-2, -1), keepdim=True)  # the padding of patches is NOTHING, the smallest
    return o.ledger.renumbered(channels, without(patches(o.first.images), [-2, -1]))


def reduce(o: Operation) -> Tag | None:
    """Removes dimensions. Stacked branches count as a sum. All channels in one value, or images, are mixed."""
    if o.given("other") is not None:  # max(x, y), an elementwise operation
        return sum_(o)
    x, dims = o.tensors[0], o.given("dim")
    if dims is None or dims == []:
        return None
    dims = [dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)]
    tag = o.ledger.renumbered(o.first.channels, o.first.images)
    channels, images = tag.channels.amin(dims, keepdim=True), without(tag.images, dims)
    if channels.numel() == 1 < tag.channels.numel():
        channels = torch.full_like(channels, NOTHING)
    if not o.given("keepdim"):
        channels, images = channels.squeeze(dims), images.squeeze(dims)
    return Tag(channels, images)


def convolve(o: Operation) -> Tag | None:
    """Mixes the channels of each group."""
    x, weight = o.args[:2]
    o.ledger.generated |= id(weight) in o.tags
    return o.ledger.mixed(x, o.tag(x), 1, o.shape, o.given("groups", 1)) if id(x) in o.tags else None


def linear(o: Operation) -> Tag | None:
    x = o.args[0]
    return o.ledger.mixed(x, o.tag(x), x.ndim - 1, o.shape) if id(x) in o.tags else None


def contract(o: Operation) -> Tag:
    """A matrix product. With a parameter, it mixes channels. With two features, one weighs the other (attention)."""
    ledger = o.ledger
    left, right = o.args[-2:] if len(o.args) < 4 else o.args[1:3]  # a sum may come first
    if id(left) not in o.tags and id(right) not in o.tags:
        return pass_on(o)
    if id(right) not in o.tags:
        return ledger.mixed(left, o.tag(left), left.ndim - 1, o.shape)
    if id(left) not in o.tags:
        return ledger.mixed(right, o.tag(right), right.ndim - 2, o.shape)
    factors = [o.tag(left), o.tag(right)]
    kept = min([t for t in factors if not ledger.is_gate(t)] or factors, key=ledger.depth_of)
    images = [without(factors[0].images, [-1]), without(factors[1].images, [-2])]
    return ledger.renumbered(fit_shape(kept.channels, o.shape), together(images, o.shape))


def put(o: Operation) -> Tag:
    """Copies features into another tensor. Its other channels are unknown if it had no tag."""
    x = o.args[0]
    if id(x) in o.tags:
        return o.tag(x)
    # x may be part of a larger tensor.
    o.ledger.written[memory_of(x)] = x.untyped_storage()
    whole = [o.tag(tensor) for tensor in o.tensors if tensor.shape == x.shape]
    return whole[0] if whole else o.ledger.vague(o.result)


def forget(o: Operation) -> None:
    """Creates or queries a tensor without features."""


def guess(o: Operation) -> Any:
    """Passes on the belief about its first tensor, if the number of channels stays."""
    ledger, x = o.ledger, o.tensors[0]
    name, kind = ledger.modules[-1]
    place = f"{name} (a {kind})" if name else "the network itself"
    note = f"{o.name} in {place}: assumed to pass on the belief about its first tensor"

    def guessed(result: Any) -> Tag | None:
        if not isinstance(result, Tensor) or result.ndim != x.ndim or x.ndim < 2 or result.shape[1] != x.shape[1]:
            return ledger.vague(result) if isinstance(result, Tensor) else None
        images = o.first.images if result.shape[0] == x.shape[0] else torch.full((1,) * x.ndim, UNKNOWN)
        shape = result.shape
        return ledger.renumbered(fit_shape(o.first.channels, shape), fit_shape(images, shape), guess=(note,))

    return [guessed(result) for result in o.result] if isinstance(o.result, tuple | list) else guessed(o.result)


def _images(o: Operation) -> Tensor:
    return together([o.tag(x).images for x in o.tensors], o.shape)


TABLE: tuple[tuple[Callable[[Operation], Any], str], ...] = (
    (move_with_features, """alias as_strided cat channel_shuffle clone detach diagonal expand flip im2col lift_fresh
        native_channel_shuffle permute pixel_shuffle pixel_unshuffle repeat repeat_interleave reshape_alias roll
        select slice split split_with_sizes squeeze stack t transpose unbind unfold unsafe_split unsafe_view unsqueeze
        view"""),
    (select, "index index_select gather masked_select"),
    (put, "copy index_put scatter scatter_add index_add masked_scatter slice_scatter select_scatter"),
    (sum_, "add sub rsub maximum minimum addcmul addcdiv lerp where"),
    (product, "mul div"),
    (gate, """sigmoid hardsigmoid softmax safe_softmax log_softmax tanh gt ge lt le eq ne logical_and logical_or
        logical_not bitwise_and bitwise_or bitwise_not isfinite isnan sign"""),
    (reduce, """mean sum amax amin max min std var norm linalg_vector_norm prod logsumexp nansum median nanmedian
        var_mean std_mean argmax argmin all any aminmax"""),
    (convolve, "convolution mkldnn_convolution deform_conv2d"),
    (linear, "linear"),
    (contract, "mm bmm addmm baddbmm"),
    (pad, "constant_pad_nd"),
    (fold_patches, "col2im"),
    (pass_on, """relu leaky_relu prelu_kernel elu celu gelu silu hardswish hardtanh mish softplus softshrink hardshrink
        threshold rrelu_with_noise log_sigmoid_forward native_dropout abs ceil clamp clamp_min clamp_max cos erf exp
        expm1 fill floor floor_divide log log1p logit masked_fill nan_to_num neg pow reciprocal remainder round rsqrt
        sin sqrt square to_copy tril triu trunc zero sort topk grid_sampler_2d native_layer_norm native_group_norm
        fused_rms_norm native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training cudnn_batch_norm
        batch_norm_with_update"""),
    (forget, "bernoulli uniform normal local_scalar_dense is_same_size equal"),
)  # fmt: skip
HANDLERS = {name: handler for handler, names in TABLE for name in names.split()}
FAMILIES: tuple[tuple[Callable[[Operation], Any], str], ...] = (
    (pass_on, "avg_pool max_pool adaptive_ upsample_ reflection_pad replication_pad fractional_max"),
    (forget, "new_"),
)
"""Handlers by the beginnings of names, for operations whose names end in dimensions or variants."""


def handler_of(name: str) -> Callable[[Operation], Any]:
    if name in HANDLERS:
        return HANDLERS[name]
    if name.endswith("_like"):
        return forget
    return next((handler for handler, names in FAMILIES if name.startswith(tuple(names.split()))), guess)
