"""Starts from a network with batch normalization: loads its weights, and learns Kalman parameters without labels."""

import math
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.errors import ConversionError, InputError
from bkn_zoo.models.network import Network, check_tensors
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, check_gain, no_weight_decay
from bkn_zoo.norms.recalibration import images_of
from bkn_zoo.norms.running import RunningNorm, left_in_its_modes
from bkn_zoo.progress import bar
from bkn_zoo.torch_internals import tree_leaves

LEARNING_GAIN = 0.01
"""The smallest initial value of a gain that should learn."""

GAIN_RATE = 10.0
"""The learning rate of gains, relative to the other parameters: the best gain may be far from 0.02."""


def load_batchnorm_weights(model: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Load the state dict of a `_bn` network, or of torchvision's ResNet, into the same network with BKN (or BN).

    Afterwards the outputs with `population` statistics are those of the BN network. In layers with a prior, the gain q
    is `BATCHNORM_GAIN`, the transition A is 0, and the process noise R is the running variance (an R that all layers
    share keeps its value). If a tensor is missing, superfluous or has the wrong shape, nothing changes.
    """
    if model.name.rpartition("_")[2] not in ("bkn", "bn"):
        raise InputError(f"{model.name} does not normalize with running statistics as BN does: use the _bkn network.")
    layers = {prefix: layer for prefix, layer in model.named_modules() if isinstance(layer, RunningNorm)}
    # A, R and q, and centers.
    not_needed = no_weight_decay(model)
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
    belief. Outputs with `population` statistics do not change. Create the optimizer afterwards, because there are new
    parameters.

    Args:
        model: a network from `convert`, or with a converted part.
        gain: the gain q of all norms. A low gain keeps the belief close to the pretrained statistics. With 0, the
            network is frozen batch normalization, in all modes and in training; it learns from `LEARNING_GAIN` on.

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


def learn_statistics(
    model: nn.Module,
    images: Iterable[Any],
    *,
    epochs: int = 20,
    lr: float = 1e-3,
    gain: float | None = 0.02,
    jitter: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> list[float]:
    """Learn the transition A, process noise R, gain q and center of all norms without labels, and nothing else.

    The target is the network's own output for an image with `population` statistics, which does not change. The student
    is the same network with `sample` statistics. The parameters also suit `expected` statistics.

    Args:
        model: a pretrained network from `bkn_zoo.convert`.
        images: batches of unlabelled images, or tuples that begin with them. They are iterated once per epoch, so pass
            a DataLoader or a list, not a generator.
        lr: Adam's learning rate, ten times as large for gains, with a cosine schedule to zero.
        gain: initial gain of all norms for `start_near_population`; None keeps the current parameters.
        jitter: a function of the student's images only, whose effect the student learns to undo.
        loss: a function of the student's output and the target; by default the squared error over the variance of the
            target.

    Returns:
        The mean loss of each epoch.
    """
    if gain is not None:
        start_near_population(model, gain)
    norms = {name: m for name, m in model.named_modules() if isinstance(m, BatchKalmanNorm) and m.has_prior}
    fixed = [name for name, norm in norms.items() if norm.gain.min() in (0, 1)]
    if fixed or not norms:
        raise InputError(
            f"the gain of {', '.join(fixed) or 'this network'} cannot learn: pass a network from bkn_zoo.convert, "
            "and a gain between 0 and 1."
        )
    learning = no_weight_decay(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in learning}
    gains = [parameter for name, parameter in parameters.items() if name.endswith("raw_gain")]
    others = [parameter for name, parameter in parameters.items() if not name.endswith("raw_gain")]
    optimizer = torch.optim.Adam([{"params": others, "lr": lr}, {"params": gains, "lr": GAIN_RATE * lr}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    total = epochs * len(images) if isinstance(images, Sized) else None
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    losses: list[float] = []
    try:
        with left_in_its_modes(model), bar(total, "learning statistics", "batch") as done:
            # Not chained, because a custom train() may return nothing.
            model.eval()
            model.requires_grad_(False)
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            for _ in range(epochs):
                values = []
                for batch in images:
                    x = images_of(batch).to(gains[0].device)
                    with torch.no_grad():
                        target = model(x, statistics="population")
                    output = model(x if jitter is None else jitter(x), statistics="sample")
                    value = (loss or relative_error)(output, target)
                    optimizer.zero_grad()
                    value.backward()
                    optimizer.step()
                    values.append(value.detach())
                    done(1)
                if not values:
                    raise InputError("there are no images in this epoch: pass a list or a DataLoader, not a generator.")
                losses.append(float(torch.stack(values).mean()))
                if not math.isfinite(losses[-1]):
                    raise InputError(f"the loss is {losses[-1]}: check the images, or choose a smaller learning rate.")
                schedule.step()
        return losses
    finally:
        for parameter, requires_grad in before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = None


def relative_error(output: Any, target: Any) -> Tensor:
    """The squared error over the variance of the target, summed over the tensors of an output."""
    pairs = zip(tree_leaves(output), tree_leaves(target), strict=True)
    errors = [
        (y.float() - t.float()).square().mean() / t.float().var(correction=0).clamp_min(1e-12)
        for y, t in pairs
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    return torch.stack(errors).sum()
