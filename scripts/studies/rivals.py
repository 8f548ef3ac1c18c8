"""Norms that others use with single images, for comparisons with BKN: EvoNorm-S0 (Liu et al. 2020), FRN (Singh &
Krishnan 2019). The layers are timm's."""

import math
from typing import Any

from timm.layers import EvoNorm2dS0, FilterResponseNormTlu2d
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.models.registry import NORMS, NormFactory, without_belief


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


def evonorm() -> NormFactory:
    """EvoNorm-S0 with 32 groups, or as many as divide the channels."""
    return without_belief(lambda channels, _: Rival(EvoNorm2dS0(channels, groups=math.gcd(32, channels))))


def filter_response_norm() -> NormFactory:
    """FRN with its thresholded linear unit."""
    return without_belief(lambda channels, _: Rival(FilterResponseNormTlu2d(channels)))


NORMS["evonorm"] = evonorm
NORMS["frn"] = filter_response_norm
