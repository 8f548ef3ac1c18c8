"""From the weights of a batch normalization network to its BKN twin."""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.models.network import Network
from bkn_zoo.models.tensors import check_tensors
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d, inverse_softplus
from bkn_zoo.norms.running import RunningNorm

BATCHNORM_GAIN = 0.99
"""q after `load_batchnorm_weights`: nearly batch normalization, but with a gradient (at q = 1 it would be zero)."""

POPULATION_GAIN = 0.1
"""q after `start_near_population`."""


def load_batchnorm_weights(model: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Start a BKN network from the weights of its batch normalization twin (or a BN network from its own).

    Afterwards `population` outputs are the twin's. Where a layer has a layer below, q = `BATCHNORM_GAIN`, A = 0 and R
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
        if not images & state_dict.keys():  # a plain batch normalization, from which the layer derives them
            not_needed |= images
        if _has_prior(layer):
            not_needed |= {f"{prefix}.{name}" for name in layer.kalman}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in not_needed}
    check_tensors("the state dict of a BN network", model, wanted, state_dict)
    model.load_state_dict(state_dict, strict=False)
    for layer in filter(_has_prior, layers.values()):
        start_near_batchnorm(layer)


def _has_prior(layer: RunningNorm) -> TypeGuard[BatchKalmanNorm2d]:
    return isinstance(layer, BatchKalmanNorm2d) and layer.prior_features is not None


@torch.no_grad()
def start_near_batchnorm(layer: BatchKalmanNorm2d) -> None:
    """Put A, R and q of a layer with one below it where training starts from nearly batch normalization."""
    for block in layer.transition_blocks:
        block.zero_()
    layer.set_gain(BATCHNORM_GAIN)
    if layer.raw_process_noise.shape == layer.running_var.shape:
        # A dead channel has no variance, where the inverse of softplus would be minus infinity.
        layer.raw_process_noise.copy_(inverse_softplus(layer.running_var.clamp_min(layer.eps)))


@torch.no_grad()
def start_near_population(model: nn.Module, gain: float = POPULATION_GAIN) -> list[str]:
    """Let the training of a converted, pretrained network start near frozen batch normalization.

    What a norm predicts are then the statistics of the pretraining, and with a low gain they are most of what it
    believes: with so few images in a group, their own statistics would destroy what the network knows. With A = 0 a
    norm predicts N(0, R): R is the pretrained variance, and the pretrained mean is taken away by the convolution right
    below, as its bias. So `population` outputs stay what they were, but a state dict of the original fits no more: load
    it before.

    Args:
        model: from `convert`, or one with a part that is.
        gain: q, how far observations are trusted at the start.

    Returns:
        The names of the norms that start so. Others have no convolution of their own, nobody below, or were never
        trained; they start as `convert` has them.
    """
    started = []
    for prefix, converted in model.named_modules():
        for name, below in getattr(converted, "convolutions", {}).items():
            norm, conv = converted.get_submodule(name), converted.get_submodule(below)
            if isinstance(norm, RunningNorm) and _has_prior(norm) and _is_trained(norm):
                _predict_population(norm, conv)
                norm.set_gain(gain)
                started.append(f"{prefix}.{name}".lstrip("."))
    if not started:
        raise InputError(
            "no norm of this network can start near its population: convert a pretrained one, whose norms follow "
            "convolutions, by bkn_zoo.convert."
        )
    return started


def _is_trained(norm: RunningNorm) -> bool:
    return bool((norm.running_mean != 0).any() or (norm.running_var != 1).any())


def _predict_population(norm: BatchKalmanNorm2d, conv: Any) -> None:
    mean = norm.running_mean.to(conv.weight.dtype)
    bias = -mean if conv.bias is None else conv.bias - mean
    conv.bias = nn.Parameter(bias, requires_grad=conv.weight.requires_grad)
    norm.image_mean -= norm.running_mean
    norm.running_mean.zero_()
    start_near_batchnorm(norm)
