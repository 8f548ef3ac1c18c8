"""Passes beliefs between the norms of a converted network.

A `Record` stores the beliefs of the norms in one call, in one thread: `run_with_record` creates it for the call, and
each norm reads it and adds its own belief through its `Links`.
"""

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.kernels.conditions import dense
from bkn_zoo.modes import Statistics
from bkn_zoo.norms.kalman import Belief, concatenate
from bkn_zoo.norms.statistics import group_count, in_full_precision
from bkn_zoo.torch_internals import checkpoint_frame, recomputing, tree_leaves

POPULATION = Statistics("population")
AFTER_NORM = ("drop", "act")
"""Modules inside timm's norms, in the order in which they are applied."""


class Record:
    """The beliefs of one call of a network; `images` is None if the inputs contain no tensor."""

    def __init__(self, network: nn.Module, statistics: Statistics, images: int | None) -> None:
        self.network, self.statistics, self.images = network, statistics, images
        # By norm and number of its call, the number of beliefs before it, and the belief.
        self.beliefs: dict[tuple[str, int], tuple[int, Belief | None]] = {}
        # The number of calls of each norm.
        self.calls: dict[str, int] = {}
        self.count = 0

    def copy(self) -> "Record":
        twin = Record(self.network, self.statistics, self.images)
        twin.beliefs, twin.calls, twin.count = dict(self.beliefs), dict(self.calls), self.count
        return twin

    def begin(self, norm: str, planned: int) -> tuple[int, int]:
        """The number of this call among a norm's planned calls, and the time of its previous occurrence (-1: none)."""
        # It starts over after its last planned call, as in a second pass through the same layers.
        call = self.calls.get(norm, 0) % planned
        self.calls[norm] = self.calls.get(norm, 0) + 1
        return call, self.beliefs.get((norm, call), (-1, None))[0]

    def find(self, source: tuple[str, int], since: int) -> Belief | None:
        """The belief of a norm's call, if it belongs to the current pass through the layers."""
        time, belief = self.beliefs.get(source, (-1, None))
        return belief if time > since else None

    def add(self, norm: str, call: int, belief: Belief | None) -> None:
        self.beliefs[norm, call] = self.count, belief
        self.count += 1


class _Calls(threading.local):
    """The records of the current calls of this thread, and that of a region that a checkpoint recomputes."""

    def __init__(self) -> None:
        self.open: list[Record] = []
        self.recomputed: tuple[Any, Record] | None = None


CALLS = _Calls()
AT_CHECKPOINT: "weakref.WeakKeyDictionary[Any, Record]" = weakref.WeakKeyDictionary()
"""The record at the beginning of a checkpointed region, as long as PyTorch may recompute the region."""


def run_with_record(network: Any, statistics: Statistics, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function of a network with its own record."""
    record = Record(network, statistics, count_images(images_in(function, network._images, args, kwargs)))
    CALLS.open.append(record)
    try:
        result = function(network, *args, **kwargs)
    finally:
        CALLS.open.pop()
    if statistics.mode in ("sample", "expected") and not torch.compiler.is_compiling():
        check_norms(network, len(record.calls), statistics.mode)
    return result


def images_in(function: Callable[..., Any], name: str | int | None, args: Any, kwargs: Any) -> Any:
    """The input with this name or place, which contains the images, otherwise all inputs."""
    if name is None:
        return args, kwargs
    names = [each for each in inspect.signature(function).parameters if each != "self"]
    given = dict(zip(names, args, strict=False)) | kwargs
    return given.get(name if isinstance(name, str) else "".join(names[name : name + 1]), (args, kwargs))


def check_norms(network: Any, called: int, mode: str) -> None:
    """Refuse the statistics of an image if the converted norms were removed; warn once if some were."""
    if called >= len(network._norms):
        return
    there = {name for name, _ in network.named_modules()}
    gone = [name for name in network._norms if name not in there]
    message = (
        f"statistics={mode!r} has no effect on {len(gone)} of {len(network._norms)} converted norms, because they were "
        "removed, as by folding them into convolutions: use the network before that, or statistics='population'."
    )
    if gone and not called:
        raise InputError(message)
    if gone and not network._told:
        network._told = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def count_images(inputs: Any) -> int | None:
    """The first size of the first tensor or, for a list of images with three dimensions, the length of the list."""
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)), None)
    if first is None or first.ndim == 0:
        return None
    lists = lists_of_images(inputs) if first.ndim == 3 else []
    return next((len(images) for images in lists if images[0] is first), first.shape[0])


def lists_of_images(inputs: Any) -> list[list[Tensor]]:
    """Lists of images with three dimensions, which may have different sizes."""
    if isinstance(inputs, list) and inputs and all(isinstance(x, Tensor) and x.ndim == 3 for x in inputs):
        return [inputs]
    parts = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple | list) else ()
    return [images for part in parts for images in lists_of_images(part)]


def find_record(norm: str) -> Record | None:
    """The record of the current call of a norm; None outside a call."""
    if torch.compiler.is_compiling():
        return CALLS.open[-1] if CALLS.open else None
    frame, run, again = checkpoint_frame()
    if again:
        # A recomputed region starts as in the first pass.
        if CALLS.recomputed is None or CALLS.recomputed[0] is not run:
            CALLS.recomputed = run, AT_CHECKPOINT[frame].copy()
        return CALLS.recomputed[1]
    if recomputing():
        raise InputError(
            f"{norm} is recomputed by a reentrant or nested checkpoint, where beliefs lose their gradients: use "
            "checkpoint(..., use_reentrant=False), and do not nest checkpoints."
        )
    record = CALLS.open[-1] if CALLS.open else None
    if frame is not None and record is not None and frame not in AT_CHECKPOINT:
        AT_CHECKPOINT[frame] = record.copy()
    return record


class Link(NamedTuple):
    """The beliefs that a norm receives in one of its calls, by the norms, the numbers of their calls, and channels."""

    sources: tuple[tuple[str, int, int], ...]
    order: str  # the name of the buffer with the indices of the received channels; "" for all in sequence
    ordered: bool  # whether rows are known to be grouped by image, if an image has several
    single: bool = False  # whether each row was an image in the example


class Links:
    """The place of a norm in a converted network: supplies the priors of its calls, and records its beliefs."""

    told = False  # whether a missing link was reported
    default = "population"  # `default_statistics` of the network

    def __init__(self, key: str, label: str, calls: dict[bool, tuple[Link, ...]]) -> None:
        # The norm's name in records and in messages, and the links of each call, for training and for evaluation.
        self.key, self.label, self.calls = key, label, calls

    def normalize(self, norm: Any, x: Tensor) -> Tensor:
        """The output of a norm for features only, as of the batch norm that it replaces."""
        record = find_record(self.label)
        if record is None and (norm.training or self.default != "population"):
            raise InputError(
                f"{self.label} was called outside a call of its network, where it receives no beliefs: call the "
                "network itself, or one of its methods."
            )
        if record is None or record.statistics.mode == "population":
            y, _ = norm.with_prior(x, None, POPULATION)
        else:
            y = self._with_beliefs(norm, x, record)
        for child in AFTER_NORM:
            if child in norm._modules:
                y = norm._modules[child](y)
        return y

    def _with_beliefs(self, norm: Any, x: Tensor, record: Record) -> Tensor:
        links = self.calls[record.network.training]
        call, before = record.begin(self.key, len(links))
        features = dense(by_image(x, record, links[call], self.label))
        prior = None
        if norm.prior_features is not None:
            prior = self._gather(norm, links[call], record, before, features)
        y, belief = norm.with_prior(features, prior, record.statistics)
        record.add(self.key, call, belief)
        return y if y.shape == x.shape else y.movedim(-1, 1).flatten(0, 1)

    def _gather(self, norm: nn.Module, link: Link, record: Record, since: int, x: Tensor) -> Belief | None:
        """The beliefs of the norms below, with mean 0 and variance 0 for a missing one."""
        found = []
        for source, call, channels in link.sources:
            belief = record.find((source, call), since)
            if belief is None:
                self._report_missing(source)
                statistics, rows = record.statistics, x.shape[0]
                groups = group_count(rows, statistics.group) if statistics.mode == "batch" else rows
                zeros = in_full_precision(x.new_zeros(())).expand(groups, channels)
                belief = Belief(zeros, zeros)
            found.append(belief)
        joined = found[0] if len(found) == 1 else concatenate(found)
        if not link.order or joined is None:
            return joined
        order = getattr(norm, link.order)
        return Belief(joined.mean.index_select(1, order), joined.var.index_select(1, order))

    def _report_missing(self, source: str) -> None:
        if self.told or torch.compiler.is_compiling():
            return
        self.told = True
        message = (
            f"{self.label} receives no belief from {source.partition('/')[2]} in this call, because the call takes "
            "another path through the network than the example of the conversion: if you use the network this way, "
            "convert it with such an example."
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def below(self) -> list[str]:
        """The names of the norms below."""
        keys = [source for links in self.calls.values() for link in links for source, _, _ in link.sources]
        return list(dict.fromkeys(key.partition("/")[2] for key in keys))

    def attach(self, layer: nn.Module, norm: nn.Module) -> None:
        """Give a layer the place of a norm, with the norm's orders of channels and the modules after it."""
        vars(layer).update(link=self, carries_belief=False)
        for name, buffer in norm.named_buffers(recurse=False):
            if name.startswith("order"):
                layer.register_buffer(name, buffer, persistent=False)
        for name, child in norm.named_children():
            if name in AFTER_NORM:
                layer.add_module(name, child)


def by_image(x: Tensor, record: Record, link: Link, norm: str) -> Tensor:
    """Turn rows of one image, such as tokens that were flattened into the batch, into its positions."""
    images, statistics = record.images, record.statistics
    if images is None or x.shape[0] == images or x.shape[0] == 0:
        return x
    if link.single and statistics != ("batch", None):
        raise InputError(
            f"{norm} gets {x.shape[0]} rows in a call with {images} images, but in the example of the conversion each "
            "row was an image: say which input contains the images, convert(..., images=NAME), or convert with such an "
            "example."
        )
    if (link.ordered and x.shape[0] % images == 0) or images == 1:
        return x.unflatten(0, (images, -1)).movedim(1, -1)
    if statistics != ("batch", None):
        raise InputError(
            f"{norm} gets {x.shape[0]} rows for {images} images, and the conversion does not know which row belongs to "
            "which image: use statistics='population' and whole batches (statistics_batch_size=None) or one image at a "
            "time, or convert a part of the network with only=NAME in which each row is an image."
        )
    return x
