"""Learns Kalman parameters without labels, from the network's own outputs."""

import math
from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.conversion.batchnorm import start_near_population
from bkn_zoo.errors import InputError
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm, no_weight_decay
from bkn_zoo.norms.recalibration import images_of
from bkn_zoo.norms.running import left_in_its_modes
from bkn_zoo.progress import bar
from bkn_zoo.torch_internals import tree_leaves

GAIN_RATE = 10.0
"""The learning rate of gains, relative to the other parameters. Adam changes each parameter by about its learning rate
per step, and the best gain may be far from 0.02."""


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

    The target is the network's own output for an image with `population` statistics. The student is the same network
    with `sample` statistics. Nothing else changes, nor do the outputs with `population` statistics. The parameters also
    suit `expected`: the deviations of an image are one n-th as large in all norms, and A is linear.

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
            model.eval()  # not chained, because a custom train() may return nothing
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
