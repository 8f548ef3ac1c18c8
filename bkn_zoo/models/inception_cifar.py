"""The paper's small network for CIFAR: one convolution, three Inception blocks at 16 x 16, a fully connected layer.

The table in the paper does not specify the first kernel (here 3x3 with stride 2, which gives 16 x 16) and the pooling
(here 3x3 maximum with stride 1, as in GoogLeNet, where these blocks come from).
"""

import torch
from torch import Tensor, nn

from bkn_zoo.models.inception import Inception, MaxPool
from bkn_zoo.models.network import Branch, ConvNorm, Network, global_average, initialize
from bkn_zoo.models.registry import NormFactory, register
from bkn_zoo.modes import Statistics


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
