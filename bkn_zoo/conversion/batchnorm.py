"""Loads weights of a batch normalization network into a BKN network."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bkn_zoo.errors import ConversionError, InputError
from bkn_zoo.models.network import Network
from bkn_zoo.models.tensors import check_tensors
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, check_gain, no_weight_decay
from bkn_zoo.norms.running import RunningNorm

LEARNING_GAIN = 0.01
"""The smallest initial value of a gain that should learn."""


def load_batchnorm_weights(model: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of a batch normalization network into the same network with BKN (or BN).

    Afterwards the outputs with `population` statistics are those of the BN network. In layers with a prior, the gain q
    is `BATCHNORM_GAIN`, the transition A is 0, and the process noise R is the running variance (an R that all layers
    share keeps its value), so training starts close to batch normalization. If a tensor is missing, superfluous or has
    the wrong shape, nothing changes.

    Args:
        model: a `_bkn` or `_bn` network.
        state_dict: the state dict of the `_bn` network or, for a ResNet, of torchvision's network.
    """
    if model.name.rpartition("_")[2] not in ("bkn", "bn"):
        raise InputError(f"{model.name} does not normalize with running statistics as BN does: use the _bkn network.")
    layers = {prefix: layer for prefix, layer in model.named_modules() if isinstance(layer, RunningNorm)}
    not_needed = no_weight_decay(model)  # A, R and q, and centers
    for prefix, layer in layers.items():
        images = {f"{prefix}.{name}" for name, _ in layer.named_buffers() if name.startswith("image_")}
        spread = state_dict.get(f"{prefix}.image_spread")
        # Plain batch normalization does not store them, and a network of the zoo that was trained on whole batches has
        # only their initial values. The layer derives them from the population.
        if not images & state_dict.keys() or (spread is not None and not spread.any()):
            not_needed |= images
            state_dict = {name: tensor for name, tensor in state_dict.items() if name not in images}
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in not_needed}
    check_tensors("the state dict of a BN network", model, wanted, state_dict)
    model.load_state_dict(state_dict, strict=False)
    for layer in layers.values():
        if isinstance(layer, BatchKalmanNorm) and layer.has_prior:
            layer.start_near_batchnorm()


@torch.no_grad()
def start_near_population(model: nn.Module, gain: float = 0.1) -> list[str]:
    """Make the training of a converted, pretrained network start near frozen batch normalization.

    Each norm then predicts its pretrained statistics: the transition A is 0, the process noise R is the pretrained
    variance, and a parameter `center` is the pretrained mean. Norms without a norm below get them as their initial
    belief. With a low gain q, the belief is close to these statistics. With q = 0 the network is frozen batch
    normalization, in all modes and in training. Outputs with `population` statistics do not change. Create the
    optimizer afterwards, because there are new parameters.

    Args:
        model: a network from `convert`, or with a converted part.
        gain: the gain q of all norms at the start, from 0 to 1. A gain of 0 does not learn; `LEARNING_GAIN` does.

    Returns:
        The names of the norms with these initial values. Other norms were never trained and keep those of `convert`.
    """
    every = ((name, norm) for name, norm in model.named_modules() if isinstance(norm, BatchKalmanNorm))
    # Those whose running statistics are not at their initial values.
    norms = {n: m for n, m in every if m.centered and bool(m.running_mean.any() or (m.running_var != 1).any())}
    if not norms:
        raise InputError(
            "no norm of this network can start near its population: pass a pretrained network from bkn_zoo.convert."
        )
    if getattr(model, "standardized_weights", False):
        raise ConversionError(
            "the weights of this network were standardized after its pretraining, so that its population statistics do "
            "not fit: convert it without standardized_weights."
        )
    check_gain(gain)
    for norm in norms.values():
        norm.take_center()
        norm.start_near_batchnorm()
        norm.set_gain(gain)
    return list(norms)
