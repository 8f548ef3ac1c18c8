"""Tags: the channel and image of every value of a tensor.

Each tensor of features has two tensors of whole numbers of the same shape: the number of the channel of every value,
and the number of its image. An operation that moves features (a concatenation, a split, a shuffle) moves both in the
same way. A tag has size 1 along a dimension in which all numbers are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bkn_zoo.torch_internals import tree_leaves, tree_map

NOTHING = 0
"""The number of all channels without a belief, such as constants."""

ANY, MIXED, UNKNOWN = -1, -2, -3
"""Instead of an image's number: a constant without an image; a value from several images; unknown."""


@dataclass(eq=False)
class Tag:
    """The numbers of each value's channel and image in a tensor.

    Attributes:
        convolution: the name of the convolution whose output this is, if any.
        uses: number of operations that used the tensor.
    """

    channels: Tensor
    images: Tensor
    convolution: str = ""
    uses: int = 0


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
        least = torch.where(images == ANY, largest, images).amin(dim, keepdim=True)  # a constant does not mix images
        images = torch.where(least == largest, largest, torch.where(least == UNKNOWN, UNKNOWN, MIXED))
    return images


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a network (lists, dicts, dataclasses)."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not callable(leaf):
            yield from tensors_in(vars(leaf))
