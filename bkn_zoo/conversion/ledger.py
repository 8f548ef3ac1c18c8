"""The numbers of channels and images, the origins of beliefs about channels, and transitions over them.

Each tensor of features has a `Tag`: two tensors of whole numbers of the same shape, the number of the channel of every
value and the number of its image. An operation that moves features (a concatenation, a split, a shuffle) moves both in
the same way. A tag has size 1 along a dimension in which all numbers are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bkn_zoo.torch_internals import tree_leaves, tree_map

NOTHING = 0
"""The number of all channels without a belief, such as constants."""

ANY, MIXED, UNKNOWN = -1, -2, -3
"""Instead of an image's number: a constant without an image; a value from several images; unknown."""


@dataclass(eq=False)
class Tag:
    """The numbers of each value's channel and image in a tensor."""

    channels: Tensor
    images: Tensor
    convolution: str = ""  # whose output this is
    uses: int = 0  # number of operations that used the tensor


def shortened(numbers: Tensor) -> Tensor:
    """Reduce to size 1 along each dimension in which all numbers are equal."""
    for dim in range(numbers.ndim):
        if numbers.shape[dim] > 1:
            first = numbers.narrow(dim, 0, 1)
            if numbers.stride(dim) == 0 or bool((numbers == first).all()):
                numbers = first
    return numbers


def fit_shape(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers for a result of another shape: along a changed dimension, the first number."""
    while numbers.ndim < len(shape):
        numbers = numbers.unsqueeze(0)
    while numbers.ndim > len(shape):
        numbers = numbers.select(0, 0)
    for dim, size in enumerate(shape):
        if numbers.shape[dim] not in (1, size):
            numbers = numbers.narrow(dim, 0, 1)
    return numbers


def moved(move: Callable[..., Any], args: Any, kwargs: Any, tags: dict[int, Tag]) -> Any:
    """The tags of the results of a move, computed by moving the numbers."""

    def numbers(leaf: Any, part: str, default: int) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in tags:
            return torch.zeros((), dtype=torch.long).expand(leaf.shape)
        # 0 is the default, as in padding.
        return (getattr(tags[id(leaf)], part) - default).expand(leaf.shape)

    results = []
    for part, default in (("channels", NOTHING), ("images", ANY)):
        given, named = tree_map(partial(numbers, part=part, default=default), (args, kwargs))
        try:
            result = move(*given, **named)
        except NotImplementedError:  # not implemented for whole numbers
            result = move(*tree_map(lambda x: x.double() if isinstance(x, Tensor) else x, given), **named)
            result = tree_map(Tensor.long, result)
        several = not isinstance(result, Tensor)
        results.append([shortened(each) + default for each in (result if several else [result])])
    made = [Tag(channels, images) for channels, images in zip(*results, strict=True)]
    return made if several else made[0]


def together(images: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The images of values that are computed from several tensors, broadcast to a shape."""
    joined = fit_shape(images[0], shape)
    for other in images[1:]:
        joined, other = torch.broadcast_tensors(joined, fit_shape(other, shape))
        lost = torch.where((joined == UNKNOWN) | (other == UNKNOWN), UNKNOWN, MIXED)
        both = torch.where(joined == other, joined, lost)
        joined = torch.where(other == ANY, joined, torch.where(joined == ANY, other, both))
    return joined


def without(images: Tensor, dims: Sequence[int]) -> Tensor:
    """The images of values that are computed from all values along these dimensions, which are kept with size 1."""
    for dim in dims:
        largest = images.amax(dim, keepdim=True)
        # A constant does not mix images.
        least = torch.where(images == ANY, largest, images).amin(dim, keepdim=True)
        images = torch.where(least == largest, largest, torch.where(least == UNKNOWN, UNKNOWN, MIXED))
    return images


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a network (lists, dicts, dataclasses)."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            yield from tensors_in(vars(leaf))


MOST_CHANNELS = 2**14
"""Largest number of outputs of a layer with a number each. More are not channels, but computed weights, for example."""

MOST_PIECES = 8
"""Largest number of blocks of a transition. Channels that would need more get one full matrix."""


class Single(NamedTuple):
    """A channel with a belief from the call of a norm, or that depends on one such channel only."""

    call: int
    channel: int


@dataclass(frozen=True, eq=False)
class Mix:
    """The channels that a convolution or linear layer computes: `outputs` from `sources`, in `groups` blocks."""

    sources: tuple[Single, ...]
    outputs: int
    groups: int
    depth: float


class Mixed(NamedTuple):
    """One channel of a `Mix`."""

    mix: Mix
    place: int


Origin = Single | Mixed | None
"""The origin of the belief about a channel; None for channels of the input."""


class Piece(NamedTuple):
    """Consecutive channels of a norm, and the channels of other norms' beliefs that predict them.

    The shape of A is (C_out, C_in), (blocks, C_out / blocks, C_in / blocks), or (C,) with one weight per channel.
    """

    sources: tuple[Single, ...]
    shape: tuple[int, ...]


def sources_of(origins: Sequence[Origin]) -> tuple[tuple[Single, ...], int]:
    """The channels of beliefs that channels depend on, and their blocks so far."""
    singles = tuple(origin for origin in origins if isinstance(origin, Single))
    if len(singles) == len(origins):
        return singles, len(origins)
    mix = _whole_mix(origins)
    if mix is not None:
        return mix.sources, mix.groups
    parts = dict.fromkeys(origin.mix if isinstance(origin, Mixed) else origin for origin in origins if origin)
    union = [source for part in parts for source in ((part,) if isinstance(part, Single) else part.sources)]
    return tuple(dict.fromkeys(union)), 1


def _whole_mix(origins: Sequence[Origin]) -> Mix | None:
    """The mix that consists of exactly these channels, in order."""
    first = origins[0] if origins else None
    if not isinstance(first, Mixed) or list(origins) != [Mixed(first.mix, i) for i in range(first.mix.outputs)]:
        return None
    return first.mix


def pieces_of(origins: Sequence[Origin], features: int) -> list[Piece]:
    """The transition of a norm over these channels."""
    runs = [list(run) for _, run in groupby(origins, lambda o: o.mix if isinstance(o, Mixed) else type(o))]
    if len(origins) != features or None in origins or len(runs) > MOST_PIECES:
        runs = [list(origins)]
    pieces = []
    for run in runs:
        sources, blocks = sources_of(run)
        count = len(run) if len(origins) == features else features
        shape: tuple[int, ...] = (count, len(sources))
        if all(isinstance(origin, Single) for origin in run) and len(run) == count:
            shape = (count,)
        elif blocks > 1 and _whole_mix(run) is not None:
            shape = (blocks, count // blocks, len(sources) // blocks)
        if sources:
            pieces.append(Piece(sources, shape))
    return pieces


class Ledger:
    """The numbers of channels in an example with so many images."""

    def __init__(self, images: int) -> None:
        self.images = images
        # For each number, the origin of the belief, and the guesses that it depends on.
        self.origins: list[Origin] = [None]
        self.guessed: list[tuple[str, ...]] = [()]
        # The numbers of channels that only weigh others.
        self.gates: set[int] = set()
        # For each call of a norm, the number of norms on its path, including itself.
        self.depths: list[float] = []
        # Running modules with their kinds, the innermost last.
        self.modules: list[tuple[str, str]] = []
        # Memory into which features were copied.
        self.written: dict[int, Any] = {}
        # Whether a convolution with weights that depend on features has run.
        self.generated = False

    def vague(self, x: Tensor) -> Tag:
        """A tag without channels. The first dimension counts as images if its size fits."""
        images = torch.full((1,) * x.ndim, UNKNOWN)
        if x.ndim and x.shape[0] == self.images:
            images = torch.arange(self.images).view(-1, *[1] * (x.ndim - 1))
        return Tag(torch.full((1,) * x.ndim, NOTHING), images)

    def numbered(self, ndim: int, dim: int, origins: Sequence[Origin], guessed: tuple[str, ...] = ()) -> Tensor:
        """Create numbers for channels along a dimension."""
        numbers = torch.arange(len(self.origins), len(self.origins) + len(origins))
        self.origins.extend(origins)
        self.guessed.extend([guessed] * len(origins))
        return numbers.view([len(origins) if each == dim else 1 for each in range(ndim)])

    def renumbered(self, channels: Tensor, images: Tensor, gate: bool = False, guess: tuple[str, ...] = ()) -> Tag:
        """New numbers for the same channels after an operation, which a norm below has not seen."""
        old, places = torch.unique(channels, return_inverse=True)
        first = len(self.origins)
        self.origins.extend([self.origins[number] for number in old.tolist()])
        self.guessed.extend([self.guessed[number] + guess for number in old.tolist()])
        if gate or (old.numel() and int(old[0]) in self.gates):
            self.gates.update(range(first, len(self.origins)))
        return Tag(places + first, shortened(images))

    def along(self, x: Tensor, tag: Tag, dim: int) -> list[int]:
        """The numbers of channels along a dimension; all numbers, if they differ along others as well."""
        numbers = tag.channels.movedim(dim, 0).flatten(1)
        if numbers.shape[1] == 1 or bool((numbers == numbers[:, :1]).all()):
            return numbers[:, 0].expand(x.shape[dim]).tolist()
        return torch.unique(numbers).tolist()

    def depth(self, origin: Origin) -> float:
        if origin is None:
            return 0
        return self.depths[origin.call] if isinstance(origin, Single) else origin.mix.depth

    def depth_of(self, tag: Tag) -> float:
        return max((self.depth(self.origins[n]) for n in torch.unique(tag.channels).tolist()), default=0)

    def is_gate(self, tag: Tag) -> bool:
        return tag.channels.numel() > 0 and int(tag.channels.flatten()[0]) in self.gates

    def guesses_behind(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(guess for number in numbers for guess in self.guessed[number]))

    def mixed(self, x: Tensor, tag: Tag, dim: int, shape: Sequence[int], groups: int = 1) -> Tag:
        """A convolution or a linear layer over a dimension."""
        numbers, outputs = self.along(x, tag, dim), shape[dim]
        origins = [self.origins[number] for number in numbers]
        if groups == len(origins):
            made = [origin for origin in origins for _ in range(outputs // groups)]
        else:
            sources, blocks = sources_of(origins)
            blocks = gcd(groups, blocks)
            if blocks == 1:
                sources = tuple(dict.fromkeys(sources))
            depth = max(map(self.depth, sources), default=0) + 0.5  # deeper than its sources, for x + conv(x)
            count = outputs if outputs <= MOST_CHANNELS else 1
            mix = Mix(sources, count, blocks, depth)
            made = [Mixed(mix, index) if sources else None for index in range(count)]
        images = without(tag.images, [d for d in range(x.ndim) if d == dim or x.shape[d] != shape[d]])
        return Tag(self.numbered(len(shape), dim, made, self.guesses_behind(numbers)), images)
