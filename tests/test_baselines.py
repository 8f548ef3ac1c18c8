"""The norms that BKN is compared with: Batch Renormalization and group normalization."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bkn_zoo.norms import BatchRenorm2d


def some_images():
    return (1 + 2 * torch.randn(4, 6, 5, 5)).double()


def twin_of(layer):
    """PyTorch's batch normalization with the layer's weights and running averages."""
    twin = nn.BatchNorm2d(6, eps=layer.eps, momentum=layer.momentum).double()
    twin.load_state_dict({name: layer.state_dict()[name] for name in twin.state_dict()})
    return twin


def assert_same_step(layer, expected, x):
    """Output and gradients of a layer are those behind `expected`, which has the same leaves."""
    y, inputs = layer(x)[0], [x, layer.weight, layer.bias]
    grad_y = torch.randn_like(y)
    assert_close(y, expected)
    assert_close(torch.autograd.grad(y, inputs, grad_y), torch.autograd.grad(expected, inputs, grad_y))


# Batch Renormalization


LIMITS = [
    (0, 1.0, 0.0), (5_000, 1.0, 0.0), (15_000, 1 + 2 * 10 / 35, 2.5), (22_500, 2.0, 4.375),
    (25_000, 1 + 2 * 20 / 35, 5.0), (40_000, 3.0, 5.0), (1_000_000, 3.0, 5.0),
]  # fmt: skip


def test_limits_of_brn_widen_step_by_step_as_in_ioffe_2017():
    layer = BatchRenorm2d(3)
    for step, r_max, d_max in LIMITS:
        layer.num_batches_tracked.fill_(step)
        assert [limit.item() for limit in layer.limits()] == pytest.approx([r_max, d_max])
    layer = BatchRenorm2d(6, warmup=2, r_steps=4, d_steps=3).double()
    seen = []
    for _ in range(5):
        seen.append(tuple(limit.item() for limit in layer.limits()))
        layer(some_images())
    layer.eval()(some_images())
    assert seen == [(1, 0), (1, 0), (1, 0), (2, 5), (3, 5)]
    assert layer.num_batches_tracked == 5


def test_with_r_max_1_and_d_max_0_brn_is_batch_norm_in_training(make_norm):
    layer = make_norm("brn", 6)
    layer.num_batches_tracked.zero_()
    twin = twin_of(layer)
    twin.weight, twin.bias = layer.weight, layer.bias
    for _ in range(3):
        x = some_images().requires_grad_()
        assert_same_step(layer, twin(x), x)
    assert_close(layer.running_mean, twin.running_mean)
    assert_close(layer.running_var, twin.running_var)


@pytest.mark.parametrize("step", [0, 12_000, 40_000])
def test_brn_clips_r_and_d_and_sends_no_gradient_through_them(make_norm, step):
    layer = make_norm("brn", 6)
    layer.num_batches_tracked.fill_(step)
    mean, std = torch.tensor([9.0, 0.0, -9.0, 1.0, 0.0, 3.0]), torch.tensor([4.0, 0.01, 1.0, 0.1, 9.0, 2.0])
    x = (mean[:, None, None] + std[:, None, None] * torch.randn(4, 6, 5, 5)).double().requires_grad_()
    r_max, d_max = (limit.item() for limit in layer.limits())
    mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    std, running_std = torch.sqrt(var + layer.eps), torch.sqrt(layer.running_var + layer.eps)[:, None, None]
    r = (std / running_std).clamp(1 / r_max, r_max).detach()
    d = ((mean - layer.running_mean[:, None, None]) / running_std).clamp(-d_max, d_max).detach()
    normal = (x - mean) / std * r + d
    assert_same_step(layer, normal * layer.weight[:, None, None] + layer.bias[:, None, None], x)


# Group normalization


@pytest.mark.parametrize(
    ("channels", "size", "groups"), [(64, 0, 32), (48, 0, 16), (7, 0, 1), (64, 16, 4), (24, 16, 3), (7, 16, 7)]
)
def test_the_group_norm_twin_is_group_norm(make_norm, channels, size, groups):
    layer = make_norm("gn", channels, **({"channels_per_group": size} if size else {}))
    twin = nn.GroupNorm(groups, channels).double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, channels, 4, 4).double()
    assert_close(layer(x)[0], twin(x))
