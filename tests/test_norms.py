"""The layers: groups, the residual sum and the ReLU, precision; and the norms that BKN is compared with."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bkn_zoo.norms import BatchKalmanNorm2d, BatchRenorm2d, Belief, Statistics

LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
groupings = pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 9, None])


def gradients(y, grad_y, inputs):
    return list(torch.autograd.grad(y, inputs, grad_y))


# Gain, process noise and sample statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gain_and_process_noise_keep_to_their_ranges(dtype):
    layer = BatchKalmanNorm2d(3, 2, dtype=dtype)
    assert_close(layer.process_noise, torch.ones(3, dtype=dtype))
    for gain in (0.0, 0.1, 0.5, 0.9, 1.0):
        layer.set_gain(gain)
        assert layer.gain.item() == pytest.approx(gain, rel=1e-6)
    for raw in (-15.0, -1.0, 0.0, 3.0, 15.0):
        nn.init.constant_(layer.raw_gain, raw)
        nn.init.constant_(layer.raw_process_noise, raw)
        assert 0 < layer.gain < 1
        assert (layer.process_noise > 0).all()


@pytest.mark.parametrize("kind", ["bkn", "bn", "brn"])
def test_sample_statistics_are_those_of_groups_of_one(make_norm, make_belief, kind):
    layer, x, prior = make_norm(kind, 6, 4), 1 + 2 * torch.randn(3, 6, 4, 3).double(), make_belief(3, 4)
    layer.num_batches_tracked.zero_()  # BRN has no corrections yet
    expected = layer(x, prior, Statistics("batch", 1))
    assert_close(layer.eval()(x, prior, Statistics("sample")), expected)


# Groups


@groupings
@layouts
@pytest.mark.parametrize("kind", ["bkn", "bn", "brn"])
def test_grouped_layers_equal_a_loop_over_the_groups(make_norm, make_belief, kind, layout, group):
    """The last group may be smaller."""
    layer, parts = make_norm(kind, 6, 4), torch.arange(8).split(group or 8)
    x = (1 + 2 * torch.randn(8, 6, 4, 3).double() + torch.randn(8, 6, 1, 1).double()).requires_grad_()
    prior = make_belief(len(parts), 4, requires_grad=True)
    grad_y = torch.randn(8, 6, 4, 3).double()
    inputs = [x, *layer.parameters(), *(prior if kind == "bkn" else ())]
    before = copy.deepcopy(layer.state_dict())

    def run(x, prior, grad_y, group):
        layer.load_state_dict(before)
        y, belief = layer(x.contiguous(memory_format=LAYOUTS[layout]), prior, Statistics("batch", group))
        return y, belief, gradients(y, grad_y, inputs), copy.deepcopy(layer.state_dict())

    y, belief, grads, remembered = run(x, prior, grad_y, group)
    loop = [run(x[rows], Belief(prior.mean[[g]], prior.var[[g]]), grad_y[rows], None) for g, rows in enumerate(parts)]
    assert_close(y, torch.cat([part[0] for part in loop]))
    assert_close(grads, [torch.stack(parts).sum(0) for parts in zip(*(part[2] for part in loop), strict=True)])
    if belief is not None and kind == "bkn":
        assert_close(belief.mean, torch.cat([part[1].mean for part in loop]))
        assert_close(belief.var, torch.cat([part[1].var for part in loop]))
    # One step towards the mean over the images.
    for name in ("running_mean", "running_var"):
        each = zip(loop, parts, strict=True)
        assert_close(remembered[name], sum(part[3][name] * len(rows) / 8 for part, rows in each))


# Residual sum and ReLU


@pytest.mark.parametrize(
    ("statistics", "groups"),
    [
        (Statistics("batch"), 1), (Statistics("batch", 2), 2), (Statistics("population"), 4),
        (Statistics("sample"), 4), (Statistics("expected", 2), 4),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("with_residual", "relu"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", ["bkn", "bn", "brn", "gn"])
def test_residual_and_relu_are_those_after_the_norm(
    make_norm, make_belief, kind, with_residual, relu, statistics, groups
):
    layer, prior = make_norm(kind, 8, 4).train(statistics.mode == "batch"), make_belief(groups, 4)
    x, grad_y = torch.randn(4, 8, 3, 3).double().requires_grad_(), torch.randn(4, 8, 3, 3).double()
    residual = torch.randn(4, 8, 3, 3).double().requires_grad_() if with_residual else None
    inputs = [x, layer.weight, layer.bias, *([residual] if with_residual else [])]
    before = copy.deepcopy(layer.state_dict())
    y, _ = layer(x, prior, statistics, residual=residual, relu=relu)
    grads = gradients(y, grad_y, inputs)
    layer.load_state_dict(before)
    expected, _ = layer(x, prior, statistics)
    if residual is not None:
        expected = expected + residual
    if relu:
        expected = torch.relu(expected)
    assert_close(y, expected)
    assert_close(grads, gradients(expected, grad_y, inputs))


# Precision


@pytest.mark.parametrize("kind", ["bkn", "bn", "brn", "gn"])
@pytest.mark.parametrize("group", [None, 2])
def test_beliefs_stay_float32_under_autocast(make_norm, make_belief, kind, group):
    layer = make_norm(kind, 8, 4, torch.float32)
    prior = make_belief(1 if group is None else 2, 4, torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(4, 8, 5, 5).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y, belief = layer(x, prior, Statistics("batch", group))
        assert y.dtype == dtype
        assert belief is None or (belief.mean.dtype == belief.var.dtype == torch.float32)
        if kind == "bkn":
            assert_close(belief, layer(x, prior, Statistics("batch", group))[1], rtol=1e-6, atol=1e-6)
        y.float().square().sum().backward()
        assert x.grad.dtype == dtype
        assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


@layouts
@pytest.mark.parametrize("group", [None, 2, 1])
@pytest.mark.parametrize("kind", ["bkn", "bn", "brn"])
def test_small_deviation_around_a_large_mean_survives_float32(make_norm, kind, layout, group):
    """Mean 1e3, deviation 1e-2: E[x^2] - E[x]^2 in float32 would give anything from 0 to a hundred times too much."""
    x = (1e3 + 1e-2 * torch.randn(4, 8, 16, 16)).to(memory_format=LAYOUTS[layout])
    layer = make_norm(kind, 8, dtype=torch.float32)
    layer.running_var.zero_()
    _, belief = layer(x, None, Statistics("batch", group))
    groups = x.double().unflatten(0, (-1, 4 if group is None else group))
    assert_close(layer.running_var.double() / layer.momentum, groups.var((1, 3, 4)).mean(0), rtol=0.05, atol=0)
    if kind == "bkn":
        assert_close(belief.var.double(), groups.var((1, 3, 4), correction=0), rtol=0.05, atol=0)


# Batch Renormalization


def some_images():
    return (1 + 2 * torch.randn(4, 6, 5, 5)).double()


def assert_same_step(layer, expected, x):
    """Output and gradients of a layer are those behind `expected`, which has the same leaves."""
    y, inputs = layer(x)[0], [x, layer.weight, layer.bias]
    grad_y = torch.randn_like(y)
    assert_close(y, expected)
    assert_close(torch.autograd.grad(y, inputs, grad_y), torch.autograd.grad(expected, inputs, grad_y))


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
    twin = nn.BatchNorm2d(6, eps=layer.eps, momentum=layer.momentum).double()
    twin.load_state_dict({name: layer.state_dict()[name] for name in twin.state_dict()})
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
