"""Plans which beliefs each norm of a network receives, for which channels, and over which path.

The planner runs the network once on an example. It gives every channel of every tensor a number, applies each operation
to the numbers as to the features (see `operations`), and stores the origin of the belief for each number (see
`ledger`). The numbers that reach a norm then show which norms are below it.
"""

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.conversion.ledger import ANY, MIXED, NOTHING, Ledger, Piece, Single, Tag, pieces_of, tensors_in, without
from bkn_zoo.conversion.operations import NeedsValuesError, Operation, basic_name, guess, handler_of
from bkn_zoo.conversion.record import lists_of_images
from bkn_zoo.torch_internals import (
    TorchDispatchMode,
    memory_of,
    tree_leaves,
    without_dispatch_modes,
    without_torch_function,
)

NOT_FOLLOWED = "its input has unknown channels"
INTERLEAVED = "the rows of its input are not grouped by image"
GENERATED = "its input depends on convolutions whose weights are generated per call"
NEVER_CALLED = "never called"
UNFIT = (NEVER_CALLED, NOT_FOLLOWED, INTERLEAVED, GENERATED)
"""Why the planner leaves a norm unchanged."""


@dataclass
class NormCall:
    """A call of a norm that will be converted, with the pieces of its transition; none for a first layer."""

    name: str
    number: int  # among the calls of this norm
    features: int
    pieces: list[Piece]
    ordered: bool  # whether rows are known to be grouped by image, if an image has several
    single: bool  # whether each row is an image
    why: str = ""  # the reason if `pieces` is empty although there are norms below

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(piece.shape for piece in self.pieces)


@dataclass
class ConversionPlan:
    """The calls of norms, norms that cannot be converted and why, guesses, and convolutions to fold norms into."""

    calls: list[NormCall] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)
    foldable: dict[str, str] = field(default_factory=dict)


def plan_conversion(model: nn.Module, norms: dict[str, nn.Module], inputs: Any, images: int) -> ConversionPlan:
    """Run a model on inputs with this number of images, to convert these norms. The model is changed."""
    args, kwargs = inputs
    planner = Planner(model, norms, images)
    with untracked():
        planner.tag_inputs((args, kwargs))
    with torch.no_grad(), planner:
        output = model(*args, **kwargs)
    planner.find_foldable(output)
    return planner.plan


@contextmanager
def untracked() -> Iterator[None]:
    """Disable the planner for its own computations."""
    with without_torch_function(), without_dispatch_modes():
        yield


class Planner(TorchDispatchMode):
    """Observes every operation of a network, and stores the tags of tensors."""

    def __init__(self, model: nn.Module, norms: dict[str, nn.Module], images: int) -> None:
        super().__init__()
        self.plan, self.ledger = ConversionPlan(), Ledger(images)
        # A tensor with a tag for each memory.
        self.owners: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        # The outputs of convolutions and the inputs of norms, by their tags.
        self.convolved: list[tuple[str, Tag]] = []
        self.normed: list[tuple[str, Tag]] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # has no hooks
                continue
            module.register_forward_pre_hook(functools.partial(self.enter, name))
            module.register_forward_hook(functools.partial(self.leave, name), always_call=True)
            if isinstance(module, nn.RNNBase):
                vars(module)["forward"] = functools.partial(self.recur, module, module.forward)
        for name, norm in norms.items():
            vars(norm)["forward"] = functools.partial(self.norm, name, norm.eval(), norm.forward)

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.ledger.modules.append((name, type(module).__name__))

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.ledger.modules.pop()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and isinstance(output, Tensor):
            with untracked():
                tag = self.tag_of(output)
            if tag is not None:
                tag.convolution = name
                self.convolved.append((name, tag))

    def tag_inputs(self, inputs: Any) -> None:
        """Give numbers to the channels of the example, with the images along the first dimension, or in a list."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.ndim > 0:
                tag = self.ledger.vague(leaf)
                if leaf.is_floating_point() and leaf.ndim > 1:
                    tag.channels = self.ledger.numbered(leaf.ndim, 1, [None] * leaf.shape[1])
                self.set_tag(leaf, tag)
        for images in lists_of_images(inputs):
            for number, image in enumerate(images):
                channels = self.ledger.numbered(3, 0, [None] * image.shape[0])
                self.set_tag(image, Tag(channels, torch.full((1, 1, 1), number)))

    def set_tag(self, x: Any, tag: Tag | None) -> None:
        if isinstance(x, Tensor) and tag is not None:
            vars(x)["_bkn_tag"] = tag
            self.owners[memory_of(x)] = x

    def tag_of(self, x: Tensor) -> Tag | None:
        """The tag of a tensor, or of a tensor that shares its memory."""
        tag = vars(x).get("_bkn_tag")
        if tag is None and not isinstance(x, nn.Parameter):
            memory = memory_of(x)
            owner = self.owners.get(memory)
            if owner is not None and owner.shape == x.shape and owner.stride() == x.stride():
                tag = vars(owner)["_bkn_tag"]
            elif owner is not None or memory in self.ledger.written:
                tag = self.ledger.vague(x)
            self.set_tag(x, tag)
        return tag

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if handler_of(basic_name(function)) is guess:
            with self:
                result = function.decompose(*args, **kwargs)  # into simpler operations, which are handled one by one
            if result is not NotImplemented:
                return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tags = {id(tensor): tag for tensor in tensors if (tag := self.tag_of(tensor)) is not None}
        for tag in tags.values():
            tag.uses += 1
        result = function(*args, **kwargs)
        if tags:
            tagged = [tensor for tensor in tensors if id(tensor) in tags]
            operation = Operation(self.ledger, function, args, kwargs, result, tags, tagged)
            with untracked():
                try:
                    made = handler_of(operation.name)(operation)
                except NeedsValuesError:
                    raise
                except Exception:  # a way to call it that its handler does not support
                    made = guess(operation)
                self.set_tags(result, made)
        return result

    def set_tags(self, result: Any, made: Any) -> None:
        """Set the tags of results. A single tag applies to all results with the shape of the first."""
        if isinstance(result, Tensor):
            self.set_tag(result, made)
        elif isinstance(result, tuple | list):
            if isinstance(made, Tag):
                shape = result[0].shape
                made = [made if isinstance(x, Tensor) and x.shape == shape else None for x in result]
            for x, tag in zip(result, made or [None] * len(result), strict=True):
                self.set_tag(x, tag)

    def norm(self, name: str, norm: Any, forward: Any, input: Tensor) -> Tensor:
        """A norm that will be converted: its plan follows from its input."""
        with untracked():
            result = forward(input)
            tag = self.tag_of(input)
            if tag is None:
                self.plan.unfit[name] = NOT_FOLLOWED
            else:
                self.set_tag(result, self.plan_norm(name, norm.num_features, input, tag))
        return result

    def plan_norm(self, name: str, features: int, x: Tensor, tag: Tag) -> Tag:
        numbers = self.ledger.along(x, tag, 1)
        origins = [self.ledger.origins[number] for number in numbers]
        pieces = pieces_of(origins, features)
        depth = 1 + max((self.ledger.depth(origin) for origin in origins), default=0)
        self.plan.guesses += [guess for guess in self.ledger.guesses_behind(numbers) if guess not in self.plan.guesses]
        ordered = self.look_at_rows(name, tag, x.shape[0])
        self.normed.append((name, tag))
        calls, single = self.plan.calls, ordered and x.shape[0] == self.ledger.images
        seen = [Single(len(calls), channel) for channel in range(features)]
        calls.append(NormCall(name, sum(c.name == name for c in calls), features, pieces, ordered, single))
        self.ledger.depths.append(depth)
        if len(numbers) == features:
            for number, origin in zip(numbers, seen, strict=True):
                if number != NOTHING:
                    self.ledger.origins[number] = origin
        images = without(tag.images, range(1, x.ndim))
        return Tag(self.ledger.numbered(x.ndim, 1, seen), images)

    def look_at_rows(self, name: str, tag: Tag, rows: int) -> bool:
        """Whether rows are grouped by image, with the same number for each; otherwise the norm cannot be converted."""
        images = without(tag.images, range(1, tag.images.ndim)).flatten().expand(rows)
        if bool((images == MIXED).any()) or bool((images.diff() < 0).any() and not (images < ANY).any()):
            self.plan.unfit[name] = GENERATED if self.ledger.generated else INTERLEAVED
        if not self.ledger.images or rows % self.ledger.images:
            return False
        return torch.equal(images, torch.arange(self.ledger.images).repeat_interleave(rows // self.ledger.images))

    def recur(self, module: nn.RNNBase, forward: Any, input: Any, hx: Any = None) -> Any:
        """A recurrent layer: it mixes channels along the positions of an image, or mixes images."""
        with untracked():
            output, state = forward(input, hx)
            # A packed sequence mixes the images of a batch: its channels are not followed.
            tag = self.tag_of(input) if isinstance(input, Tensor) else None
            if tag is not None:
                along = 1 if module.batch_first else 0
                mixed = Tag(tag.channels, without(tag.images, [along]))
                made = self.ledger.mixed(input, mixed, input.ndim - 1, output.shape)
                self.set_tag(output, made)
                for x in state if isinstance(state, tuple) else [state]:
                    channels = made.channels.select(along, 0)[None].narrow(-1, 0, x.shape[-1])
                    self.set_tag(x, Tag(channels, made.images.select(along, 0)[None]))
        return output, state

    def find_foldable(self, output: Any) -> None:
        """The norms that can be folded into a convolution, because nothing else uses its output."""
        returned = {id(vars(x).get("_bkn_tag")) for x in tensors_in(output)}
        convs, norms = [name for name, _ in self.convolved], [name for name, _ in self.normed]
        for name, tag in self.normed:
            conv = tag.convolution
            alone = conv and tag.uses == 0 and id(tag) not in returned
            seen = sum(other is tag for _, other in self.normed)
            if alone and seen == 1 and convs.count(conv) == 1 and norms.count(name) == 1:
                self.plan.foldable[name] = conv
