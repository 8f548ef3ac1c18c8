"""Carries out plans: batch norms become Batch Kalman Norms that are linked to the norms below them."""

import secrets

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bkn_zoo.conversion.plan import NormCall, Plan
from bkn_zoo.conversion.record import Link, Linked
from bkn_zoo.norms.centered import Centered, Centered1d, Centered2d, Centered3d


class LinkedNorm(Linked, Centered):  # type: ignore[misc]
    """Batch Kalman Norm in the place of a batch norm: it is called with features alone, and finds its prior itself."""

    dims: tuple[int, ...] = (2, 3, 4, 5)

    def _get_name(self) -> str:
        return type(self).__name__.replace("Linked", "BatchKalman")

    def extra_repr(self) -> str:
        sources = [source for links in self.links.values() for link in links for source, _, _ in link.sources]
        below = ", ".join(dict.fromkeys(source.partition("/")[2] for source in sources))
        return f"{super().extra_repr()}, below: {below or 'none'}"


class LinkedNorm1d(LinkedNorm, Centered1d):  # type: ignore[misc]
    """The same in the place of a BatchNorm1d."""


class LinkedNorm2d(LinkedNorm, Centered2d):  # type: ignore[misc]
    """The same in the place of a BatchNorm2d, or of a batch norm of another library."""


class LinkedNorm3d(LinkedNorm, Centered3d):  # type: ignore[misc]
    """The same in the place of a BatchNorm3d."""


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each module, of which one that is shared has several; the first is what a plan calls it."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def replace_norms(model: nn.Module, plans: dict[bool, Plan], prefix: str) -> None:
    """Put BKN in the place of every batch norm that the plans call, under all of its names.

    Args:
        prefix: what the names of norms are to begin with for people.
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
    """BKN in place of a batch norm: nearly the same in training, the same at inference."""
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
    layer.weight, layer.bias = norm.weight, norm.bias  # the very same, which may be shared or take no gradient
    for name, child in norm.named_children():
        layer.add_module(name, child)
    layer.train(norm.training)
    return layer


def _links(layer: LinkedNorm, plan: Plan, network: str, order: str) -> tuple[Link, ...]:
    """What a norm takes from which others, call by call; the orders of channels become buffers of the norm."""
    numbers: list[tuple[str, int]] = []  # of each call, among those of its norm
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
    """The calls whose beliefs it receives."""
    return list(dict.fromkeys(source for piece in call.pieces for source, _ in piece.sources))
