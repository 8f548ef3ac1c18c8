"""ResNet101 (He et al. 2016), with torchvision's layout and parameter names."""

from torch import Tensor, nn

from bkn_zoo.kernels.pool import max_pool
from bkn_zoo.models.network import Network, State, global_average, initialize
from bkn_zoo.models.registry import NormFactory, register
from bkn_zoo.modes import Statistics


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 with four times the width; the sum passes on the belief of the main branch."""

    expansion = 4

    def __init__(self, make_norm: NormFactory, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = make_norm(width, in_channels)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = make_norm(width, width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = make_norm(out_channels, width)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, make_norm(out_channels, in_channels))

    def forward(self, state: State, statistics: Statistics) -> State:
        x, belief = state
        shortcut = x
        if self.downsample is not None:
            conv, norm = self.downsample
            shortcut, _ = norm(conv(x), belief, statistics)
        x, belief = self.bn1(self.conv1(x), belief, statistics, relu=True)
        x, belief = self.bn2(self.conv2(x), belief, statistics, relu=True)
        return self.bn3(self.conv3(x), belief, statistics, residual=shortcut, relu=True)


class ResNet(Network):
    stride = 32

    def __init__(self, make_norm: NormFactory, depths: tuple[int, int, int, int], num_classes: int) -> None:
        super().__init__(num_classes)
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = make_norm(64, None)
        self.layer1 = self._stage(make_norm, 64, 64, depths[0], stride=1)
        self.layer2 = self._stage(make_norm, 256, 128, depths[1], stride=2)
        self.layer3 = self._stage(make_norm, 512, 256, depths[2], stride=2)
        self.layer4 = self._stage(make_norm, 1024, 512, depths[3], stride=2)
        self.fc = nn.Linear(2048, num_classes)
        initialize(self)

    @staticmethod
    def _stage(make_norm: NormFactory, in_channels: int, width: int, depth: int, stride: int) -> nn.ModuleList:
        blocks = [Bottleneck(make_norm, in_channels, width, stride)]
        blocks += [Bottleneck(make_norm, width * Bottleneck.expansion, width) for _ in range(depth - 1)]
        return nn.ModuleList(blocks)

    def features(self, images: Tensor, statistics: Statistics) -> Tensor:
        x, belief = self.bn1(self.conv1(images), None, statistics, relu=True)
        x = max_pool(x, 3, 2, 1)  # frees the larger x, which no backward pass needs
        state = x, belief
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                state = block(state, statistics)
        return state[0]

    def head(self, x: Tensor) -> Tensor:
        return self.fc(global_average(x))


@register(num_classes=1000)
def resnet101(make_norm: NormFactory, num_classes: int) -> Network:
    return ResNet(make_norm, (3, 4, 23, 3), num_classes)
