"""Executes plans: replaces batch norms by Batch Kalman Norms that are linked to the norms below."""

import functools
import secrets
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bkn_zoo.conversion.plan import ConversionPlan, NormCall
from bkn_zoo.conversion.record import Link, Links
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d
from bkn_zoo.torch_internals import AnyBatchNorm

ANY_DIMS = (2, 3, 4, 5)
"""Inputs of a converted norm may have these numbers of dimensions, as batch norms of some libraries allow."""


def linked_norms(model: nn.Module) -> list[BatchKalmanNorm]:
    """The norms of converted networks in a model."""
    return [norm for norm in model.modules() if isinstance(norm, BatchKalmanNorm) and norm.link is not None]


_POSING: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""How many contexts each norm is in that poses as a batch norm. They may be nested, or in several threads."""

_POSING_LOCK = threading.Lock()


@contextmanager
def posing_as_batchnorms(model: nn.Module) -> Iterator[None]:
    """Make converted norms instances of PyTorch's batch norms, for code that looks for these to freeze them."""
    norms: list[Any] = linked_norms(model)
    with _POSING_LOCK:
        for norm in norms:
            _POSING[norm] = _POSING.get(norm, 0) + 1
            if _POSING[norm] == 1:
                kind: Any = type(norm)
                norm.__class__ = _posing_class(kind)
    try:
        yield
    finally:
        with _POSING_LOCK:
            for norm in norms:
                _POSING[norm] -= 1
                if _POSING[norm] == 0:
                    norm.__class__ = type(norm).__mro__[1]


@functools.cache
def _posing_class(kind: type[BatchKalmanNorm]) -> Any:
    plain = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[kind.dims[0]]

    def reduce_as_kind(self: Any, protocol: Any) -> Any:  # copies and pickles do not pose
        return _new, (kind,), self.__getstate__()

    return type(kind.__name__, (kind, plain), {"__module__": kind.__module__, "__reduce_ex__": reduce_as_kind})


def _new(kind: type[BatchKalmanNorm]) -> BatchKalmanNorm:
    return kind.__new__(kind)


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module. A shared module has several; plans use the first."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace_norms(model: nn.Module, plans: dict[bool, ConversionPlan], prefix: str, rank: int | None) -> None:
    """Replace every batch norm of the plans by BKN, under all of its names.

    Args:
        prefix: prefix of the names of norms in messages.
        rank: of full transitions, as in `BatchKalmanNorm`.
    """
    names, network = names_of(model), secrets.token_hex(4)
    for name in dict.fromkeys(call.name for plan in plans.values() for call in plan.calls):
        norm = model.get_submodule(name)
        assert isinstance(norm, AnyBatchNorm)
        call = next(call for plan in plans.values() for call in plan.calls if call.name == name)
        layer = _kalman_norm(norm, call, rank)
        key = f"{network}/{name}"
        calls = {training: _links(layer, key, plan, f"order_{training}_") for training, plan in plans.items()}
        known = next(links for links in calls.values() if links)
        calls = {training: calls.get(training) or known for training in (True, False)}
        Links(key, f"{prefix}{name}", calls).attach(layer, norm)
        for place in names[norm]:
            model.set_submodule(place, layer)


def _kalman_norm(norm: AnyBatchNorm, call: NormCall, rank: int | None) -> BatchKalmanNorm:
    """A BKN layer for a batch norm: nearly the same in training, the same at inference."""
    kind: type[BatchKalmanNorm] = BatchKalmanNorm2d
    if isinstance(norm, nn.BatchNorm1d):
        kind = BatchKalmanNorm1d
    elif isinstance(norm, nn.BatchNorm3d):
        kind = BatchKalmanNorm3d
    assert norm.running_mean is not None
    like = norm.running_mean if norm.weight is None else norm.weight
    below = sum(len(piece.sources) for piece in call.pieces) or None
    layer = kind(
        norm.num_features, below, norm.eps, norm.momentum, norm.affine, bias=norm.bias is not None,
        transition_shapes=call.shapes or None, transition_rank=rank, centered=True, device=like.device,
        dtype=like.dtype,
    )  # fmt: skip
    layer.load_state_dict({k: v for k, v in norm.state_dict().items() if "." not in k}, strict=False)
    layer.weight, layer.bias = norm.weight, norm.bias  # the same parameters, which may be shared or frozen
    for name, child in norm.named_children():
        layer.add_module(name, child)
    layer.dims = ANY_DIMS
    layer.train(norm.training)
    layer.track_running_stats = norm.track_running_stats
    return layer


def _links(layer: BatchKalmanNorm, key: str, plan: ConversionPlan, order: str) -> tuple[Link, ...]:
    """The links of a norm, call by call. The orders of channels become buffers of the norm."""
    network, _, norm = key.partition("/")
    numbers: list[tuple[str, int]] = []  # the number of each call among the calls of its norm
    counts: dict[str, int] = {}
    for call in plan.calls:
        counts[call.name] = counts.get(call.name, 0) + 1
        numbers.append((f"{network}/{call.name}", counts[call.name] - 1))
    links: list[Link] = []
    for call in plan.calls:
        if call.name != norm:
            continue
        starts: dict[int, int] = {}
        total = 0
        for below in _below(call):
            starts[below] = total
            total += plan.calls[below].features
        channels = [starts[below] + channel for piece in call.pieces for below, channel in piece.sources]
        name = ""
        if channels != list(range(total)):
            name = f"{order}{len(links)}"
            layer.register_buffer(name, torch.tensor(channels, device=layer.running_mean.device), persistent=False)
        sources = tuple((*numbers[below], plan.calls[below].features) for below in starts)
        links.append(Link(sources, name, call.ordered, call.single))
    return tuple(links)


def _below(call: NormCall) -> list[int]:
    """The calls whose beliefs a call receives."""
    return list(dict.fromkeys(source for piece in call.pieces for source, _ in piece.sources))


def _earlier(kind: type[BatchKalmanNorm]) -> type[BatchKalmanNorm]:
    """As `centered.earlier`, for norms of converted networks, which now have `Links`."""

    class Earlier(kind):  # type: ignore[misc,valid-type]
        def __setstate__(self, state: dict[str, Any]) -> None:
            place = Links(*(state.pop(name) for name in ("key", "label", "links")))
            now = {"link": place, "carries_belief": False, "dims": ANY_DIMS, "centered": True}
            super().__setstate__(state | now)
            self.__class__ = kind  # type: ignore[assignment]

    return Earlier


LinkedNorm1d, LinkedNorm2d, LinkedNorm3d = map(_earlier, (BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d))
