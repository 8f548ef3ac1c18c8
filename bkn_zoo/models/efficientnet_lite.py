"""EfficientNet-Lite 0, 1 and 2 (Tan & Le 2019; the Lite variants by Google), with timm's parameter names.

The Lite variants use ReLU6 for every activation, no squeeze-and-excitation, and a stem and a head of fixed width.
Padding is TensorFlow's "same", with the odd pixel at the right and at the bottom, so TensorFlow's weights can be used.
"""

import math
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.models.network import Network, State, global_average, initialize
from bkn_zoo.models.registry import NormFactory, register
from bkn_zoo.modes import Statistics

EPS = 1e-3
"""The eps of every norm: TensorFlow's default."""

STAGES = (
    (1, 3, 1, 1, 16),
    (6, 3, 2, 2, 24),
    (6, 5, 2, 2, 40),
    (6, 3, 2, 3, 80),
    (6, 5, 1, 3, 112),
    (6, 5, 2, 4, 192),
    (6, 3, 1, 1, 320),
)
"""Expansion, kernel size, stride, blocks and channels of each stage of Lite0."""


def same_conv(in_channels: int, out_channels: int, kernel: int, stride: int, groups: int = 1) -> nn.Conv2d:
    """A convolution for inputs from `pad_same`; with stride 1 the convolution itself pads both sides equally."""
    padding = kernel // 2 if stride == 1 else 0
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False)


def pad_same(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Pad as TensorFlow does, so that `conv` with a stride above 1 returns ceil(size / stride) positions."""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    if stride == 1:
        return x
    sides = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        sides += [total // 2, total - total // 2]
    return F.pad(x, sides)


class InvertedResidual(nn.Module):
    """Expand (1x1), filter each channel (depthwise), project (1x1, linear), add the input if the shape allows it.

    timm numbers the norms by their order, so a block without expansion begins with the depthwise one.
    """

    def __init__(
        self, make_norm: NormFactory, in_channels: int, out_channels: int, expansion: int, kernel: int, stride: int
    ) -> None:
        super().__init__()
        width = in_channels * expansion
        self.expands = expansion != 1
        self.residual = stride == 1 and in_channels == out_channels
        if self.expands:
            self.conv_pw = nn.Conv2d(in_channels, width, 1, bias=False)
            self.bn1 = make_norm(width, in_channels, eps=EPS)
        self.conv_dw = same_conv(width, width, kernel, stride, groups=width)
        depthwise = make_norm(width, width, eps=EPS, depthwise=True)
        project, linear = nn.Conv2d(width, out_channels, 1, bias=False), make_norm(out_channels, width, eps=EPS)
        if self.expands:
            self.bn2, self.conv_pwl, self.bn3 = depthwise, project, linear
        else:
            self.bn1, self.conv_pw, self.bn2 = depthwise, project, linear

    def forward(self, state: State, statistics: Statistics) -> State:
        x, belief = state
        shortcut = x if self.residual else None
        if self.expands:
            x, belief = _relu6(self.bn1(self.conv_pw(x), belief, statistics))
            x, belief = _relu6(self.bn2(self.conv_dw(pad_same(x, self.conv_dw)), belief, statistics))
            return self.bn3(self.conv_pwl(x), belief, statistics, residual=shortcut)
        x, belief = _relu6(self.bn1(self.conv_dw(pad_same(x, self.conv_dw)), belief, statistics))
        return self.bn2(self.conv_pw(x), belief, statistics, residual=shortcut)


def _relu6(state: State) -> State:
    return F.relu6(state[0]), state[1]


class EfficientNetLite(Network):
    """Stem, seven stages of inverted residuals, head; `width` and `depth` are factors of channels and blocks."""

    stride = 32

    def __init__(self, make_norm: NormFactory, width: float, depth: float, dropout: float, num_classes: int) -> None:
        super().__init__(num_classes)
        self.conv_stem = same_conv(3, 32, 3, 2)
        self.bn1 = make_norm(32, None, eps=EPS)
        stages, channels = [], 32
        for number, (expansion, kernel, stride, repeats, base) in enumerate(STAGES):
            wide = rounded(base * width)
            count = repeats if number in (0, len(STAGES) - 1) else math.ceil(repeats * depth)
            blocks = []
            for _ in range(count):
                blocks.append(InvertedResidual(make_norm, channels, wide, expansion, kernel, stride))
                channels, stride = wide, 1
            stages.append(nn.ModuleList(blocks))
        self.blocks = nn.ModuleList(stages)
        self.conv_head = nn.Conv2d(channels, 1280, 1, bias=False)
        self.bn2 = make_norm(1280, channels, eps=EPS)
        self.dropout = dropout
        self.classifier = nn.Linear(1280, num_classes)
        initialize(self)

    def features(self, images: Tensor, statistics: Statistics) -> Tensor:
        state = _relu6(self.bn1(self.conv_stem(pad_same(images, self.conv_stem)), None, statistics))
        for stage in self.blocks:
            for block in cast(nn.ModuleList, stage):
                state = block(state, statistics)
        x, belief = state
        return _relu6(self.bn2(self.conv_head(x), belief, statistics))[0]

    def head(self, x: Tensor) -> Tensor:
        x = global_average(x)
        return self.classifier(F.dropout(x, self.dropout) if self.training else x)


def rounded(channels: float) -> int:
    """Round to a multiple of eight, at most a tenth below the exact number."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


@register(num_classes=1000)
def efficientnet_lite0(make_norm: NormFactory, num_classes: int) -> Network:
    return EfficientNetLite(make_norm, 1.0, 1.0, 0.2, num_classes)


@register(num_classes=1000)
def efficientnet_lite1(make_norm: NormFactory, num_classes: int) -> Network:
    return EfficientNetLite(make_norm, 1.0, 1.1, 0.2, num_classes)


@register(num_classes=1000)
def efficientnet_lite2(make_norm: NormFactory, num_classes: int) -> Network:
    return EfficientNetLite(make_norm, 1.1, 1.2, 0.3, num_classes)
