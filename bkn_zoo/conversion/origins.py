"""The origins of beliefs about channels, and the transition of a norm over such channels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

MOST_PIECES = 8
"""Largest number of blocks of a transition. Channels that would need more get one full matrix."""


class Single(NamedTuple):
    """A channel with a belief from the call of a norm, or that depends on one such channel only."""

    call: int
    channel: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Mix:
    """The channels that a convolution or linear layer computes: `outputs` from `sources`, in `groups` blocks."""

    sources: tuple[Single, ...]
    outputs: int
    groups: int
    path: tuple[str, ...]
    depth: float


class Mixed(NamedTuple):
    """One channel of a `Mix`."""

    mix: Mix
    place: int


Origin = Single | Mixed | None
"""The origin of the belief about a channel; None for channels of the input."""


@dataclass(frozen=True)
class Piece:
    """Consecutive channels of a norm: the source of their prediction, and the shape of their block of A.

    Attributes:
        sources: the channels of other norms' beliefs, as (call, channel), in the order of the block's columns.
        shape: (C_out, C_in) full, (blocks, C_out / blocks, C_in / blocks), or (C,) with one weight per channel.
        path: convolutions and other layers in between.
    """

    sources: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    path: tuple[str, ...]


def through(origin: Origin, name: str) -> Origin:
    return Single(origin.call, origin.channel, (*origin.path, name)) if isinstance(origin, Single) else origin


def sources_of(origins: Sequence[Origin]) -> tuple[tuple[Single, ...], int, tuple[str, ...]]:
    """The channels of beliefs that channels depend on, their blocks so far, and the path."""
    path = _join(origin.path if isinstance(origin, Single) else origin.mix.path for origin in origins if origin)
    if all(isinstance(origin, Single) for origin in origins):
        return tuple(o for o in origins if isinstance(o, Single)), len(origins), path
    mix = _whole_mix(origins)
    if mix is not None:
        return mix.sources, mix.groups, path
    union: dict[tuple[int, int], Single] = {}
    parts = dict.fromkeys(origin.mix if isinstance(origin, Mixed) else origin for origin in origins if origin)
    for part in parts:
        for source in (part,) if isinstance(part, Single) else part.sources:
            union.setdefault((source.call, source.channel), source)
    return tuple(union.values()), 1, path


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
        sources, blocks, path = sources_of(run)
        count = len(run) if len(origins) == features else features
        shape: tuple[int, ...] = (count, len(sources))
        if all(isinstance(origin, Single) for origin in run) and len(run) == count:
            shape = (count,)
        elif blocks > 1 and _whole_mix(run) is not None:
            shape = (blocks, count // blocks, len(sources) // blocks)
        if sources:
            pieces.append(Piece(tuple((s.call, s.channel) for s in sources), shape, path))
    return pieces


def _join(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    distinct = {id(path): path for path in paths}  # most channels share one tuple
    return tuple(dict.fromkeys(name for path in distinct.values() for name in path))
