"""The block of both Inception networks: parallel branches, concatenated with their beliefs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.kernels.pool import average_pool, max_pool
from bkn_zoo.models.network import Branch, State
from bkn_zoo.modes import Statistics
from bkn_zoo.norms.kalman import concatenate


class Inception(nn.Module):
    """Branches side by side, concatenated."""

    def __init__(self, branches: list[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, state: State, statistics: Statistics) -> State:
        return side_by_side([branch(state, statistics) for branch in self.branches])


def side_by_side(outputs: list[State]) -> State:
    """Features and beliefs of branches, concatenated."""
    return torch.cat([x for x, _ in outputs], dim=1), concatenate([belief for _, belief in outputs])


class MaxPool(nn.Module):
    """3x3 max pooling that keeps the size. The belief stays the same."""

    def forward(self, state: State, statistics: Statistics | None = None) -> State:
        x, belief = state
        return max_pool(x, 3, 1, 1), belief


class HalvingMaxPool(nn.Module):
    """3x3 max pooling with stride 2; windows start at the first pixel, as in the original network.

    An odd size is padded by two, so that the result has the size of a padded stride-2 convolution in another branch.
    Padding with zeros is correct, because the features come from a ReLU. The belief stays the same.
    """

    def forward(self, state: State, statistics: Statistics | None = None) -> State:
        x, belief = state
        height, width = x.shape[2:]
        if height % 2 or width % 2:
            x = F.pad(x, (0, 2 * (width % 2), 0, 2 * (height % 2)))
        return max_pool(x, 3, 2, ceil_mode=True), belief


class AveragePool(nn.AvgPool2d):
    """3x3 average pooling that keeps the size. Folding recognizes its base class: a scale can pass through it."""

    def __init__(self) -> None:
        super().__init__(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return average_pool(x, 3, 1, 1)
