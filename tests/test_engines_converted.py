"""Converted networks in OpenVINO: their own code writes the graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from bkn_zoo import convert
from bkn_zoo.inference import engines
from bkn_zoo.inference.engines import OpenVINOEngine, TorchEngine, create_engine
from bkn_zoo.norms import MODES

pytestmark = pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")


def photographs(count, side):
    return torch.randn(count, 3, 1, 1) + (0.3 + torch.rand(count, 3, 1, 1)) * torch.randn(count, 3, side, side)


class Between(nn.Module):
    """A function between two convolutions with norms, and what follows up to one row for each image."""

    def __init__(self, function, groups=1, outputs=8):
        super().__init__()
        self.function = function
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        self.second = nn.Sequential(nn.LazyConv2d(outputs, 3, groups=groups), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return self.second(self.function(self.first(x))).flatten(1)


def network(model, away_from_start, side=9):
    torch.manual_seed(0)
    model(photographs(2, side))  # which gives lazy layers their sizes
    converted = convert(model, example=photographs(2, side), statistics_batch_size=2)
    away_from_start(converted)
    converted.train()(photographs(4, side))
    return converted.eval()


@torch.no_grad()
def assert_agrees(engine, model, side=9, modes=MODES):
    images = photographs(2, side)
    for mode in modes:
        wanted = model(images, statistics=mode)
        assert_close(engine(images, mode), wanted, atol=1e-3 * wanted.abs().max().item(), rtol=0)


def shuffle(x):
    images, channels, *size = x.size()
    x = x.view(images, 2, channels // 2, *size)
    return torch.transpose(x, 1, 2).contiguous().view(images, -1, *size)


def changed_in_place(x):
    y = F.relu(x, inplace=True)
    return y + x


FUNCTIONS = {
    "relu in place": changed_in_place,
    "relu_": lambda x: x.relu_() * x,
    "sum in place": lambda x: x.add_(x * 2) - x,
    "silu": F.silu,
    "hardswish": lambda x: F.hardswish(x, True),
    "clamp": lambda x: x.clamp(min=-0.5),
    "excitation": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "numbers": lambda x: 2 - (1 + x * 3) / 2,
    "shuffle": shuffle,
    "halves": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    "padded": lambda x: F.pad(x, (1, 2, 0, 1)),
    "permuted": lambda x: F.linear(x.permute(0, 2, 3, 1), torch.eye(8) * 2).permute(0, 3, 1, 2),
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_by_a_network_s_own_code_agrees(name, away_from_start):
    model = network(Between(FUNCTIONS[name]), away_from_start)
    engine = OpenVINOEngine(model)
    assert_agrees(engine, model)
    assert len(engine._prepared) == 2  # `sample` and `expected` share one


@pytest.mark.parametrize(("groups", "outputs"), [(2, 8), (8, 8), (4, 16)])
def test_a_block_diagonal_transition_agrees(groups, outputs, away_from_start):
    model = network(Between(F.relu, groups, outputs), away_from_start)
    engine = OpenVINOEngine(model)
    assert_agrees(engine, model)


REFUSED = {
    "a function": lambda x: torch.cumsum(x, 1),
    "a change of what another shows": lambda x: x.flatten(1).relu_() is None or x,
    "a value that decides": lambda x: x * 2 if x.sum() > 0 else x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_code_is_refused_and_auto_chooses_pytorch(name, away_from_start):
    model = network(Between(REFUSED[name]), away_from_start)
    with pytest.raises(engines.InputError, match="choose engine='torch'"):
        OpenVINOEngine(model)(photographs(1, 9), "population")
    assert type(create_engine(model)) is TorchEngine


def test_auto_chooses_openvino_for_translatable_networks(away_from_start):
    assert type(create_engine(network(Between(F.relu), away_from_start))) is OpenVINOEngine
