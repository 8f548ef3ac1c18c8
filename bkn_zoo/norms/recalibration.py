"""Recomputes running averages, for weights that were not the result of a training step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.norms.running import RunningNorm, left_in_its_modes
from bkn_zoo.torch_internals import AnyBatchNorm


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any], device: torch.device | str | None = None) -> None:
    """Replace the running averages by those over `batches`, which pass through the model in training mode.

    Use it for weights that were averaged, pruned or replaced, instead of `torch.optim.swa_utils.update_bn`, which does
    not know the layers of this package. If it fails, it restores the previous averages. Norms that are not called, or
    that the model's own `train` leaves in evaluation mode, keep theirs; others are recomputed, also in that mode.

    Args:
        batches: batches of images, or tuples that begin with them, as large as in training.
        device: where to move the images; None does not move them.
    """
    found = (module for module in model.modules() if isinstance(module, RunningNorm | AnyBatchNorm))
    norms: list[Any] = [norm for norm in found if norm.track_running_stats]
    if not norms:
        raise InputError("this model has no running averages, so there is nothing to recalibrate.")
    momenta = [norm.momentum for norm in norms]
    before = {norm: [(buffer, buffer.clone()) for buffer in norm.buffers()] for norm in norms}
    steps = [norm.num_batches_tracked.clone() for norm in norms]
    unchanged = norms
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        empty = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}
        seen = 0
        with left_in_its_modes(model):
            model.train()
            for batch in batches:
                images = images_of(batch)
                model(images if device is None else images.to(device))
                seen += 1
        if not seen:
            raise InputError("batches is empty: pass batches of training images.")
        if any(isinstance(norm, RunningNorm) and norm.skipped_steps and not norm.num_batches_tracked for norm in norms):
            raise InputError("a norm received no finite batch: check the data and the weights.")
        unchanged = [norm for norm in norms if all(map(torch.equal, norm.buffers(), empty[norm]))]
    finally:
        for buffer, value in (pair for norm in unchanged for pair in before[norm]):
            buffer.copy_(value)
        for norm, momentum, step in zip(norms, momenta, steps, strict=True):
            norm.momentum = momentum
            if momentum is not None:  # without momentum, it counts the steps of the new average
                norm.num_batches_tracked.copy_(step)


def images_of(batch: Any) -> Tensor:
    """The images of a batch, which may be the first element of a tuple."""
    images: Any = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(images, Tensor):
        raise InputError(f"a {type(images).__name__} is not a batch of images: pass tensors, or tuples with one first.")
    return images
