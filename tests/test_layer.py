"""The layer as a part of other people's networks: BatchNorm's options, the container, freezing, casting."""

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from bkn_zoo import InputError, UnknownNameError, create_model, kernels, list_models
from bkn_zoo.norms import (
    MODES,
    BatchKalmanNorm,
    BatchKalmanNorm1d,
    BatchKalmanNorm2d,
    BatchKalmanNorm3d,
    BatchNorm2d,
    BatchRenorm2d,
    Belief,
    GroupNorm2d,
    KalmanSequential,
    Statistics,
    recalibrate,
)
from bkn_zoo.norms.batch_kalman import KALMAN, new_process_noise
from bkn_zoo.norms.running import AVERAGES

LAYERS = {1: BatchKalmanNorm1d, 2: BatchKalmanNorm2d, 3: BatchKalmanNorm3d}
TWINS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
kinds = pytest.mark.parametrize("kind", ["bkn", "bn", "brn"])


def some(*shape):
    return (1 + 2 * torch.randn(shape)).double()


def memory(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def small(norm=BatchKalmanNorm2d, group=2):
    """Two convolutions, a container in the container, and a linear layer; in float64."""
    block = KalmanSequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), norm(6, 4), nn.ReLU())
    network = KalmanSequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(), nn.MaxPool2d(2), block,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
        statistics_batch_size=group,
    ).double()  # fmt: skip
    for layer in network.modules():
        if isinstance(layer, BatchKalmanNorm2d) and layer.prior_features:
            nn.init.normal_(layer.transition, std=0.3)
    return network


@pytest.mark.parametrize(
    ("kind", "accepted"), [(BatchKalmanNorm1d, (2, 3)), (BatchKalmanNorm2d, (4,)), (BatchKalmanNorm3d, (5,))]
)
def test_layers_share_a_base_and_differ_in_dims(kind, accepted):
    layer = pickle.loads(pickle.dumps(kind(3)))
    assert type(layer) is kind
    assert isinstance(layer, BatchKalmanNorm)
    for ndim in (2, 3, 4, 5):
        refused = pytest.raises(InputError, match=f"{kind.__name__} does not accept an input with {ndim} dim")
        with nullcontext() if ndim in accepted else refused:
            layer(torch.randn(2, *[3] * (ndim - 1)))


# BatchNorm's options


SHAPES = {(8, 6): 1, (8, 6, 3): 1, (8, 6, 3, 4): 2, (4, 6, 2, 3, 4): 3}
OPTIONS_OF_BN = [
    {}, {"eps": 1e-2}, {"momentum": None}, {"affine": False}, {"bias": False}, {"track_running_stats": False},
    {"momentum": None, "affine": False},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_prior", [True, False])
@pytest.mark.parametrize("options", OPTIONS_OF_BN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_gain_one_the_layer_is_batch_norm(make_belief, shape, with_prior, options, dtype):
    dims = SHAPES[shape]
    layer = LAYERS[dims](6, 4 if with_prior else None, **options, dtype=dtype)
    twin = TWINS[dims](6, **{name: options[name] for name in options if name != "bias"}, dtype=dtype)
    if "bias" in options:  # which only newer versions of PyTorch take
        twin.bias = None
    assert (layer.affine, layer.track_running_stats) == (twin.affine, twin.track_running_stats)
    if with_prior:
        layer.set_gain(1.0)
        nn.init.normal_(layer.transition)
    if layer.affine:
        twin.weight.data.normal_()
        layer.weight.data.copy_(twin.weight)
    prior = make_belief(1, 4, dtype) if with_prior else None
    layouts = [torch.contiguous_format, {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))]
    for training, layout in zip((True, True, True, False), layouts * 2, strict=True):
        x = some(*shape).to(dtype).contiguous(memory_format=layout or torch.contiguous_format).requires_grad_()
        y, belief = layer.train(training)(x, prior)
        wanted, grad_y = twin.train(training)(x), torch.randn(shape, dtype=dtype)
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
        assert_close(y, wanted, **near)
        assert y.stride() == x.stride()
        of_ours, of_theirs = ([x, *(p for p in (m.weight, m.bias) if p is not None)] for m in (layer, twin))
        ours, theirs = torch.autograd.grad(y, of_ours, grad_y), torch.autograd.grad(wanted, of_theirs, grad_y)
        assert_close(ours, theirs, **near)
        assert (belief is None) == (layer.track_running_stats and not training)
    ours, theirs = layer.state_dict(), twin.state_dict()
    assert_close({name: ours[name] for name in theirs}, theirs)
    own = {"image_mean", "image_var", "image_spread"} if layer.track_running_stats else set()
    assert ours.keys() - theirs.keys() == own | (set(KALMAN) if with_prior else set())


@kinds
def test_without_momentum_averages_are_those_of_all_steps(make_norm, make_belief, kind):
    layer = make_norm(kind, 3, 4)
    layer.reset_running_stats()
    layer.momentum = None
    batches, prior = [some(4, 3, 5, 5) + some(4, 3, 1, 1) for _ in range(5)], make_belief(2, 4)
    single = copy.deepcopy(layer)
    single.momentum = 1.0
    with pytest.warns(RuntimeWarning, match="not finite"):
        layer(batches[0] * math.nan, prior, Statistics("batch", 2))  # which does not count
    steps = []
    for x in batches:
        layer(x, prior, Statistics("batch", 2))
        single(x, prior, Statistics("batch", 2))
        steps.append(memory(single))
    for name in ("running_mean", "running_var", "image_mean", "image_var"):
        assert_close(getattr(layer, name), torch.stack([step[name] for step in steps]).mean(0))
    means = torch.cat(batches).mean((2, 3))
    assert_close(layer.image_spread, means.var(0, correction=0))  # of all images, as if they had been one batch
    assert layer.num_batches_tracked == 5


def test_device_and_dtype_are_taken_but_averages_are_never_half():
    layer = BatchKalmanNorm2d(3, 2, device="meta", dtype=torch.bfloat16)
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert {layer.get_buffer(name).dtype for name in AVERAGES} == {torch.float32}
    double = BatchKalmanNorm2d(3, 2, dtype=torch.float64).state_dict()
    assert {tensor.dtype for tensor in double.values()} == {torch.float64, torch.int64}


# Statistics by name, and groups of the layer's own


@kinds
def test_statistics_are_named_and_groups_may_be_the_layer_s(make_norm, make_belief, kind):
    layer, x = make_norm(kind, 3, 4), some(4, 3, 5, 5)
    twin = copy.deepcopy(layer)
    layer.statistics_batch_size = 2
    for mode in MODES:
        named, chosen = (make_belief(4, 4), mode), Statistics(mode, 2)
        assert_close(layer.eval()(x, *named), twin.eval()(x, named[0], chosen), rtol=0, atol=0)
    prior = make_belief(2, 4)
    assert_close(layer.train()(x, prior), twin.train()(x, prior, Statistics("batch", 2)), rtol=0, atol=0)
    assert_close(memory(layer), memory(twin), rtol=0, atol=0)


def test_statistics_that_cannot_be_are_refused():
    x, without = torch.randn(2, 3, 4, 4), BatchKalmanNorm2d(3, track_running_stats=False).eval()
    without(x, None, "sample")
    for layer, statistics, words in [
        (BatchKalmanNorm2d(3, statistics_batch_size=0), None, "statistics_batch_size is 0"),
        (BatchKalmanNorm2d(3), "sample", "training mode"),
        (BatchKalmanNorm2d(3).eval(), "batch", "unknown statistics 'batch'"),
        (without, "population", "needs running averages, but this layer was created with track_running_stats"),
        (without, Statistics("expected", 2), "needs running averages"),
    ]:
        with pytest.raises((InputError, UnknownNameError), match=words):
            layer(x, None, statistics)


# The container


@pytest.mark.parametrize("statistics", [None, *MODES])
def test_container_hands_each_norm_the_belief_below(statistics):
    network = small()
    twin = copy.deepcopy(network)
    x = some(4, 3, 8, 8)
    for _ in range(2):
        network(x)
        twin(x)
    network.train(statistics is None)
    twin.train(statistics is None)
    chosen = Statistics(statistics or "batch", 2)
    conv1, norm1, relu, pool, block, average, flatten, fc = twin
    conv2, norm2, _ = block
    y, belief = norm1(conv1(x), None, chosen)
    y, belief = norm2(conv2(pool(relu(y))), belief, chosen)
    result, carried = network(x, statistics=statistics)
    assert_close(result, fc(flatten(average(relu(y)))), rtol=0, atol=0)
    assert_close(carried, belief, rtol=0, atol=0)
    assert_close(memory(network), memory(twin), rtol=0, atol=0)


def test_parts_of_containers_have_groups_and_modes():
    network, x = small(group=2), some(4, 3, 8, 8)
    y, belief = network[:4](x)
    assert belief.mean.shape == (2, 4)
    assert_close(network[4:](y, belief), network(x))
    assert network[-1] is list(network)[-1]
    below, above = network.eval()[:4], network[4:]
    y, belief = below(x[:3], statistics="sample")
    assert_close(above(y, belief, statistics="sample"), network(x[:3], statistics="sample"))


def noises(model):
    return {layer.raw_process_noise for layer in model.modules() if getattr(layer, "prior_features", None)}


def test_layers_share_r_wherever_their_network_goes():
    def shared():
        noise = new_process_noise(1)
        inner = KalmanSequential(*(BatchKalmanNorm2d(3, 3, raw_process_noise=noise) for _ in range(2)))
        return KalmanSequential(inner, BatchKalmanNorm2d(3, 3, raw_process_noise=noise))

    with torch.device("meta"):
        container, model, other = shared(), create_model("inception_cifar_bkn"), create_model("inception_cifar_bkn")
    assert len(noises(container.to_empty(device="cpu"))) == 1
    assert len(noises(model.to_empty(device="cpu").half().double())) == 1
    other.load_state_dict(create_model("inception_cifar_bkn").state_dict(), assign=True)
    assert not [name for name, tensor in [*other.named_parameters(), *other.named_buffers()] if tensor.is_meta]
    assert len(noises(other.to("cpu"))) == 1
    network = shared()
    state, before = network.state_dict(), noises(network)
    for k, name in enumerate(name for name in state if name.endswith("raw_process_noise")):
        state[name] = torch.full((1,), float(k))
    network.load_state_dict(state, assign=True)
    (found,) = noises(network) - before
    assert (found.item(), found.requires_grad) == (2.0, True)


def test_norms_in_a_plain_container_within_are_refused():
    plain = nn.Sequential(BatchKalmanNorm2d(3), nn.ReLU())
    for inner in (plain, nn.Sequential(plain)):
        with pytest.raises(InputError, match="use a KalmanSequential there, too"):
            KalmanSequential(nn.Sequential(nn.ReLU()), inner)(torch.randn(2, 3, 4, 4))


def test_container_takes_blocks_that_carry_beliefs(make_belief):
    class Residual(nn.Module):
        carries_belief = True

        def __init__(self):
            super().__init__()
            self.body = KalmanSequential(nn.Conv2d(4, 4, 3, padding=1), BatchKalmanNorm2d(4, 4))

        def forward(self, x, prior, statistics):
            y, belief = self.body(x, prior, statistics)
            return x + y, belief

    block, x, prior = Residual().double(), some(4, 4, 5, 5), make_belief(2, 4)
    network = KalmanSequential(block, nn.ReLU(), statistics_batch_size=2)
    y, belief = network(x, prior)
    expected, believed = block.body(x, prior, Statistics("batch", 2))
    assert_close((y, belief), (torch.relu(x + expected), believed))


def test_container_without_averages_takes_the_batch_in_eval():
    def norm(channels, below=None):
        return BatchKalmanNorm2d(channels, below, track_running_stats=False, statistics_batch_size=2)

    network, x = small(norm), some(4, 3, 8, 8)
    assert_close(network.eval()(x), network.train()(x))


# The gain: its shape, and q = 1


def test_gain_of_one_is_finite_and_stays_so_in_averages():
    for dtype in (torch.float32, torch.float64):
        layer = BatchKalmanNorm2d(3, 2, dtype=dtype)
        layer.set_gain(1.0)
        assert layer.raw_gain.isfinite()
        averaged = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            averaged.update_parameters(layer)
        assert averaged.module.gain == layer.gain == 1


# Resetting parameters, and the meta device


@pytest.mark.parametrize("kind", ["bkn", "bn", "brn", "gn"])
def test_reset_parameters_puts_everything_where_it_starts(make_norm, kind):
    layer = make_norm(kind, 8, 4, torch.float32)
    if kind != "gn":
        layer.skipped_steps.fill_(3)
    layer.reset_parameters()
    fresh = type(layer)(8, 4)
    assert_close(dict(layer.named_parameters()), dict(fresh.named_parameters()), rtol=0, atol=1e-6)
    assert_close(memory(layer), memory(fresh), rtol=0, atol=0)


@pytest.mark.parametrize("name", list_models("inception_cifar_*"))
def test_from_the_meta_device_a_network_starts_as_any_other(name):
    with torch.device("meta"):
        model = create_model(name)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(77)  # what memory may hold
    torch.manual_seed(5)
    model.reset_parameters()
    fresh = create_model(name)
    fresh.reset_parameters()
    torch.manual_seed(5)
    fresh.reset_parameters()
    ours, theirs = dict(model.named_parameters()), dict(fresh.named_parameters())  # a shared R is one of them
    assert_close(ours, theirs, rtol=0, atol=0)
    assert_close(memory(model), memory(fresh), rtol=0, atol=0)


# Half precision


@pytest.mark.parametrize("norm", [BatchKalmanNorm2d, BatchNorm2d, BatchRenorm2d, GroupNorm2d])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [None, 2])
def test_a_network_cast_to_half_precision_works_in_every_mode(norm, dtype, group):
    exact, images = small(norm, group).float(), torch.randn(4, 3, 8, 8)
    model = copy.deepcopy(exact).to(dtype)
    for training, mode in [(True, None), *((False, mode) for mode in MODES)]:
        found, belief = model.train(training)(images.to(dtype), statistics=mode)
        wanted, _ = exact.train(training)(images, statistics=mode)
        assert found.dtype == dtype
        assert belief is None or (belief.mean.dtype == belief.var.dtype == torch.float32)
        assert (found.float() - wanted).norm() < 0.05 * wanted.norm()
    model.train()(images.to(dtype))[0].float().square().sum().backward()
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert {buffer.dtype for buffer in model.buffers()} <= {torch.float32, torch.int64}


@kinds
def test_averages_of_half_precision_layers_come_as_far(make_norm, make_belief, kind):
    """In bfloat16 they would stand still within 4 % of where they go, and the mean of many steps much earlier."""
    exact = make_norm(kind, 3, 4, torch.float32)
    layer, x, prior = copy.deepcopy(exact).bfloat16(), 40 + torch.randn(4, 3, 5, 5), make_belief(2, 4, torch.float32)
    x = x.bfloat16()
    for _ in range(100):
        exact(x.float(), prior, Statistics("batch", 2))
        layer(x, prior, Statistics("batch", 2))
    assert_close(layer.image_mean, exact.image_mean, rtol=1e-3, atol=1e-3)
    assert_close(layer.running_mean, exact.running_mean, rtol=1e-2, atol=1e-2)


# Freezing


@kinds
@pytest.mark.parametrize("group", [None, 2])
def test_norm_in_evaluation_mode_is_frozen(make_norm, kind, group):
    layer, x = make_norm(kind, 3, 4).eval(), some(4, 3, 5, 5).requires_grad_()
    before = memory(layer)
    y, belief = layer(x, None, Statistics("batch", group))
    assert_close(y, layer(x, None, "population")[0], rtol=0, atol=0)
    assert_close(memory(layer), before, rtol=0, atol=0)
    groups = 1 if group is None else 2
    assert_close(belief, Belief(layer.running_mean.expand(groups, 3), layer.running_var.expand(groups, 3)))


@pytest.mark.parametrize("frozen", ["norm", "container"])
def test_norms_above_a_frozen_one_train_in_their_own_groups(frozen):
    below = KalmanSequential(nn.Conv2d(3, 4, 3), BatchKalmanNorm2d(4))
    above = BatchKalmanNorm2d(4, 4)
    network = KalmanSequential(below, above).double()
    network(some(4, 3, 8, 8))
    (below[1] if frozen == "norm" else below).eval()
    nn.init.normal_(above.transition)
    x, before = some(4, 3, 8, 8), memory(below)
    y, belief = network(x)
    twin = copy.deepcopy(above)
    assert_close((y, belief), twin(below.eval()(x)[0], below[1].population(4, None)))
    assert_close(memory(below), before, rtol=0, atol=0)
    y.square().sum().backward()
    assert above.transition.grad.abs().sum() > 0
    assert network.eval()(x)[1] is None  # the population: no belief travels
    below[1].statistics_batch_size = above.statistics_batch_size = 2
    network.train()
    below.eval()
    assert network(x)[1].mean.shape == (2, 4)


# Weight decay


def test_kalman_parameters_are_named_as_free_of_weight_decay():
    assert BatchKalmanNorm2d(3).no_weight_decay() == set()
    assert BatchKalmanNorm2d(3, 2).no_weight_decay() == {"transition", "raw_process_noise", "raw_gain"}
    assert small().no_weight_decay() == {f"4.1.{name}" for name in KALMAN}
    for name in list_models("inception_cifar_*"):
        model = create_model(name)
        named = {parameter for parameter, _ in model.named_parameters() if parameter.endswith(KALMAN)}
        every = {found for found, _ in model.named_parameters(remove_duplicate=False)}
        assert named <= model.no_weight_decay() <= every
        assert bool(named) == name.endswith("_bkn")


# Activation checkpointing


@kinds
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("group", [None, 2])
def test_averages_move_once_with_activation_checkpointing(kind, reentrant, group):
    norm = {"bkn": BatchKalmanNorm2d, "bn": BatchNorm2d, "brn": BatchRenorm2d}[kind]
    plain = small(norm, group)
    saving = copy.deepcopy(plain)
    passes = []
    saving[0].register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        x = some(4, 3, 8, 8).requires_grad_()
        expected, _ = plain(x)
        expected.square().sum().backward()
        y, _ = checkpoint(saving, x, use_reentrant=reentrant)
        assert_close(y, expected)
        y.square().sum().backward()
    assert len(passes) == 4  # it did compute again
    assert_close(memory(saving), memory(plain))
    assert_close([p.grad for p in saving.parameters()], [p.grad for p in plain.parameters()])


# Recalibration


@pytest.mark.parametrize("norm", ["bkn", "bn", "brn", "torch"])
def test_recalibrate_takes_the_averages_that_update_bn_would(norm):
    """First norms of all kinds are batch normalization in training; `update_bn` knows PyTorch's own alone."""
    make = {"bkn": BatchKalmanNorm2d, "bn": BatchNorm2d, "brn": BatchRenorm2d, "torch": nn.BatchNorm2d}[norm]
    network = KalmanSequential(nn.Conv2d(3, 4, 3), make(4)).double()
    twin = nn.Sequential(copy.deepcopy(network[0]), nn.BatchNorm2d(4).double())
    for _ in range(3):
        network(some(8, 3, 6, 6))
    batches = [some(8, 3, 6, 6) for _ in range(4)]
    before = memory(network)
    if norm != "torch":
        update_bn(batches, network)
        assert_close(memory(network), before, rtol=0, atol=0)  # as the documentation of `recalibrate` says
    network.eval()
    network[0].train()
    momentum = network[1].momentum
    recalibrate(network, [(x, "a label") for x in batches])
    update_bn(batches, twin)
    assert_close(network[1].running_mean, twin[1].running_mean)
    assert_close(network[1].running_var, twin[1].running_var)
    assert (network.training, network[0].training, network[1].training) == (False, True, False)
    assert (network[1].momentum, network[1].num_batches_tracked) == (momentum, 3)
    assert all(parameter.grad is None for parameter in network.parameters())


BATCH = torch.randn(8, 3, 6, 6)


@pytest.mark.filterwarnings("ignore:a training batch was not finite")
@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([], "batches is empty"),
        ([BATCH, {"image": BATCH}], "a dict is not a batch of images: pass"),
        ([()], "a tuple is not a batch"),
        ([BATCH * math.nan], "no finite batch"),
    ],
)
def test_failed_recalibration_leaves_everything_as_it_was(batches, says):
    network = KalmanSequential(BatchKalmanNorm2d(3), statistics_batch_size=2)
    network(BATCH)
    before = memory(network.eval())
    with pytest.raises(InputError, match=says):
        recalibrate(network, batches)
    assert_close(memory(network), before, rtol=0, atol=0)
    assert (network[0].training, network[0].momentum) == (False, 0.1)
    recalibrate(network, [BATCH * math.nan, BATCH + 1])  # a batch that is not finite is left out
    assert_close(network[0].running_mean, (BATCH + 1).mean((0, 2, 3)))
    with pytest.raises(InputError, match="no running averages"):
        recalibrate(create_model("inception_cifar_gn"), [torch.randn(2, 3, 16, 16)])


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchKalmanNorm2d])
def test_recalibrate_keeps_the_averages_of_a_frozen_norm(norm):
    network = KalmanSequential(norm(3), BatchKalmanNorm2d(3))
    network(BATCH)
    network[0].eval().train = lambda mode: None
    before = memory(network[0])
    recalibrate(network, [BATCH + 1])
    assert_close(memory(network[0]), before, rtol=0, atol=0)


def test_recalibrate_works_on_a_norm_that_counts_no_batches():
    class Plain(nn.BatchNorm2d):
        def forward(self, x):
            memory = self.running_mean, self.running_var
            return nn.functional.batch_norm(x, *memory, training=self.training, momentum=1.0)

    norm = Plain(3)
    recalibrate(norm, [BATCH + 1])
    assert_close(norm.running_mean, BATCH.mean((0, 2, 3)) + 1)


# Kernels


@pytest.mark.skipif(kernels.fused_norm is None, reason="Triton is not installed on this platform")
@pytest.mark.parametrize("state", ["no memory", "frozen below", "recomputed"])
def test_layers_of_volumes_run_on_kernels_as_in_pytorch(state):
    device, tracks = "cuda" if torch.cuda.is_available() else "cpu", state != "no memory"
    below, layer = (BatchKalmanNorm3d(*sizes, track_running_stats=tracks) for sizes in ((3,), (4, 3)))
    network = KalmanSequential(below, nn.Conv3d(3, 4, 1), layer, statistics_batch_size=2).to(device)
    below.train(state != "frozen below")
    nn.init.normal_(layer.transition)
    images, found = torch.randn(4, 3, 2, 2, 2, device=device), []
    for implementation in ("triton", "pytorch"):
        model, x = copy.deepcopy(network), images.clone().requires_grad_()
        with kernels.use(implementation):
            y, belief = checkpoint(model, x, use_reentrant=False) if state == "recomputed" else model(x)
            (y.square().sum() + belief.mean.sum()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"y": y, "mean": belief.mean, "var": belief.var, "x": x.grad} | gradients | memory(model))
    assert_close(*found, rtol=1e-4, atol=1e-4)
