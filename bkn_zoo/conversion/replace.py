"""Executes plans: replaces batch norms by Batch Kalman Norms that are linked to the norms below."""

import secrets
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bkn_zoo.conversion.plan import NormCall, Plan
from bkn_zoo.conversion.record import Link, Links
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.norms.centered import Centered, Centered1d, Centered2d, Centered3d

ANY_DIMS = (2, 3, 4, 5)
"""Inputs of a converted norm may have these numbers of dimensions, as batch norms of some libraries allow."""


def linked_norms(model: nn.Module) -> list[BatchKalmanNorm]:
    """The norms of converted networks in a model."""
    return [norm for norm in model.modules() if isinstance(norm, BatchKalmanNorm) and norm.link is not None]


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module. A shared module has several; plans use the first."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace_norms(model: nn.Module, plans: dict[bool, Plan], prefix: str) -> None:
    """Replace every batch norm of the plans by BKN, under all of its names.

    Args:
        prefix: prefix of the names of norms in messages.
    """
    names, network = names_of(model), secrets.token_hex(4)
    for name in dict.fromkeys(call.name for plan in plans.values() for call in plan.calls):
        norm = model.get_submodule(name)
        assert isinstance(norm, _BatchNorm)
        layer = _kalman_norm(norm, next(call for plan in plans.values() for call in plan.calls if call.name == name))
        key = f"{network}/{name}"
        calls = {training: _links(layer, key, plan, f"order_{training}_") for training, plan in plans.items()}
        known = next(links for links in calls.values() if links)
        calls = {training: calls.get(training) or known for training in (True, False)}
        Links(key, f"{prefix}{name}", calls).attach(layer, norm)
        for place in names[norm]:
            model.set_submodule(place, layer)


def _kalman_norm(norm: _BatchNorm, call: NormCall) -> Centered:
    """A BKN layer for a batch norm: nearly the same in training, the same at inference."""
    kind: type[Centered] = Centered2d
    if isinstance(norm, nn.BatchNorm1d):
        kind = Centered1d
    elif isinstance(norm, nn.BatchNorm3d):
        kind = Centered3d
    assert norm.running_mean is not None
    like = norm.running_mean if norm.weight is None else norm.weight
    below = sum(len(piece.sources) for piece in call.pieces) or None
    layer = kind(
        norm.num_features, below, norm.eps, norm.momentum, norm.affine, bias=norm.bias is not None,
        transition_shapes=call.shapes or None, device=like.device, dtype=like.dtype,
    )  # fmt: skip
    layer.load_state_dict({k: v for k, v in norm.state_dict().items() if "." not in k}, strict=False)
    layer.weight, layer.bias = norm.weight, norm.bias  # the same parameters, which may be shared or frozen
    for name, child in norm.named_children():
        layer.add_module(name, child)
    layer.dims = ANY_DIMS
    layer.train(norm.training)
    return layer


def _links(layer: Centered, key: str, plan: Plan, order: str) -> tuple[Link, ...]:
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
        links.append(Link(sources, name, call.ordered))
    return tuple(links)


def _below(call: NormCall) -> list[int]:
    """The calls whose beliefs a call receives."""
    return list(dict.fromkeys(source for piece in call.pieces for source, _ in piece.sources))


def _earlier(kind: type[Centered]) -> type[Centered]:
    """A class of norms in pickles of earlier versions, which become norms with `Links` when they are loaded."""

    class Earlier(kind):  # type: ignore[misc,valid-type]
        def __setstate__(self, state: dict[str, Any]) -> None:
            place = Links(*(state.pop(name) for name in ("key", "label", "links")))
            super().__setstate__({**state, "link": place, "carries_belief": False, "dims": ANY_DIMS})
            self.__class__ = kind

    return Earlier


LinkedNorm1d, LinkedNorm2d, LinkedNorm3d = map(_earlier, (Centered1d, Centered2d, Centered3d))
