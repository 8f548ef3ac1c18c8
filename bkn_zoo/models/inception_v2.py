"""Inception-v2 as in the batch normalization paper (Ioffe & Szegedy 2015), in the variant of the available weights:
608, 608 and 1056 channels after 4c, 4d and 4e."""

from torch import Tensor, nn

from bkn_zoo.models.inception import AveragePool, HalvingMaxPool, Inception, MaxPool
from bkn_zoo.models.network import Branch, ConvNorm, Network, global_average, initialize
from bkn_zoo.models.registry import NormFactory, register
from bkn_zoo.modes import Statistics


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
