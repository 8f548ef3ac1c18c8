"""What all benchmarks share: contestants that take turns, and networks to enter."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import bkn_zoo
from bkn_zoo.norms.running import RunningNorm


class Contestant(NamedTuple):
    row: dict[str, Any]
    step: Callable[..., object]


def timed(step: Callable[[], object], steps: int) -> float:
    """Milliseconds per step, over `steps` of them."""
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def photographs(size: int) -> torch.Tensor:
    """Four random images, each with a brightness and a contrast of its own, as photographs have."""
    return torch.randn(4, 3, 1, 1) + (0.5 + torch.rand(4, 3, 1, 1)) * torch.randn(4, 3, size, size)


@torch.no_grad()
def calibrated(name: str, images: torch.Tensor) -> bkn_zoo.Network:
    """An untrained network that remembers statistics of images, in evaluation mode."""
    model = bkn_zoo.create_model(name).to(images.device)
    model.statistics_batch_size = 2
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    for share in (1.0, 0.5):
        for norm in norms:
            norm.momentum = share
        model(images + torch.randn_like(images))
    for name, parameter in model.named_parameters():
        if "transition" in name and not parameter.any():  # as of a converted network: a trained one has values there
            parameter.normal_(0, 0.1 / parameter.shape[-1] ** 0.5)
    return model.eval()
