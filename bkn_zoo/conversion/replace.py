"""Executes plans: replaces batch norms by Batch Kalman Norms that are linked to the norms below."""

import secrets

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bkn_zoo.conversion.plan import NormCall, Plan
from bkn_zoo.conversion.record import Link, Linked
from bkn_zoo.norms.centered import Centered, Centered1d, Centered2d, Centered3d


class LinkedNorm(Linked, Centered):  # type: ignore[misc]
    """A Batch Kalman Norm that replaces a batch norm: it is called with features only, and finds its prior itself."""

    dims: tuple[int, ...] = (2, 3, 4, 5)

    def _get_name(self) -> str:
        return type(self).__name__.replace("Linked", "BatchKalman")

    def extra_repr(self) -> str:
        sources = [source for links in self.links.values() for link in links for source, _, _ in link.sources]
        below = ", ".join(dict.fromkeys(source.partition("/")[2] for source in sources))
        return f"{super().extra_repr()}, below: {below or 'none'}"


class LinkedNorm1d(LinkedNorm, Centered1d):  # type: ignore[misc]
    """Replaces a BatchNorm1d."""


class LinkedNorm2d(LinkedNorm, Centered2d):  # type: ignore[misc]
    """Replaces a BatchNorm2d, or a batch norm of another library."""


class LinkedNorm3d(LinkedNorm, Centered3d):  # type: ignore[misc]
    """Replaces a BatchNorm3d."""


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
        layer.key, layer.label = f"{network}/{name}", f"{prefix}{name}"
        layer.links = {training: _links(layer, plan, network, f"order_{training}_") for training, plan in plans.items()}
        known = next(links for links in layer.links.values() if links)
        layer.links = {training: layer.links.get(training) or known for training in (True, False)}
        for place in names[norm]:
            model.set_submodule(place, layer)


def _kalman_norm(norm: _BatchNorm, call: NormCall) -> LinkedNorm:
    """A BKN layer for a batch norm: nearly the same in training, the same at inference."""
    kind: type[LinkedNorm] = LinkedNorm2d
    if isinstance(norm, nn.BatchNorm1d):
        kind = LinkedNorm1d
    elif isinstance(norm, nn.BatchNorm3d):
        kind = LinkedNorm3d
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
    layer.train(norm.training)
    return layer


def _links(layer: LinkedNorm, plan: Plan, network: str, order: str) -> tuple[Link, ...]:
    """The links of a norm, call by call. The orders of channels become buffers of the norm."""
    numbers: list[tuple[str, int]] = []  # the number of each call among the calls of its norm
    counts: dict[str, int] = {}
    for call in plan.calls:
        counts[call.name] = counts.get(call.name, 0) + 1
        numbers.append((f"{network}/{call.name}", counts[call.name] - 1))
    links: list[Link] = []
    for call in plan.calls:
        if f"{network}/{call.name}" != layer.key:
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
