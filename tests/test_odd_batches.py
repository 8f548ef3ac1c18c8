"""Batches whose last statistics group is smaller: the last batch of an epoch, or any batch."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import InputError, kernels
from bkn_zoo.norms import BatchKalmanNorm2d, BatchNorm2d, Belief, Statistics

KINDS = ["bkn", "bn", "brn"]


def groups_of(count, group):
    return [range(start, min(start + group, count)) for start in range(0, count, group)]


@pytest.mark.parametrize(("count", "group"), [(5, 2), (7, 3), (4, 3), (2, 4), (7, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_a_loop_over_groups(kind, count, group, make_norm, make_belief):
    layer = make_norm(kind, 3, 4 if kind == "bkn" else None)
    x, residual = torch.randn(2, count, 3, 4, 4, dtype=torch.float64).requires_grad_()
    parts = groups_of(count, group)
    prior = make_belief(len(parts), 4) if kind == "bkn" else None
    one = copy.deepcopy(layer)
    y, belief = one(x, prior, Statistics("batch", group), residual, relu=True)
    results = []
    for number, part in enumerate(parts):
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        below = None if prior is None else Belief(*(rows[number : number + 1] for rows in prior))
        rows = slice(part.start, part.stop)
        arguments = x[rows], below, Statistics("batch", len(part)), residual[rows], True
        results.append((len(part) / count, buffers, *torch.func.functional_call(layer, buffers, arguments)))
    shares, averages, outputs, beliefs = zip(*results, strict=True)
    assert_close(y, torch.cat(outputs))
    if kind == "bkn":
        assert_close(belief, Belief(*map(torch.cat, zip(*beliefs, strict=True))))
    gradient = torch.randn_like(y)
    together = torch.autograd.grad(y, (x, *one.parameters()), gradient)
    assert_close(together, torch.autograd.grad(torch.cat(outputs), (x, *layer.parameters()), gradient))
    for name in ("running_mean", "running_var", "image_var"):
        wanted = sum(share * buffers[name] for share, buffers in zip(shares, averages, strict=True))
        assert_close(getattr(one, name), wanted)


@pytest.mark.parametrize("name", ["inception_cifar_bkn", "inception_cifar_bn", "inception_cifar_brn"])
def test_networks_train_with_odd_batches(name, shallow_network):
    model = bkn_zoo.create_model(name, 4)
    model.statistics_batch_size = 2
    model(torch.randn(5, 3, 16, 16)).square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_converted_network_trains_with_a_last_batch_of_three():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    network = bkn_zoo.convert(network, statistics_batch_size=2, initial_gain=0.5)
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
