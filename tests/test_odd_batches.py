"""Batches whose last statistics group is smaller: the last batch of an epoch, or any batch."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import InputError, kernels
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, Statistics


def test_converted_network_trains_with_a_last_batch_of_three():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    network = bkn_zoo.convert(network, statistics_batch_size=2, start="scratch")
    loader = torch.utils.data.DataLoader(torch.randn(7, 3, 8, 8), batch_size=4)
    for images in loader:
        network(images).square().sum().backward()
    assert all(value.grad is not None for value in network.parameters())
    assert network[4].num_batches_tracked == 2


def test_a_last_group_with_one_value_per_channel_is_refused():
    layer = BatchNorm2d(3)
    layer(torch.randn(4, 3, 1, 1), None, Statistics("batch", 2))
    with pytest.raises(InputError, match="one value per channel"):
        layer(torch.randn(5, 3, 1, 1), None, Statistics("batch", 2))


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_kernels_leave_odd_batches_to_pytorch(make_belief):
    layer = BatchKalmanNorm2d(3, 4)
    x, prior = torch.randn(3, 3, 4, 4), make_belief(2, 4, torch.float32)
    wanted = copy.deepcopy(layer)(x, prior, Statistics("batch", 2))
    with kernels.use("triton"):
        assert_close(layer(x, prior, Statistics("batch", 2)), wanted)
