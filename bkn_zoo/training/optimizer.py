"""The optimizer of a recipe: groups of parameters with weight decay and learning rates, and the schedule."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.norms.batch_kalman import no_weight_decay
from bkn_zoo.training.recipes import Recipe


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Weight decay for convolutions and linear layers only; A, R and q have their own learning rate."""
    groups: dict[str, list[Tensor]] = {"decayed": [], "plain": [], "kalman": []}
    kalman = no_weight_decay(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kalman:
            groups["kalman"].append(parameter)
        else:
            groups["decayed" if parameter.ndim >= 2 else "plain"].append(parameter)
    decay = {"decayed": recipe.weight_decay, "plain": 0.0, "kalman": 0.0}
    scale = {"decayed": 1.0, "plain": 1.0, "kalman": recipe.kalman_lr}
    return [
        {"params": members, "weight_decay": decay[name], "scale": scale[name]}
        for name, members in groups.items()
        if members
    ]


def make_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    # A learning rate on the device can change between replays of a CUDA graph.
    lr: Any = torch.zeros((), device=device)
    groups = [{**group, "lr": lr.clone()} for group in parameter_groups(model, recipe)]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=recipe.momentum, nesterov=True, fused=True)
    on_gpu = device.type == "cuda"  # a CUDA graph may capture its steps
    adamw: Any = torch.optim.AdamW(groups, lr=lr, betas=(recipe.momentum, 0.999), fused=True, capturable=on_gpu)
    adamw._warned_capturable_if_run_uncaptured = True  # no warning about the necessary steps before the capture
    return adamw


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate at `step` of `steps`."""
    up = max(round(recipe.warmup * steps), 1)
    if step < up:
        return recipe.lr * (step + 1) / up
    done = (step + 1 - up) / max(steps - up, 1)
    down = 1 - done if recipe.schedule == "one_cycle" else (1 + math.cos(math.pi * done)) / 2
    return recipe.lr * down
