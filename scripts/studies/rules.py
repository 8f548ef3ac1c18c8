"""Further measurements on trained networks: other rules for inference.

Like the mode `expected`, the rules compute an observation from the image's own statistics and the running averages. BN
normalizes with it, and BKN passes it through predict and update.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bkn_zoo import kernels
from bkn_zoo.models import Network
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.running import RunningNorm, left_in_its_modes
from bkn_zoo.norms.statistics import observe, pool

Rule = Callable[[RunningNorm, Belief, int], Belief]
"""Computes the observation of each image from the layer, the statistics of the images and the group size."""


def layers(model: Network) -> list[RunningNorm]:
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


@contextmanager
def observing_by(model: Network, rule: Rule) -> Iterator[None]:
    """Use `rule` in the mode `expected` of `model`. For measurements only: no other thread may use the model."""

    def bind(layer: RunningNorm) -> Callable[[Belief, int], Belief]:
        return lambda images, group: rule(layer, images, group)

    for layer in layers(model):
        layer.expect = bind(layer)  # type: ignore[method-assign, assignment]
    try:
        with kernels.use("pytorch"):  # the fused kernels do not support other rules
            yield
    finally:
        for layer in layers(model):
            del layer.expect


def example_weighing(share: float) -> Rule:
    """Summers & Dinneen (2020): moments of the image and of all images, mixed with a tuned share.

    At a share of 1/n, the variance is that of `expected` plus V (n-1)/n^2.
    """

    def rule(layer: RunningNorm, images: Belief, group: int) -> Belief:
        everyone, spread = layer.partners()
        mean = torch.lerp(everyone.mean, images.mean, share)
        within = torch.lerp(everyone.var + spread, images.var, share)
        return Belief(mean, within + share * (1 - share) * (images.mean - everyone.mean).square())

    return rule


@torch.no_grad()
def evalnorm(model: Network, batches: Iterable[Tensor]) -> Rule:
    """Singh & Shrivastava (2019): mean and variance mixed with two shares per layer, fitted to training groups.

    They learn the shares by gradient descent during training. Here they are the least-squares solution, over channels
    in units of their own variance.
    """
    group = model.statistics_batch_size or 1
    sums: dict[RunningNorm, Tensor] = {}

    def population(layer: RunningNorm) -> Belief:
        everyone, spread = layer.partners()
        return Belief(everyone.mean, everyone.var + (1 - 1 / group) * spread)

    def watch(layer: RunningNorm, images: Belief) -> None:
        usual, observed = remembered[layer], pool(images, group)
        unit = usual.var + layer.eps
        terms = []
        for own, shared, centre, scale in zip(images, observed, usual, (unit.sqrt(), unit), strict=True):
            own, shared = (own - centre) / scale, ((shared - centre) / scale).repeat_interleave(group, 0)
            terms += [(own * shared).sum(), own.square().sum()]
        sums[layer] = sums.get(layer, 0) + torch.stack(terms).double()

    trained, model = model, copy.deepcopy(model)  # a copy, because its running averages change
    remembered = {layer: population(layer) for layer in layers(model)}
    _in_training(model, batches, watch)
    shares = {}
    for layer, copied in zip(layers(trained), layers(model), strict=True):
        both, alone, both_var, alone_var = sums[copied].tolist()
        shares[layer] = both / max(alone, 1e-12), both_var / max(alone_var, 1e-12)

    def rule(layer: RunningNorm, images: Belief, group: int) -> Belief:
        usual, (of_mean, of_var) = population(layer), shares[layer]
        return Belief(torch.lerp(usual.mean, images.mean, of_mean), torch.lerp(usual.var, images.var, of_var))

    return rule


def recalibrated(model: Network, batches: Iterable[Tensor]) -> Network:
    """A copy with running averages recomputed over `batches`."""
    model = copy.deepcopy(model)
    recalibrate(model, batches)
    return model


def _in_training(model: Network, batches: Iterable[Tensor], watch: Callable[[RunningNorm, Belief], None]) -> None:
    """Run batches in training mode. `watch` is called with the statistics of the images at the input of every layer."""

    def hook(layer: Any, args: tuple[Any, ...]) -> None:
        watch(layer, observe(args[0].detach()))

    hooks = [layer.register_forward_pre_hook(hook) for layer in layers(model)]
    try:
        with left_in_its_modes(model):
            model.train()
            for images in batches:
                model(images.contiguous(memory_format=torch.channels_last))
    finally:
        for handle in hooks:
            handle.remove()
