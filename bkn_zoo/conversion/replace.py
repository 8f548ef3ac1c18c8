"""Executes plans: replaces batch norms by Batch Kalman Norms that are linked to the norms below."""

import functools
import secrets
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


@contextmanager
def posing_as_batchnorms(model: nn.Module) -> Iterator[None]:
    """Make converted norms instances of PyTorch's batch norms, for code that looks for these to freeze them."""
    norms: list[Any] = [norm for norm in linked_norms(model) if not isinstance(norm, AnyBatchNorm)]
    kinds: list[Any] = [type(norm) for norm in norms]
    for norm, kind in zip(norms, kinds, strict=True):
        norm.__class__ = _posing_class(kind)
    try:
        yield
    finally:
        for norm, kind in zip(norms, kinds, strict=True):
            norm.__class__ = kind


@functools.cache
def _posing_class(kind: type[BatchKalmanNorm]) -> Any:
    plain = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[kind.dims[0]]
    return type(kind.__name__, (kind, plain), {"__module__": kind.__module__})


def replace_norms(model: nn.Module, plans: dict[bool, ConversionPlan], prefix: str, rank: int | None) -> None:
    """Replace every batch norm of the plans by BKN, under all of its names; messages name it with a prefix."""
    network, places = secrets.token_hex(4), list(model.named_modules(remove_duplicate=False))
    for name, call in {call.name: call for plan in plans.values() for call in plan.calls}.items():
        norm = model.get_submodule(name)
        assert isinstance(norm, AnyBatchNorm)
        layer = _kalman_norm(norm, call, rank)
        key = f"{network}/{name}"
        calls = {training: _links(layer, key, plan, f"order_{training}_") for training, plan in plans.items()}
        known = next(links for links in calls.values() if links)
        calls = {training: calls.get(training) or known for training in (True, False)}
        Links(key, f"{prefix}{name}", calls).attach(layer, norm)
        for place, module in places:
            if module is norm:
                model.set_submodule(place, layer)


def _kalman_norm(norm: AnyBatchNorm, call: NormCall, rank: int | None) -> BatchKalmanNorm:
    """A BKN layer for a batch norm: nearly the same in training, the same at inference."""
    kinds = {nn.BatchNorm1d: BatchKalmanNorm1d, nn.BatchNorm3d: BatchKalmanNorm3d}
    kind = next((ours for theirs, ours in kinds.items() if isinstance(norm, theirs)), BatchKalmanNorm2d)
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
    layer.dims = ANY_DIMS
    layer.train(norm.training)
    layer.track_running_stats = norm.track_running_stats
    return layer


def _links(layer: BatchKalmanNorm, key: str, plan: ConversionPlan, order: str) -> tuple[Link, ...]:
    """The links of a norm, call by call. The orders of channels become buffers of the norm."""
    network, _, norm = key.partition("/")
    links: list[Link] = []
    for call in (call for call in plan.calls if call.name == norm):
        sources = [source for piece in call.pieces for source in piece.sources]
        starts, total = {}, 0
        for below in dict.fromkeys(below for below, _ in sources):
            starts[below] = total
            total += plan.calls[below].features
        channels = [starts[below] + channel for below, channel in sources]
        name = ""
        if channels != list(range(total)):
            name = f"{order}{len(links)}"
            layer.register_buffer(name, torch.tensor(channels, device=layer.running_mean.device), persistent=False)
        calls = [plan.calls[below] for below in starts]
        keys = tuple((f"{network}/{each.name}", each.number, each.features) for each in calls)
        links.append(Link(keys, name, call.ordered, call.single))
    return tuple(links)
