"""Tensors of numbered channels: what operations make of them, and what can be read off them.

A number n at image i is stored as n * IMAGES + i.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

IMAGES = 2
"""In the batch that a network is run on for its plan."""


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]


def distinct(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that occur, and where each is among them: as `torch.unique`, which would sort them."""
    occurs = torch.bincount(numbers.flatten()) > 0
    return occurs.nonzero().flatten(), (occurs.cumsum(0) - 1)[numbers]


def varies(x: Tensor, dim: int) -> bool:
    return bool((x != x.narrow(dim, 0, 1)).any())


def channel_dim(x: Tensor) -> int:
    """The one along which numbers differ; if there are several such, or none, it is where channels mostly are."""
    found = [dim for dim in range(x.ndim) if varies(x // IMAGES, dim)]
    return found[0] if len(found) == 1 else min(1, x.ndim - 1)


def in_turn(x: Tensor) -> bool:
    """Whether rows are of one image after another, as many of each."""
    turns = torch.arange(len(x), device="cpu") * IMAGES // max(len(x), 1)
    return len(x) % IMAGES == 0 and bool((x % IMAGES == turns.view(-1, *[1] * (x.ndim - 1))).all())


def kept_images(name: str, args: Any) -> Tensor | None:
    """What a move that failed was done to, with as many rows as it makes; None where it may have moved images."""
    x = next(iter(tensors_in(args, {})), None)
    if x is None or x.ndim == 0 or not in_turn(x):
        return None
    given = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    first = given[0] if given else None
    if name in ("view", "reshape") and isinstance(first, int) and first > 0 and first % IMAGES == 0:
        # Rows that are one image after another are so in any shape in which each image has as many.
        return x[:: len(x) // IMAGES].repeat_interleave(first // IMAGES, 0)
    if name == "getitem":
        return x if first == slice(None) or not isinstance(args[0], Tensor) else None  # or one more of several chunks
    if name == "permute":
        return x if first == 0 else None
    return x if name in ("transpose", "swapaxes", "swapdims") and 0 not in given else None


def merges_rows(name: str, x: Tensor, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether rows are flattened into the batch, although none are here: `x.view(-1, 3)` of x with 3 channels only.

    Who writes so has inputs of more dimensions than the ones that we run the network on.
    """
    if name not in ("view", "reshape", "flatten") or not isinstance(result, Tensor) or result.shape != x.shape:
        return False
    first = args[1] if len(args) > 1 else kwargs.get("start_dim", kwargs.get("shape", 0))
    return (first[0] if isinstance(first, tuple | list) else first) == (0 if name == "flatten" else -1)


def equation_of(name: str, args: Any, tensors: list[Tensor]) -> str:
    """A product as `torch.einsum` would have it, in which a digit is a dimension of "..."; empty if it cannot be so.

    With parameters it cannot be: their sizes are not known here.
    """
    if name in ("matmul", "bmm"):
        equation = "...ij,...jk->...ik" if min(x.ndim for x in tensors) > 1 else ""
    else:
        equation = args[0].replace(" ", "") if name == "einsum" and "->" in args[0] else ""
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(tensors) or len(terms) < 2:
        return ""
    more = max(x.ndim - len(term.replace("...", "")) for x, term in zip(tensors, terms, strict=True))
    return equation.replace("...", "0123456789"[:more])


def summed(kept: Tensor, equation: str, tensors: list[Tensor]) -> Tensor:
    """What one of several tensors becomes in their product: along what is summed over, it is what is there first."""
    terms, result = equation.split("->")
    sizes: dict[str, int] = {}
    for term, x in zip(terms.split(","), tensors, strict=True):
        for label, size in zip(term, x.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
        if x is kept:
            labels = term
    gone, new = ([label for label in one if label not in other] for one, other in ((labels, result), (result, labels)))
    if len(gone) == len(new) == 1 and sizes[gone[0]] == sizes[new[0]]:  # rows or channels that attend to one another
        labels = labels.replace(gone[0], new[0])
    else:
        kept = kept[tuple(0 if label in gone else slice(None) for label in labels)]
        labels = "".join(label for label in labels if label not in gone)
    kept = kept.permute([labels.index(label) for label in result if label in labels])
    kept = kept[tuple(slice(None) if label in labels else None for label in result)]
    return kept.expand([sizes[label] for label in result])


def broadcast(x: Tensor, tensors: list[Tensor]) -> Tensor:
    try:
        return x.expand(torch.broadcast_shapes(*(t.shape for t in tensors)))
    except RuntimeError:  # a matrix product, or a shape that was guessed
        return x


def reduced_dims(name: str, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """The dimensions that a reduction drops, None for all, and whether they stay, with one entry each."""
    place = 2 if name == "norm" else 1
    keeps = place + 2 if name in ("std", "var", "std_mean", "var_mean") else place + 1
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    return dims, bool(kwargs.get("keepdim", kwargs.get("keepdims", args[keeps] if len(args) > keeps else False)))
