"""Norms for comparisons with BKN: EvoNorm-S0 (Liu et al. 2020) and FRN (Singh & Krishnan 2019), with timm's layers, and
BN without normalization before the global pooling of inception_cifar."""

import math
from typing import Any

import torch
from timm.layers import EvoNorm2dS0, FilterResponseNormTlu2d
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.models.registry import NORMS, NormFactory, without_belief
from bkn_zoo.norms.baselines import BatchNorm2d

BEFORE_POOLING = {(192, 480), (208, 96), (48, 16), (64, 480)}
"""Channels, and channels of the layer below, of the norms before the global pooling of inception_cifar."""


class Rival(nn.Module):
    """A layer that normalizes and activates, called like a norm of the zoo."""

    carries_belief = True

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, x: Tensor, prior: Any = None, statistics: Any = None, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, None]:
        if residual is not None or not relu:
            raise InputError("this norm contains its activation: use it where a ReLU follows directly.")
        return self.layer(x), None


class ScaleAndShift(nn.Module):
    """A scale and a shift per channel, followed by a ReLU, in place of a norm."""

    carries_belief = True

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.relu(x * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)), None


def plain_before_pooling() -> NormFactory:
    """BN, but for the norms before the pooling of inception_cifar, which only scale and shift."""

    def kind(channels: int, below: int | None, **options: Any) -> nn.Module:
        plain = (channels, below) in BEFORE_POOLING
        return ScaleAndShift(channels) if plain else BatchNorm2d(channels, below, **options)

    return without_belief(kind)


def evonorm() -> NormFactory:
    """EvoNorm-S0 with 32 groups, or as many as divide the channels."""
    return without_belief(lambda channels, _: Rival(EvoNorm2dS0(channels, groups=math.gcd(32, channels))))


def filter_response_norm() -> NormFactory:
    """FRN with its thresholded linear unit."""
    return without_belief(lambda channels, _: Rival(FilterResponseNormTlu2d(channels)))


NORMS["bnplain"] = plain_before_pooling
NORMS["evonorm"] = evonorm
NORMS["frn"] = filter_response_norm
