"""Which norms' beliefs each norm of a network receives, for which channels, and over which path.

Every channel of every tensor gets a number, and the traced graph is run on these numbers instead of features: two
images, two positions a side, each value the number of its channel. Concatenations, splits and shuffles then move the
numbers as they would move the features, whatever way they are written; all else is told apart by the few rules of
`rules.py`. For each number we know where a belief about its channel is to be had.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from bkn_zoo.conversion.numbered import (
    IMAGES,
    broadcast,
    channel_dim,
    distinct,
    equation_of,
    in_turn,
    kept_images,
    merges_rows,
    reduced_dims,
    summed,
    tensors_in,
    varies,
)
from bkn_zoo.conversion.origins import Mix, Mixed, Origin, Piece, Single, pieces_of, sources_of, through
from bkn_zoo.conversion.rules import (
    GATES,
    MOVES,
    PASSES,
    PASSING_LAYERS,
    POOLS_TO_SIZE,
    PRODUCTS,
    REDUCTIONS,
    SORTS,
    SUMS,
    TWOFOLD,
)
from bkn_zoo.conversion.trace import LayerTracer, is_batchnorm

SIDE, FRAMES = 2, 8
MOST_NUMBERS = 2**22
"""Of one tensor, far more than features of two images with two positions a side have."""

ATTENDING = ("query", "key", "value")
"""What PyTorch calls the tensors of an attention, in their order."""


class Other:
    """A value that holds no channels: a parameter, a random mask, a scalar."""


OTHER = Other()

UNKNOWN = "called on something whose channels are not known"
"""Why a norm is left that gets such a value."""

INTERLEAVED = "the rows of its input are not one image after another"


class Twofold(NamedTuple):
    """What `x.max(2)` and the like return: two tensors of the same channels, the second one mostly of indices."""

    values: Tensor
    indices: Tensor


class LostError(Exception):
    """A network that was tried with frames in its input does not take them."""


@dataclass
class NormCall:
    """A call of a norm that is to become BKN.

    Attributes:
        name: the module's.
        features: its channels.
        node: the call in the graph.
        pieces: of its transition; none for a first layer.
        rows: whether an image may have several rows in the norm's input (tokens, flattened into the batch).
        ordered: whether rows, if there are several, are known to be one image after another.
        depth: norms below it on its path, and itself.
        why: where `pieces` is empty although there are norms below, the reason.
    """

    name: str
    features: int
    node: fx.Node
    pieces: list[Piece]
    rows: bool
    ordered: bool
    depth: float
    why: str = ""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(piece.shape for piece in self.pieces)


@dataclass
class Plan:
    """For one graph: the calls of norms in their order, those left as they are, and what was guessed."""

    calls: list[NormCall] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)


def make_plan(model: nn.Module, graph: fx.Graph, left: dict[str, str]) -> Plan:
    """Plan the norms of a traced model, but for those in `left` (name: reason), which pass beliefs on.

    A norm that is called several times has one transition: where the calls would need different ones it gets none.
    """
    planner = _run(model, graph, left)
    if planner.failed:  # an input of another rank, perhaps: video, or sequences
        with suppress(LostError):
            planner = _run(model, graph, left, frames=True)
    if planner.unfit.keys() - left.keys():
        return make_plan(model, graph, left | planner.unfit)
    calls = planner.plan.calls
    del planner.plan.guesses[planner.relevant :]
    for name in {call.name for call in calls}:
        same = [call for call in calls if call.name == name]
        if len({call.shapes for call in same}) > 1:
            for call in same:
                call.pieces, call.why = [], "its calls would need transitions of different shapes"
    return planner.plan


def _run(model: nn.Module, graph: fx.Graph, left: dict[str, str], frames: bool = False) -> "_Planner":
    planner = _Planner(model, left, frames)
    inputs = {node: planner.number(_input_shape(model)) for node in graph.find_nodes(op="placeholder")}
    if frames:
        inputs = {node: x.unsqueeze(1).repeat_interleave(FRAMES, 1) for node, x in inputs.items()}
    planner.inputs.update(inputs)
    planner.run(graph, model, inputs)
    return planner


def _input_shape(model: nn.Module) -> tuple[int, ...]:
    for module in model.modules():
        if isinstance(module, _ConvNd):
            return (IMAGES, module.in_channels, *[SIDE] * len(module.kernel_size))
        if isinstance(module, nn.Linear):
            return (IMAGES, module.in_features)
    return (IMAGES, 3, SIDE, SIDE)


class _Planner:
    """Runs a graph on numbered channels.

    Args:
        frames: whether the inputs have one more dimension, after that of the images; a `LostError` is raised where a
            layer takes no such input, or images cannot be told apart any more.
    """

    def __init__(self, model: nn.Module, left: dict[str, str], frames: bool) -> None:
        self.plan = Plan(left=left)
        self.frames = frames
        self.failed = False  # something could not be done to the numbers, or a layer got another rank than it takes
        self.lost = False  # and it may have moved images
        self.unsure = False  # something was called that is not known; most likely it left images where they were
        self.merged = False  # rows were flattened into the batch, of which these inputs have one each
        self.origins: list[Origin] = []
        self.gates: set[int] = set()
        self.relevant = 0  # guesses that some norm comes after
        self.inputs: set[fx.Node] = set()
        self.unfit: dict[str, str] = {}  # norms that have to be left, and why
        self.names = {module: name for name, module in model.named_modules()}
        self.inside = ""  # what kind of module is looked into

    # Numbers

    def number(self, shape: tuple[int, ...], origins: Sequence[Origin] | None = None) -> Tensor:
        """New numbers for features of this shape, a channel for each entry of dimension 1."""
        like = torch.arange(shape[0], device="cpu").view(-1, *[1] * (len(shape) - 1)).expand(shape)
        return self.replace(like, 1, [None] * shape[1] if origins is None else origins)

    def replace(self, like: Tensor, dim: int, origins: Sequence[Origin]) -> Tensor:
        """Features laid out as `like`, with new channels along `dim`."""
        images = like.select(dim, 0).unsqueeze(dim) % IMAGES
        if images.numel() * len(origins) > MOST_NUMBERS:
            raise ValueError("a shape that was guessed, and wrong, grows with every layer")
        numbers = torch.arange(len(self.origins), len(self.origins) + len(origins), device="cpu")
        self.origins.extend(origins)
        shape = [1] * like.ndim
        shape[dim] = len(origins)
        return numbers.view(shape) * IMAGES + images

    def renumber(self, x: Tensor, gate: bool = False) -> Tensor:
        """The same channels after an operation: a norm that sees them from here on has not seen those before it."""
        old, places = distinct(x // IMAGES)
        first = len(self.origins)
        self.origins.extend([self.origins[n] for n in old.tolist()])
        if gate or (old.numel() and int(old[0]) in self.gates):
            self.gates.update(range(first, len(self.origins)))
        return (places + first) * IMAGES + x % IMAGES

    def channels(self, x: Tensor, dim: int) -> list[int]:
        """The numbers along a dimension; all numbers if that dimension is not one of channels."""
        numbers = (x // IMAGES).movedim(dim, 0).flatten(1)
        if numbers.numel() and bool((numbers == numbers[:, :1]).all()):
            return numbers[:, 0].tolist()
        return distinct(numbers)[0].tolist()

    def depth(self, origin: Origin) -> float:
        if origin is None:
            return 0
        if isinstance(origin, Single):
            return self.plan.calls[origin.call].depth
        return origin.mix.depth

    def depth_of(self, x: Tensor) -> float:
        return max((self.depth(self.origins[n]) for n in distinct(x // IMAGES)[0].tolist()), default=0)

    def is_gate(self, x: Tensor) -> bool:
        return x.numel() > 0 and int(x.flatten()[0]) // IMAGES in self.gates

    # The graph

    def run(self, graph: fx.Graph, root: nn.Module, values: dict[fx.Node, Any]) -> Any:
        def load(arguments: Any) -> Any:
            return fx.node.map_arg(arguments, values.__getitem__)

        for node in graph.nodes:
            if node.op == "output":
                return load(node.args[0])
            if node.op == "get_attr":
                values[node] = OTHER
            elif node.op != "placeholder":
                module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
                values[node] = self.follow(node, module, load(node.args), load(node.kwargs))
        raise AssertionError("a graph ends with its output")

    def follow(self, node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> Any:
        """What a node makes of its arguments."""
        try:
            return self.operation(node, args, kwargs) if module is None else self.module(node, module, args, kwargs)
        except LostError:
            raise
        except Exception:  # sizes that only real features have, or a mask
            if module is not None and is_batchnorm(module):
                self.unfit[self.names.get(module, str(node.target))] = UNKNOWN
            tensors = tensors_in(args, kwargs)
            kept = kept_images(_name(node), args)
            self.fail(lost=bool(tensors) and kept is None)
            guess = self.guess(node, tensors if kept is None else [kept])
            return guess if module is None else _taken_apart(node, guess)

    def fail(self, lost: bool) -> None:
        if self.frames and lost:
            raise LostError
        self.failed, self.lost = True, self.lost or lost

    def operation(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A function or a method, such as `torch.cat` or `.view`."""
        name = _name(node)
        tensors = tensors_in(args, kwargs)
        if not tensors and any(leaf is OTHER for leaf in tree_leaves((args, kwargs))):
            return OTHER
        if name == "getitem" and node.args[0] in self.inputs and isinstance(args[1], int | str):
            self.inputs.add(node)  # of a list or a dict of batches, all of which have the shape that one would have
            return args[0]
        if name == "getitem" and tensors_in(args[1:], kwargs):
            raise TypeError("which rows a mask takes is known when the network runs")
        if not tensors or name in MOVES:
            result = _call(node, args, kwargs)
            if tensors and callable(result):  # `.values`, say, of what was taken for a tensor
                return self.guess(node, tensors)
            self.merged |= bool(tensors) and merges_rows(name, tensors[0], args, kwargs, result)
            return OTHER if not tensors and isinstance(result, Tensor) else result
        x = tensors[0]
        if name in SUMS or (name in ("max", "min") and len(tensors) > 1):
            return self.renumber(broadcast(max(tensors, key=self.depth_of), tensors))
        if name in PRODUCTS:
            kept = min([t for t in tensors if not self.is_gate(t)] or tensors, key=self.depth_of)
            equation = equation_of(name, args, tensors)
            product = summed(kept, equation, tensors) if equation else broadcast(kept, tensors)
            return self.renumber(product, gate=all(map(self.is_gate, tensors)))
        if name == "scaled_dot_product_attention":
            return self.attend(dict(zip(ATTENDING, args, strict=False)) | kwargs)
        if name in GATES:
            return self.renumber(x, gate=True)
        if name in POOLS_TO_SIZE:
            return self.pool(x, kwargs.get("output_size", args[1] if len(args) > 1 else 1))
        if name in SORTS:
            return Twofold(*[self.renumber(x)] * 2)
        if name in REDUCTIONS or name in TWOFOLD:
            dims, keepdim = reduced_dims(name, args, kwargs)
            if dims is None:
                return OTHER
            reduced = self.renumber(x).amin(dims, keepdim=keepdim)
            return Twofold(reduced, reduced) if name in TWOFOLD else reduced
        if name in ("conv1d", "conv2d", "conv3d"):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            return self.renumber(x) if groups == x.shape[1] else self.mix(x, 1, x.shape[1], 1, str(node))
        if name == "linear":
            return self.mix(x, -1, x.shape[-1], 1, str(node))
        if name.startswith("new_") or name in ("rand_like", "zeros_like", "ones_like", "empty_like"):
            return OTHER
        if name in PASSES:
            return self.renumber(x)
        self.unsure = True
        return self.guess(node, tensors)

    def guess(self, node: fx.Node, tensors: list[Tensor]) -> Any:
        if not tensors:
            return OTHER
        stack = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
        place = " of ".join(filter(None, (*stack[-1:], self.inside)))
        self.note(f"{node.name} in {place or 'the network itself'}")
        return self.renumber(tensors[0])

    def note(self, what: str) -> None:
        self.plan.guesses.append(f"{what}: taken to pass on the belief about its first tensor")

    def module(self, node: fx.Node, module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.names.get(module, str(node.target))
        tensors = tensors_in(args, kwargs)
        if not tensors:
            if is_batchnorm(module) and name not in self.plan.left:
                self.unfit[name] = UNKNOWN
            return OTHER
        x = tensors[0]
        if is_batchnorm(module):
            return self.renumber(x) if name in self.plan.left else self.norm(node, name, module, x)
        if isinstance(module, _ConvNd):
            if x.ndim != len(module.kernel_size) + 2:
                self.fail(lost=self.frames)
            return self.mix(x, 1, module.out_channels, module.groups, name)
        if isinstance(module, nn.Linear):
            return self.mix(x, -1, module.out_features, 1, name)
        if isinstance(module, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d):
            return self.pool(x, module.output_size)
        if isinstance(module, nn.MultiheadAttention):
            return self.attend_by_heads(module, dict(zip(ATTENDING, args, strict=False)) | kwargs, name), OTHER
        if isinstance(module, nn.RNNBase):
            return self.recur(module, x, name)
        if isinstance(module, nn.Identity):
            return x
        if isinstance(module, nn.Sigmoid | nn.Hardsigmoid | nn.Softmax | nn.Softmax2d | nn.Tanh):
            return self.renumber(x, gate=True)
        if isinstance(module, nn.Flatten):
            self.merged |= merges_rows("flatten", x, (x, module.start_dim), {}, module(x))
        if isinstance(module, nn.Flatten | nn.Unflatten | nn.ChannelShuffle | nn.PixelShuffle | nn.PixelUnshuffle):
            return module(x)
        if type(module).__module__ in PASSING_LAYERS:
            return self.renumber(x)
        return self.look_inside(node, name, module, args, kwargs)

    def look_inside(self, node: fx.Node, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module that is one node of the graph: by its own graph, if it has one."""
        guesses, outside = len(self.plan.guesses), self.inside
        try:
            if type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential):
                raise TypeError(f"{type(module).__name__} has no graph to look at")
            whole = nn.Sequential(module) if "forward" in vars(module) else module  # fx would look at the class only
            graph = LayerTracer((args, kwargs), (Tensor, Other)).trace(whole)
            self.inside = f"a {type(module).__name__}"  # there may be many of them, which are all the same
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor | Other)]
            return self.run(graph, whole, dict(zip(graph.find_nodes(op="placeholder"), given, strict=True)))
        except LostError:
            raise
        except Exception:
            del self.plan.guesses[guesses:]
            x = tensors_in(args, kwargs)[0]
            self.note(name)
            self.unsure = True
            mixes, dim = any(parameter.ndim > 1 for parameter in module.parameters()), channel_dim(x)
            return _taken_apart(node, self.mix(x, dim, x.shape[dim], 1, name) if mixes else self.renumber(x))
        finally:
            self.inside = outside

    def attend(self, given: dict[str, Any]) -> Tensor:
        """Attention: mixtures of the value's rows in the places of the query's; an error unless they are one image's.

        Rows are the last dimension but one, and those with all dimensions before it in common attend to one another.
        """
        query, key, value = map(given.__getitem__, ATTENDING)
        row, image = value.narrow(-2, 0, 1), query[..., :1, :1] % IMAGES
        if any(bool((x % IMAGES != image).any()) for x in (query, key, value)) or bool((value != row).any()):
            raise ValueError("images attend to one another, or channels do")
        return self.renumber(row.expand(*query.shape[:-1], -1))

    def attend_by_heads(self, module: nn.MultiheadAttention, given: dict[str, Any], name: str) -> Tensor:
        if module.batch_first:
            return self.mix(self.attend(given), -1, module.embed_dim, 1, name)
        y = self.attend({key: given[key].transpose(0, 1) for key in ATTENDING})
        return self.mix(y, -1, module.embed_dim, 1, name).transpose(0, 1)

    def recur(self, module: nn.RNNBase, x: Tensor, name: str) -> Any:
        """What a recurrent layer gives: a row for each of the sequence, and its last states, (layers, images, size)."""
        along = 1 if module.batch_first else 0
        if x.ndim != 3 or varies(x % IMAGES, along):
            raise ValueError("it does not go along the positions of an image")
        directions, size = 2 if module.bidirectional else 1, module.proj_size or module.hidden_size
        y = self.mix(x, -1, directions * size, 1, name)
        state = y.select(along, 0).unflatten(-1, (directions, size)).transpose(0, 1).repeat(module.num_layers, 1, 1)
        return y, (state, state) if isinstance(module, nn.LSTM) else state

    def pool(self, x: Tensor, size: Any) -> Tensor:
        x = self.renumber(x)
        to_one = all(side == 1 for side in (size if isinstance(size, tuple | list) else [size]))
        if to_one:
            for dim in range(2, x.ndim):
                x = x.narrow(dim, 0, 1)
        return x

    def mix(self, x: Tensor, dim: int, outputs: int, groups: int, name: str) -> Tensor:
        """A convolution or a linear layer over dimension `dim`."""
        if varies(x % IMAGES, dim):
            self.fail(lost=True)
        origins = [self.origins[n] for n in self.channels(x, dim)]
        if groups == len(origins):
            times = outputs // groups
            made: list[Origin] = [through(origin, name) for origin in origins for _ in range(times)]
        else:
            sources, blocks, path = sources_of(origins)
            blocks = gcd(groups, blocks)
            if blocks == 1:
                sources = tuple({(source.call, source.channel): source for source in sources}.values())
            depth = max(map(self.depth, sources), default=0) + 0.5  # deeper than what it is made of: x + conv(x)
            mix = Mix(sources, outputs, blocks, (*path, name), depth)
            made = [Mixed(mix, index) if sources else None for index in range(outputs)]
        return self.replace(x, dim, made)

    def norm(self, node: fx.Node, name: str, module: nn.Module, x: Tensor) -> Tensor:
        numbers = self.channels(x, 1) if x.ndim > 1 else distinct(x // IMAGES)[0].tolist()
        features = int(getattr(module, "num_features"))  # noqa: B009
        origins = [self.origins[n] for n in numbers]
        pieces = pieces_of(origins, features)
        depth = 1 + max((self.depth(origin) for origin in origins), default=0)
        if x.ndim < 2 or x.shape[1] != features:
            self.fail(lost=self.frames)
        # After a guess the numbers are right, but the layout may not be: the rows are looked at when the network runs.
        guessed = bool(self.plan.guesses)
        images = (x % IMAGES).reshape(len(x), -1)
        if bool((images.diff(dim=0) < 0).any()) or not (guessed or in_turn(x)):
            self.unfit[name] = INTERLEAVED
        rows = len(x) != IMAGES or guessed or self.merged
        ordered = not self.lost and (len(x) != IMAGES or not self.unsure)
        call = len(self.plan.calls)
        self.relevant = len(self.plan.guesses)
        self.plan.calls.append(NormCall(name, features, node, pieces, rows, ordered, depth))
        seen: list[Origin] = [Single(call, channel) for channel in range(features)]
        if len(numbers) == features:
            for number, origin in zip(numbers, seen, strict=True):
                self.origins[number] = origin
        return self.replace(x, 1, seen) if x.ndim > 1 else self.number(_default_shape(features), seen)


def _taken_apart(node: fx.Node, guess: Any) -> Any:
    """What a module is guessed to give, as often as its result is taken apart: it gives several then."""
    users = list(node.users)
    places = [user.args[1] for user in users if _name(user) == "getitem" and isinstance(user.args[1], int)]
    return (guess,) * (max(map(abs, places)) + 1) if users and len(places) == len(users) else guess


def _default_shape(features: int) -> tuple[int, ...]:
    return (IMAGES, features, SIDE, SIDE)


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).strip("_")
