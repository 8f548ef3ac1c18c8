"""Carries out a plan: batch norms become Batch Kalman Norms, and the graph hands them their beliefs."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from bkn_zoo.conversion.plan import NormCall, Plan
from bkn_zoo.errors import ConversionError, InputError
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.norms.centered import Centered1d, Centered2d, Centered3d
from bkn_zoo.norms.kalman import Belief, concatenate
from bkn_zoo.norms.statistics import Statistics

AFTER_NORM = ("drop", "act")
"""What timm's norms hold beside the norm, in the order in which it is applied."""


class Gather(nn.Module):
    """The prior of a norm, gathered from the beliefs of those below it: their channels, in the order of `channels`."""

    index: Tensor | None

    def __init__(self, channels: list[int], total: int, device: torch.device) -> None:
        super().__init__()
        self.span = slice(channels[0], channels[-1] + 1)
        in_order = channels == list(range(self.span.start, self.span.stop))
        self.all = in_order and len(channels) == total
        index = None if in_order else torch.tensor(channels, device=device)
        self.register_buffer("index", index, persistent=False)

    def forward(self, *beliefs: Belief | None) -> Belief | None:
        joined = concatenate(beliefs)
        if joined is None or self.all:
            return joined
        if self.index is None:
            return Belief(joined.mean[:, self.span], joined.var[:, self.span])
        return Belief(joined.mean.index_select(1, self.index), joined.var.index_select(1, self.index))

    def extra_repr(self) -> str:
        return "all" if self.all else f"{self.span.start} to {self.span.stop}" if self.index is None else "shuffled"


def count_images(batch: Any) -> int:
    """How many there are in the first input of a network: a tensor, or a dict or list that begins with one."""
    return next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)).shape[0]


def by_image(x: Tensor, images: int) -> Tensor:
    """Rows that belong to one image, as tokens flattened into the batch do, become positions of it."""
    return x if x.shape[0] == images else x.unflatten(0, (images, -1)).movedim(1, -1)


def as_given(x: Tensor, images: int, statistics: Statistics) -> Tensor:
    """Rows of which it is not known whose they are, for statistics that need not know."""
    if x.shape[0] != images and statistics not in (("population", statistics.group), ("batch", None)):
        raise InputError(
            f"a norm gets {x.shape[0]} rows of {images} images, and the conversion could not follow which are whose: "
            "take statistics='population' and whole batches (statistics_batch_size=None), or convert a part of the "
            "network with only=NAME, to which each row is an image."
        )
    return x


def by_row(y: Tensor, x: Tensor) -> Tensor:
    """Undoes `by_image`, for a result `y` of the `x` that was given to it."""
    return y if y.shape == x.shape else y.movedim(-1, 1).flatten(0, 1)


def kalman_norm(norm: _BatchNorm, call: NormCall) -> BatchKalmanNorm:
    """BKN in place of a batch norm: nearly the same in training, the same at inference."""
    kind: type[BatchKalmanNorm] = Centered2d
    if isinstance(norm, nn.BatchNorm1d):
        kind = Centered1d
    elif isinstance(norm, nn.BatchNorm3d):
        kind = Centered3d
    assert norm.running_mean is not None
    like = norm.running_mean if norm.weight is None else norm.weight
    below = sum(len(piece.sources) for piece in call.pieces) or None
    layer = kind(
        norm.num_features, below, norm.eps, norm.momentum, norm.affine, bias=norm.bias is not None,
        transition_shapes=call.shapes or None, device=like.device, dtype=like.dtype,
    )  # fmt: skip
    if call.rows or isinstance(norm, nn.SyncBatchNorm):
        layer.dims = (2, 3, 4, 5)
    layer.load_state_dict({k: v for k, v in norm.state_dict().items() if "." not in k}, strict=False)
    layer.weight, layer.bias = norm.weight, norm.bias  # the very same, which may be shared or take no gradient
    for name, child in norm.named_children():
        layer.add_module(name, child)
    layer.train(norm.training)
    return layer


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module, of which one that is shared has several; the first is what a plan calls it."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace_norms(model: nn.Module, plan: Plan) -> None:
    """Put BKN in the place of every batch norm that the plan calls, under all of its names."""
    names = names_of(model)
    for name in dict.fromkeys(call.name for call in plan.calls):
        norm = model.get_submodule(name)
        if isinstance(norm, _BatchNorm):
            calls = [call for call in plan.calls if call.name == name]
            layer = kalman_norm(norm, calls[0])
            layer.priors = nn.ModuleList(_gather(plan, call, norm) for call in calls)
            for place in names[norm]:
                model.set_submodule(place, layer)


def _below(call: NormCall) -> list[int]:
    """The calls whose beliefs it receives."""
    return list(dict.fromkeys(source for piece in call.pieces for source, _ in piece.sources))


def _gather(plan: Plan, call: NormCall, norm: _BatchNorm) -> nn.Module:
    if not call.pieces:
        return nn.Identity()
    starts, total = {}, 0
    for below in _below(call):
        starts[below] = total
        total += plan.calls[below].features
    channels = [starts[below] + channel for piece in call.pieces for below, channel in piece.sources]
    assert norm.running_mean is not None
    return Gather(channels, total, norm.running_mean.device)


def foldable(model: nn.Module, graph: fx.Graph, plan: Plan) -> dict[str, str]:
    """The norms that one convolution could take in, since nothing else gets what it gives; with its name.

    What is done to a convolution may change later: whether it can take them in then is for who asks it to.
    """
    called = [model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
    found = {}
    for call in plan.calls:
        before = call.node.all_input_nodes[0]
        if before.op != "call_module" or len(before.users) > 1 or call.rows:
            continue
        conv = model.get_submodule(str(before.target))
        known = isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if known and all(called.count(module) == 1 for module in (conv, model.get_submodule(call.name))):
            found[call.name] = str(before.target)
    return found


class Forward:
    """The forward function of a network whose norms were replaced: of it, the statistics of the call, and the inputs.

    It is generated code: copies of the network share it, and a pickle cannot hold it.
    """

    def __init__(self, function: Callable[..., Any], inputs: list[str]) -> None:
        self.function, self.inputs = function, inputs

    def __call__(self, model: nn.Module, statistics: Statistics, /, *inputs: Any, **named: Any) -> Any:
        others = [name for name in named if name not in self.inputs]
        if others or len(inputs) > len(self.inputs):
            known, given = " and ".join(self.inputs), ", ".join(others) or len(inputs)
            raise InputError(
                f"this converted network takes {known}, but got {given}: what has a default in the original keeps it, "
                "and *args and **kwargs are empty, so give it the default or the name that you need there, and convert "
                "that."
            )
        return self.function(model, statistics, *inputs, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        return self

    def __reduce__(self) -> str:
        raise ConversionError(
            "a converted network cannot be pickled, since its forward is generated: save its state_dict(), and load "
            "that into a new conversion of the original."
        )


def rewrite(model: nn.Module, graph: fx.Graph, plan: Plan) -> Forward:
    """What runs a model whose norms were replaced."""
    first = next(iter(graph.nodes))
    inputs = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if "statistics" in inputs:
        raise ConversionError(
            "the network has an input called statistics, which is what a converted one calls its own: rename it."
        )
    with graph.inserting_before(first):
        statistics = graph.placeholder("statistics")
    beliefs: list[fx.Node] = []
    counts: dict[str, int] = {}
    for call in plan.calls:
        node, name = call.node, call.name
        number = counts[name] = counts.get(name, -1) + 1
        with graph.inserting_before(node):
            x = node.args[0] if node.args else next(iter(node.kwargs.values()))
            prior = None
            if call.pieces:
                prior = graph.call_module(f"{name}.priors.{number}", tuple(beliefs[below] for below in _below(call)))
            if call.rows:
                images = graph.call_function(count_images, (first,))
            if call.rows and not call.ordered:
                x = graph.call_function(as_given, (x, images, statistics))
            if call.rows and call.ordered:
                result = graph.call_module(name, (graph.call_function(by_image, (x, images)), prior, statistics))
                y = graph.call_function(by_row, (graph.call_function(operator.getitem, (result, 0)), x))
            else:
                result = graph.call_module(name, (x, prior, statistics))
                y = graph.call_function(operator.getitem, (result, 0))
            beliefs.append(graph.call_function(operator.getitem, (result, 1)))
            for child in AFTER_NORM:
                if hasattr(model.get_submodule(name), child):
                    y = graph.call_module(f"{name}.{child}", (y,))
        node.replace_all_uses_with(y)
        graph.erase_node(node)
    for belief in beliefs:
        if not belief.users:
            graph.erase_node(belief)
    graph.lint()
    return Forward(type(fx.GraphModule(model, graph)).forward, inputs)
