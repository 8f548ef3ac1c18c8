"""From the weights of a batch normalization network to its BKN twin."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bkn_zoo.conversion.measure import group_of, measure
from bkn_zoo.errors import InputError
from bkn_zoo.models.network import Network
from bkn_zoo.models.tensors import check_tensors
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, check_gain
from bkn_zoo.norms.centered import BATCHNORM_GAIN, Centered, start_near_batchnorm  # noqa: F401, for who looks here
from bkn_zoo.norms.running import RunningNorm

POPULATION_GAIN = 0.1
"""q after `start_near_population`, where it is neither given nor measured."""

LEARNING_GAIN = 0.01
"""Where a gain that is to be learned starts at least: from 0 it could not move."""


def load_batchnorm_weights(model: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Start a BKN network from the weights of its batch normalization twin (or a BN network from its own).

    Afterwards `population` outputs are the twin's. Where a layer has a prior, q = `BATCHNORM_GAIN`, A = 0 and R
    is the running variance (an R that all layers share stays as it was), so that training starts from nearly batch
    normalization. Nothing changes if a tensor is missing, left over or of the wrong shape.

    Args:
        model: a `_bkn` or `_bn` network.
        state_dict: of the `_bn` network or, for a ResNet, of torchvision's.
    """
    if model.name.rpartition("_")[2] not in ("bkn", "bn"):
        raise InputError(f"{model.name} does not normalize by the running statistics as BN does: take its _bkn twin.")
    layers = {prefix: layer for prefix, layer in model.named_modules() if isinstance(layer, RunningNorm)}
    not_needed = set()
    for prefix, layer in layers.items():
        images = {f"{prefix}.{name}" for name, _ in layer.named_buffers() if name.startswith("image_")}
        spread = state_dict.get(f"{prefix}.image_spread")
        # A plain batch normalization never kept them, nor did one of the zoo that was trained on whole batches, where
        # they stand where they started: the layer derives them from the population's.
        if not images & state_dict.keys() or (spread is not None and not spread.any()):
            not_needed |= images
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in images}
        if _has_prior(layer):
            not_needed |= {f"{prefix}.{name}" for name in layer.kalman}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in not_needed}
    check_tensors("the state dict of a BN network", model, wanted, state_dict)
    model.load_state_dict(state_dict, strict=False)
    for layer in filter(_has_prior, layers.values()):
        start_near_batchnorm(layer)


def _has_prior(layer: RunningNorm) -> TypeGuard[BatchKalmanNorm]:
    return isinstance(layer, BatchKalmanNorm) and layer.has_prior


@torch.no_grad()
def start_near_population(
    model: nn.Module,
    gain: float | None = None,
    *,
    images: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    adapted: bool = False,
    group: int | None = None,
    least_gain: float = 0.0,
) -> list[str]:
    """Let the training of a converted, pretrained network start near frozen batch normalization.

    Each norm then predicts the statistics of the pretraining: the transition A is 0, the process noise R is the
    pretrained variance, and the pretrained mean is a parameter `center`. Norms without a norm below get them as their
    initial belief. With a low gain q, these statistics are most of what a norm believes; with q = 0 the network is
    frozen batch normalization, in all modes and in training. `population` outputs stay what they are. Make the
    optimizer afterwards, since there are new parameters.

    With `images`, each norm's gain is measured (`bkn_zoo.conversion.measure`): nT / (nT + V) for groups of n images, or
    such a gain that the norms on a path take that share away together. One gain serves mean and variance: the update's
    term p q (xbar - m')^2 also restores in expectation the V/n that the variance of a group lacks. `sample` uses the
    same gain as training; since it has n = 1, it is the right one for `group=1`, and too trusting for larger groups.
    `expected` makes an observation that is as steady as a group's, so that the gain for the group suits it.

    Args:
        model: from `convert`, or one with a part that is.
        gain: q, how far observations are trusted at the start, for all norms; in [0, 1]. It overrides the measurement.
            By default `POPULATION_GAIN`, where there are no images to measure it on.
        images: batches of a few hundred unlabelled images, or of tuples that begin with them; or a mapping from the
            names of several domains to such batches. One domain is enough where the network's population is that of
            its pretraining: T is then the distance of your images from it.
        adapted: whether the population was re-estimated on these images before (AdaBN: `bkn_zoo.recalibrate` of the
            network before its conversion). What is left of T is the variance between domains, and with one domain
            nothing: the gain is 0, which is AdaBN, then frozen. Choose this for images of several domains, where those
            to come may be from yet another.
        group: images per statistics group that gains are measured for; by default the network's, or 1.
        least_gain: where a measured gain is lower, it starts here. A gain of 0 never moves; choose `LEARNING_GAIN` to
            let training find the gain where T is 0.

    Returns:
        The names of the norms that start so. Others were never trained; they start as `convert` has them.
    """
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, Centered) and _is_trained(norm)}
    if not norms:
        raise InputError(
            "no norm of this network can start near its population: pass a pretrained one that bkn_zoo.convert made."
        )
    check_gain(least_gain)
    gains = dict.fromkeys(norms, POPULATION_GAIN if gain is None else gain)
    check_gain(gains[next(iter(norms))])
    if gain is None and images is not None:
        size, found = group_of(model, group), measure(model, images)
        gains = {name: found[name].gain(size, adapted) if name in found else 0.0 for name in norms}
        gains = {name: max(measured, least_gain) for name, measured in gains.items()}
    for name, norm in norms.items():
        norm.take_center()
        start_near_batchnorm(norm)
        norm.set_gain(gains[name])
    return list(norms)


def _is_trained(norm: RunningNorm) -> bool:
    return bool((norm.running_mean != 0).any() or (norm.running_var != 1).any())
