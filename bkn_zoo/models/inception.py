"""The Inception networks: parallel branches, concatenated with their beliefs.

`inception_cifar` is the paper's small network: one convolution, three Inception blocks at 16 x 16, a fully connected
layer. The table in the paper does not specify the first kernel (here 3x3 with stride 2, which gives 16 x 16) and the
pooling (here 3x3 maximum with stride 1, as in GoogLeNet, where these blocks come from).

`inception_v2` is the network of the batch normalization paper (Ioffe & Szegedy 2015), in the variant of the available
weights: 608, 608 and 1056 channels after 4c, 4d and 4e.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.kernels.pool import average_pool, max_pool
from bkn_zoo.models.network import Branch, ConvNorm, Network, State, global_average, initialize
from bkn_zoo.models.registry import NormFactory, register
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


class InceptionCifar(Network):
    """The paper's network; `width` is a factor of all channels, to compare networks with equally many parameters."""

    stride = 2

    def __init__(self, make_norm: NormFactory, num_classes: int, width: float = 1.0) -> None:
        super().__init__(num_classes)

        def wide(channels: int) -> int:
            return 8 * round(width * channels / 8)

        channels = wide(32)
        self.conv = ConvNorm(make_norm, 3, channels, 3, stride=2, first=True)

        def block(one: int, three: tuple[int, int], five: tuple[int, int], out: int) -> Inception:
            nonlocal channels
            inputs, channels = channels, wide(one) + wide(three[1]) + wide(five[1]) + wide(out)
            branches = [Branch(ConvNorm(make_norm, inputs, wide(one), 1))]
            for kernel_size, (reduced, full) in ((3, three), (5, five)):
                reduce = ConvNorm(make_norm, inputs, wide(reduced), 1)
                branches.append(Branch(reduce, ConvNorm(make_norm, wide(reduced), wide(full), kernel_size)))
            return Inception([*branches, Branch(MaxPool(), ConvNorm(make_norm, inputs, wide(out), 1))])

        self.inception_a = block(64, (96, 128), (16, 32), 32)
        self.inception_b = block(128, (128, 192), (32, 96), 64)
        self.inception_c = block(192, (96, 208), (16, 48), 64)
        self.hidden = nn.Linear(channels, 1000)
        self.fc = nn.Linear(1000, num_classes)
        initialize(self)

    def features(self, images: Tensor, statistics: Statistics) -> Tensor:
        state = self.conv((images, None), statistics)
        for block in (self.inception_a, self.inception_b, self.inception_c):
            state = block(state, statistics)
        return state[0]

    def head(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.hidden(global_average(x))))


@register(num_classes=10)
def inception_cifar(make_norm: NormFactory, num_classes: int) -> Network:
    return InceptionCifar(make_norm, num_classes)


class InceptionV2(Network):
    stride = 32

    def __init__(self, make_norm: NormFactory, num_classes: int) -> None:
        super().__init__(num_classes)
        self.conv1 = ConvNorm(make_norm, 3, 64, 7, stride=2, first=True)
        self.conv2_reduce = ConvNorm(make_norm, 64, 64, 1)
        self.conv2 = ConvNorm(make_norm, 64, 192, 3)
        self.halve = HalvingMaxPool()

        def block(inputs: int, one: int, three: tuple[int, int], double: tuple[int, int], pool: str, out: int):  # type: ignore[no-untyped-def]
            """1x1, 1x1-3x3, 1x1-3x3-3x3 and pool-1x1; without a 1x1 (`one` = 0) it halves the size."""
            stride = 1 if one else 2
            branches = [Branch(ConvNorm(make_norm, inputs, one, 1))] if one else []
            reduced, wide = three
            reduce = ConvNorm(make_norm, inputs, reduced, 1)
            branches.append(Branch(reduce, ConvNorm(make_norm, reduced, wide, 3, stride)))
            reduced, wide = double
            reduce, first = ConvNorm(make_norm, inputs, reduced, 1), ConvNorm(make_norm, reduced, wide, 3)
            branches.append(Branch(reduce, first, ConvNorm(make_norm, wide, wide, 3, stride)))
            if not one:
                return Inception([*branches, Branch(HalvingMaxPool())])
            if pool == "avg":
                return Inception([*branches, Branch(ConvNorm(make_norm, inputs, out, 1, pool=AveragePool()))])
            return Inception([*branches, Branch(MaxPool(), ConvNorm(make_norm, inputs, out, 1))])

        self.inception_3a = block(192, 64, (64, 64), (64, 96), "avg", 32)
        self.inception_3b = block(256, 64, (64, 96), (64, 96), "avg", 64)
        self.inception_3c = block(320, 0, (128, 160), (64, 96), "max", 0)
        self.inception_4a = block(576, 224, (64, 96), (96, 128), "avg", 128)
        self.inception_4b = block(576, 192, (96, 128), (96, 128), "avg", 128)
        self.inception_4c = block(576, 160, (128, 160), (128, 160), "avg", 128)
        self.inception_4d = block(608, 96, (128, 192), (160, 192), "avg", 128)
        self.inception_4e = block(608, 0, (128, 192), (192, 256), "max", 0)
        self.inception_5a = block(1056, 352, (192, 320), (160, 224), "avg", 128)
        self.inception_5b = block(1024, 352, (192, 320), (192, 224), "max", 128)
        self.fc = nn.Linear(1024, num_classes)
        initialize(self)

    def features(self, images: Tensor, statistics: Statistics) -> Tensor:
        state = self.halve(self.conv1((images, None), statistics))
        state = self.conv2(self.conv2_reduce(state, statistics), statistics)
        state = self.halve(state)
        for name, block in self.named_children():
            if name.startswith("inception_"):
                state = block(state, statistics)
        return state[0]

    def head(self, x: Tensor) -> Tensor:
        return self.fc(global_average(x))


@register(num_classes=1000)
def inception_v2(make_norm: NormFactory, num_classes: int) -> Network:
    return InceptionV2(make_norm, num_classes)
