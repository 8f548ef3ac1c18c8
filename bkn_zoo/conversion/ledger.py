"""The numbers that the planner gives to channels, the origins of beliefs about them, and transitions over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bkn_zoo.conversion.tags import NOTHING, UNKNOWN, Tag, shortened, without

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
    """Consecutive channels of a norm.

    Attributes:
        sources: the channels of other norms' beliefs that predict them, in the order of the columns of A.
        shape: of A: (C_out, C_in) full, (blocks, C_out / blocks, C_in / blocks), or (C,) with one weight per channel.
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

    def kind(origin: Origin) -> Any:
        return origin.mix if isinstance(origin, Mixed) else type(origin)

    runs = [list(run) for _, run in groupby(origins, kind)]
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
    """The numbers of channels.

    Attributes:
        images: number of images in the example.
        origins, guessed: for each number, the origin of the belief, and the guesses that it depends on.
        gates: the numbers of channels that only weigh others.
        depths: for each call of a norm, the number of norms on its path, including itself.
        modules: running modules with their kinds, the innermost last.
        written: memory into which features were copied.
        generated: whether a convolution with weights that depend on features has run.
    """

    def __init__(self, images: int) -> None:
        self.images = images
        self.origins: list[Origin] = [None]
        self.guessed: list[tuple[str, ...]] = [()]
        self.gates: set[int] = set()
        self.depths: list[float] = []
        self.modules: list[tuple[str, str]] = []
        self.written: dict[int, Any] = {}
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
        shape = [1] * ndim
        shape[dim] = len(origins)
        return numbers.view(shape)

    def renumbered(self, channels: Tensor, images: Tensor, gate: bool = False, guess: tuple[str, ...] = ()) -> Tag:
        """New numbers for the same channels after an operation, which may make a gate, or be guessed.

        A norm that sees them from here on has not seen those before the operation.
        """
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
