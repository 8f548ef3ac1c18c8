"""What all networks share: the statistics of a call, the checks on images, the convolution with its norm."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.errors import InputError
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.batch_kalman import OneNoise
from bkn_zoo.norms.kalman import Belief

State = tuple[Tensor, Belief | None]
"""Features and the belief about them, as they travel up a network."""


class Network(OneNoise):
    """A classifier whose norms share one choice of statistics per call.

    Attributes:
        name: its name in the registry.
        norm_options: the options its norm was made with, those that were not given included.
        num_classes: outputs of the classifier.
        statistics_batch_size: images per statistics group in training, and the group that `expected` assumes at
            inference; None means the whole batch.
        default_statistics: what normalizes at inference when a call does not say.
        config: what the checkpoint that it was loaded from says of it.
        revision: the commit of the repository that it was downloaded from.
    """

    stride: int  # of the whole network; smaller images have no positions left at the top
    # A subclass defines these two; here is no definition, since a converted network may have modules of these names.
    features: Callable[[Tensor, Statistics], Tensor]  # images to the top feature map
    head: Callable[[Tensor], Tensor]  # from there to logits

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.name = ""
        self.norm_options: dict[str, Any] = {}
        self.num_classes = num_classes
        self.statistics_batch_size: int | None = None
        self.default_statistics = "population"
        self.config: Any = None
        self.revision: str | None = None

    def forward(self, images: Tensor, statistics: str | None = None) -> Tensor:
        """Logits, (images, classes).

        Args:
            images: (images, 3, height, width), preprocessed.
            statistics: "population", "sample" or "expected"; at inference only.
        """
        self._check(images)
        chosen = choose_statistics(self.training, statistics, self.statistics_batch_size, self.default_statistics)
        if images.shape[0] == 0:  # nothing to take statistics of, and nothing that needs them
            chosen = Statistics("population")
        return self.head(self.features(images, chosen))

    def reset_parameters(self) -> None:
        """Initialize all weights anew, as `to_empty` asks for after a start on the meta device."""
        resets = [getattr(module, "reset_parameters", None) for module in self.modules() if module is not self]
        for reset in filter(None, resets):
            reset()
        initialize(self)

    def _check(self, images: Tensor) -> None:
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images must be (images, 3, height, width), but these are {tuple(images.shape)}.")
        if self.training and images.shape[0] == 0:
            raise InputError("an empty batch has no values to observe in training.")
        if min(images.shape[2:]) < self.stride:
            raise InputError(
                f"images of {images.shape[2]} x {images.shape[3]} are smaller than the network's stride of "
                f"{self.stride}: enlarge them first."
            )
        if not images.is_floating_point():
            raise InputError(f"images must be preprocessed floating point numbers, but these are {images.dtype}.")


class ConvNorm(nn.Module):
    """Convolution, norm, ReLU. The prior is the belief of the norms below, a channel for each input channel.

    Args:
        pool: applied between convolution and norm. Average pooling commutes with a 1x1 convolution, and is cheaper on
            its fewer channels.
    """

    def __init__(
        self,
        make_norm: Any,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        first: bool = False,
        pool: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.pool = pool
        self.norm = make_norm(out_channels, None if first else in_channels)

    def forward(self, state: State, statistics: Statistics) -> State:
        x, belief = state
        x = self.conv(x)
        if self.pool is not None:
            x = self.pool(x)
        return self.norm(x, belief, statistics, relu=True)


class Branch(nn.Sequential):
    """ConvNorms, one after another."""

    def forward(self, state: State, statistics: Statistics) -> State:  # type: ignore[override]
        for layer in self:
            state = layer(state, statistics)
        return state


def initialize(network: nn.Module) -> None:
    """He initialization by fan-out for convolutions; linear layers keep PyTorch's own."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            with torch.no_grad():
                module.weight.mul_(math.sqrt(module.groups))  # PyTorch counts outputs of other groups to the fan-out


def global_average(x: Tensor) -> Tensor:
    # Unlike the mean's, this pooling's gradient comes in the layout of x, and need not be copied.
    return torch.flatten(nn.functional.avg_pool2d(x, x.shape[2:]), 1)
