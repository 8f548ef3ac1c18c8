"""The Triton kernels against the PyTorch version of the layer, which is their reference.

They run on a GPU where there is one, and otherwise on Triton's interpreter (conftest.py turns it on), which executes
the same code on the CPU, slowly: only the small cases are run there.
"""

import copy
import itertools
import math

import pytest
import torch
from gpu import DEVICE, capture, gpu_only
from torch import nn
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import kernels
from bkn_zoo.kernels.conditions import CHANNELS_LAST
from bkn_zoo.norms import BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d, BatchNorm2d, Belief, Statistics
from bkn_zoo.norms.batch_kalman import new_process_noise

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed on this platform")

if kernels.HAS_TRITON:
    from bkn_zoo.kernels import launch, norm_launch

# images, channels, map, statistics group, channels below (or the shapes of the blocks of an A that is not full)
FIRST, *SMALL = [
    (4, 5, (3, 3), 2, 3), (2, 3, (1, 1), 1, 4), (8, 33, (7, 7), 4, 20), (1, 16, (5, 6), 1, 40),
    (4, 16, (2, 2), 4, None), (4, 6, (3, 3), 2, ((6,),)), (3, 6, (3, 3), 1, ((2, 3, 4),)),
    (33, 3, (1, 1), 1, 70),  # more groups and inputs than a tile has
    # A smaller last group, which is left to PyTorch.
    (5, 4, (2, 2), 2, 3),
    (4, 33, (5, 5), 4, ((20, 7), (13,))),
]  # fmt: skip
LARGE = [
    (32, 64, (56, 56), 1, None), (32, 64, (112, 112), 4, 64), (32, 256, (14, 14), 4, 1024),
    (64, 2048, (7, 7), 32, 512), (256, 3, (9, 9), 256, 7), (256, 352, (7, 7), 1, 96),
    (16, 96, (112, 112), 1, ((96,),)), (16, 960, (7, 7), 1, ((960,),)), (32, 256, (14, 14), 4, ((32, 8, 4),)),
    (256, 96, (28, 28), 2, ((64,), (32, 128))),
]  # fmt: skip
ON_A_GPU = [pytest.param(shape, marks=gpu_only) for shape in LARGE]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRS, ALONE = Statistics("batch", 2), Statistics("batch", 1)


def normal(*shape, layout=torch.contiguous_format):
    return torch.randn(shape, device=DEVICE).to(memory_format=layout)


def random_belief(groups, channels):
    return Belief(normal(groups, channels), torch.rand(groups, channels, device=DEVICE) + 0.1)


@torch.no_grad()
def randomize_transitions(model):
    for norm in model.modules():
        for block in norm.transition_blocks if getattr(norm, "prior_features", None) else []:
            block.normal_(std=block.shape[-1] ** -0.5)


def make_layer(channels, below):
    """A layer above so many channels, or above those that the blocks of its A take; and the channels."""
    if not isinstance(below, tuple):
        return BatchKalmanNorm2d(channels, below), below
    inputs = sum(shape[-1] * (shape[0] if len(shape) == 3 else 1) for shape in below)
    return BatchKalmanNorm2d(channels, inputs, transition_shapes=below), inputs


def run(implementation, shape, dtype=torch.float32, layout=torch.channels_last, residual=True, relu=True, wide=False):
    """Everything that a training step of one layer gives, by name, in float64.

    No gradient comes from outputs close to zero: on which side of the ReLU they fall is a matter of rounding.
    """
    images, channels, size, group, below = shape
    torch.manual_seed(0)
    layer, below = make_layer(channels, below)
    randomize_transitions(layer)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_()
        if below:
            layer.raw_process_noise.normal_()
            layer.set_gain(0.6)
    groups, statistics = -(-images // group), Statistics("batch", group)
    x, shortcut, dy = (torch.randn(images, channels, *size) for _ in range(3))
    prior = torch.randn(groups, below or 1), torch.rand(groups, below or 1) + 0.1
    upper = torch.randn(2, groups, channels)
    x, shortcut, dy = ((t * 2 + 1).to(dtype).to(memory_format=layout) for t in (x, shortcut, dy))
    layer, x, shortcut, dy, upper, *prior = (t.to(DEVICE) for t in (layer, x, shortcut, dy, upper, *prior))
    if wide:
        layer, x, shortcut, dy, upper, *prior = (t.double() for t in (layer, x, shortcut, dy, upper, *prior))
    for tensor in (x, shortcut, *prior):
        tensor.requires_grad_()
    with kernels.use("pytorch"), torch.no_grad():  # in float64 whatever the precision, so that all leave out the same
        wide_prior = Belief(*(t.double() for t in prior)) if below else None
        wide_layer, wide_shortcut = copy.deepcopy(layer).double(), shortcut.double() if residual else None
        dy[wide_layer(x.double(), wide_prior, statistics, wide_shortcut)[0].abs() < 0.05] = 0
    with kernels.use(implementation):
        arguments = (x, Belief(*prior) if below else None, statistics, shortcut if residual else None)
        y, belief = layer(*arguments, relu=relu)
        torch.autograd.backward([y, *belief], [dy, *upper])
    results = {"y": y, "belief mean": belief.mean, "belief var": belief.var, "x": x.grad, "residual": shortcut.grad}
    results |= {"prior mean": prior[0].grad, "prior var": prior[1].grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()} | dict(layer.named_buffers())
    return {name: value.detach().double().cpu() for name, value in results.items() if value is not None}


def check(results, reference, tolerance=1e-5):
    """Everything that a step gives is near the reference, by its relative difference in norm."""
    assert results.keys() == reference.keys()
    for name, value in reference.items():
        assert (results[name] - value).norm() / value.norm().clamp_min(1e-3) < tolerance, name


def assert_same(step, tolerance=1e-5):
    """What `step` returns, tensors or lists of them, is the same by both implementations."""
    results = []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        with kernels.use(implementation):
            results.append(step())
    assert_close(*results, rtol=tolerance, atol=tolerance)


# A training step of one layer


# On the interpreter, layout, residual and ReLU vary with the first shape, and the other shapes have the usual.
USUAL = (torch.channels_last, True, True)
STEPS = [
    pytest.param(shape, *kind, marks=() if shape == FIRST or (shape in SMALL and kind == USUAL) else gpu_only)
    for shape in [FIRST, *SMALL, *LARGE]
    for kind in itertools.product(LAYOUTS, (False, True), (False, True))
]


@pytest.mark.parametrize(("shape", "layout", "residual", "relu"), STEPS, ids=str)
def test_a_training_step_equals_the_pytorch_version_in_float32(shape, layout, residual, relu):
    kind = {"layout": layout, "residual": residual, "relu": relu}
    check(run("triton", shape, **kind), run("pytorch", shape, **kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SMALL[0], SMALL[1], SMALL[-1], *ON_A_GPU], ids=str)
def test_a_training_step_is_as_close_to_float64_as_its_precision(shape, dtype):
    reference = run("pytorch", shape, dtype, wide=True)
    check(run("triton", shape, dtype), reference, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("shape", [SMALL[1], ON_A_GPU[2]], ids=str)
def test_the_same_input_gives_the_same_bits(shape):
    first, second = run("triton", shape), run("triton", shape)
    assert all(torch.equal(first[name], second[name]) for name in first)


# more groups than a tile has, more inputs than a stretch; and images that a large GPU takes in pieces
FEW = [
    (17, 5, (2, 1), 1, 260), (17, 5, (2, 1), 1, ((5,),)), (4, 5, (2, 2), 2, None),
    (2, 35, (16, 16), 2, 9), (2, 35, (16, 16), 1, ((35,),)),
]  # fmt: skip


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_images_are_divided_for_a_large_gpu(shape, monkeypatch):
    """The last program of a pass forms the beliefs. Counters are zero afterwards, for the next launch."""
    monkeypatch.setattr(norm_launch, "processors", lambda device: 132)
    monkeypatch.setattr(norm_launch, "GROUPS", 16)
    tiling = norm_launch.choose_tiling(shape[0], shape[1], math.prod(shape[2]), True, False, 132)
    assert (tiling.merged, tiling.pieces) == (True, 4 if shape[2] == (16, 16) else 1)
    kept = launch.memory(2**20, 2**10, DEVICE)
    monkeypatch.setattr(launch, "memory", lambda *_: kept)
    monkeypatch.setattr(launch, "_scratch", launch._Scratch())  # or what earlier tests left would be taken on a GPU
    check(run("triton", shape, residual=False), run("pytorch", shape, residual=False))
    assert not kept[1].any()


# Both implementations of other layers and inputs


@pytest.mark.parametrize("shape", [FIRST, *SMALL[:3], *ON_A_GPU[1:3], *ON_A_GPU[4:6]], ids=str)
def test_one_process_noise_for_all_channels_gets_all_gradients(shape):
    images, channels, size, group, below = shape

    def step():
        layer = BatchKalmanNorm2d(channels, below, raw_process_noise=new_process_noise(1)).to(DEVICE)
        x = normal(images, channels, *size, layout=torch.channels_last)
        layer(x, random_belief(images // group, below), Statistics("batch", group))[0].backward(torch.randn_like(x))
        assert layer.raw_process_noise.grad.shape == (1,)
        return layer.raw_process_noise.grad

    assert_same(step, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("below", "statistics"),
    [
        (None, Statistics("expected", 4)), (3, Statistics("expected", 4)), (3, Statistics("expected")),
        (((6,),), Statistics("expected", 4)), (None, Statistics("sample")),
    ],
)  # fmt: skip
def test_inference_is_that_of_the_pytorch_version(dtype, below, statistics):
    def step(part):
        layer, inputs = make_layer(6, below)
        for buffer in (layer.image_mean, layer.image_var, layer.image_spread):
            buffer.uniform_(0.5, 1.5)
        x = (1 + 2 * normal(3, 6, 4, 5)).to(dtype)
        prior = random_belief(3, inputs) if inputs else None
        layer.to(DEVICE).eval()
        before = {name: value.clone() for name, value in layer.named_buffers()}
        with torch.no_grad():
            result = layer(x, prior, statistics, residual=x, relu=True)[part]
        assert_close(dict(layer.named_buffers()), before, rtol=0, atol=0)
        return result

    assert_same(lambda: step(0), 1e-5 if dtype == torch.float32 else 2e-2)
    assert_same(lambda: step(1))


def test_a_layer_with_a_center_runs_on_the_kernels():
    def step():
        layer = BatchKalmanNorm2d(4, 3, centered=True)
        layer.set_center(torch.zeros(4))
        assert layer.to(DEVICE).fusible
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        y, belief = layer(normal(4, 4, 3, 3), random_belief(2, 3), PAIRS)
        (y.relu().square().sum() + belief.mean.sum()).backward()
        return [y, *(parameter.grad for parameter in layer.parameters())]

    assert_same(step, 1e-4)


LAST = [torch.channels_last, torch.channels_last_3d]
SIZES = [*itertools.product(LAST[:1], [(5, 4), (5, 1), (1, 5), (1, 1)])]
SIZES += itertools.product(LAST[1:], [(2, 3, 4), (1, 3, 4), (2, 3, 1), (2, 1, 1), (1, 1, 1)])
SIZES += itertools.product([torch.contiguous_format], [(), (7,), (5, 4), (5, 1), (1, 5), (1, 1), (2, 3, 4)])


@pytest.mark.parametrize(("layout", "size"), SIZES, ids=str)
def test_features_of_any_shape_keep_their_layout(layout, size):
    """In output and gradients, of the residual too; and where gradients arrive as a slice of channels."""

    def step():
        x, residual, other = (normal(4, 6, *size, layout=layout).requires_grad_() for _ in range(3))
        kind = (BatchKalmanNorm1d, BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d)[len(size)]
        y, _ = kind(6).to(DEVICE)(x, None, PAIRS, residual, relu=True)
        torch.cat([other, y], dim=1).backward(normal(4, 12, *size, layout=layout))
        assert y.is_contiguous(memory_format=layout)
        assert x.grad.is_contiguous(memory_format=layout)
        return y, x.grad, residual.grad

    assert_same(step)


def with_all_kinds_of_transitions(width=8):
    """A network to convert, with norms after dense, depthwise and grouped convolutions and after another norm."""
    wide = 2 * width
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU6(),
        nn.Conv2d(width, wide, 1), nn.BatchNorm2d(wide), nn.ReLU6(),
        nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6(),
        nn.Conv2d(wide, width, 3, padding=1, groups=4), nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10),
    )  # fmt: skip


def test_every_norm_of_a_converted_network_runs_on_the_kernels(monkeypatch):
    model = bkn_zoo.convert(with_all_kinds_of_transitions().to(DEVICE), statistics_batch_size=1)
    norms = [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d)]
    assert {block.ndim for norm in norms if norm.prior_features for block in norm.transition_blocks} == {1, 2, 3}
    randomize_transitions(model)
    images = normal(2, 3, 8, 8)
    found, fused_norm = [], kernels.fused_norm
    monkeypatch.setattr(kernels, "fused_norm", lambda *arguments: found.append(1) or fused_norm(*arguments))

    def step():
        model.zero_grad()
        model(images).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert_same(step, 1e-3)
    assert len(found) == len(norms) == 5


TRANSFORMS = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x.cos(),))[1],
    "grad": lambda function, x: torch.func.grad(lambda x: (function(x) * x.cos()).sum())(x),
    "vmap": lambda function, x: torch.vmap(lambda image: function(image[None]))(x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tangents_and_transforms_are_left_to_pytorch(transform, compiled):
    layer, x = BatchKalmanNorm2d(4).to(DEVICE).eval(), normal(2, 4, 3, 3)

    def run(x):
        return TRANSFORMS[transform](lambda x: layer(x, None, Statistics("sample"))[0], x)

    with kernels.use("pytorch"):
        expected = run(x)
    run = torch.compile(run, backend="eager") if compiled else run
    for learning in (False, True):
        with kernels.use("triton"), torch.set_grad_enabled(learning):
            assert_close(run(x), expected)


# Numbers that are hard to hold


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_variance_is_right_around_a_large_mean(dtype):
    deviation = 1e-2 if dtype == torch.float32 else 1.0  # float16 has steps of 0.5 around 1000
    x = (1e3 + deviation * normal(4, 16, 8, 8)).to(dtype)
    with kernels.use("triton"):
        _, belief = BatchKalmanNorm2d(16).to(DEVICE)(x, None, PAIRS)
    exact = x.double().unflatten(0, (2, 2)).var(dim=(1, 3, 4), correction=0)
    assert_close(belief.var.double(), exact, rtol=1e-3, atol=0)


def test_a_prediction_before_the_kernels_is_in_full_precision():
    """Under autocast too."""
    layer, inputs = make_layer(6, ((4, 5), (2,)))
    randomize_transitions(layer)
    arguments = (normal(2, 6, 3, 3).bfloat16(), random_belief(2, inputs), ALONE)
    with kernels.use("triton"):
        _, expected = layer.to(DEVICE)(*arguments)
        with torch.autocast(DEVICE, torch.bfloat16):
            _, belief = layer(*arguments)
    assert all(map(torch.equal, belief, expected))


def test_a_process_noise_far_below_zero_does_not_vanish():
    layer = BatchKalmanNorm2d(4, 4).to(DEVICE)
    with torch.no_grad():
        layer.raw_process_noise.copy_(torch.tensor([-30.0, -18.0, -7.0, 30.0]))
        layer.raw_gain.fill_(-80.0)  # the belief is the prediction, and with A = 0 its variance is R
    with kernels.use("triton"), torch.no_grad():
        _, belief = layer(normal(2, 4, 3, 3), random_belief(2, 4), ALONE)
    assert_close(belief.var[0], layer.process_noise, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_gradients_have_the_dtype_and_precision_of_parameters(dtype):
    """Also if only some parameters are in half precision."""

    def step(*half):
        torch.manual_seed(0)
        layer = BatchKalmanNorm2d(4, 8).to(DEVICE)
        for name in half:
            getattr(layer, name).data = getattr(layer, name).data.to(dtype)
        x = normal(2, 4, 3, 3).to(layer.raw_gain.dtype)
        with kernels.use("triton"):
            layer(x, random_belief(2, 8), ALONE)[0].backward(torch.linspace(-1, 1, x.numel(), device=DEVICE).view_as(x))
        return {name: parameter.grad for name, parameter in layer.named_parameters()}

    exact, mixed = step(), step("weight", "bias")
    assert {gradient.dtype for gradient in step(*exact).values()} == {dtype}
    assert (mixed["weight"].dtype, mixed["transition"].dtype) == (dtype, torch.float32)
    assert_close(mixed["transition"], exact["transition"], rtol=1e-5, atol=1e-6)


def test_expected_statistics_have_gradients():
    x = normal(3, 6, 4, 4).requires_grad_()
    with kernels.use("triton"):
        BatchKalmanNorm2d(6).to(DEVICE).eval()(x, None, Statistics("expected", 4))[0].square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_second_derivatives_are_refused():
    x = normal(2, 4, 3, 3).requires_grad_()
    with kernels.use("triton"):
        (gradient,) = torch.autograd.grad(BatchKalmanNorm2d(4).to(DEVICE)(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# Running averages


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("below", [None, 3])
def test_a_step_that_is_not_finite_leaves_running_averages_alone(bad, below):
    layer = BatchKalmanNorm2d(20, below).to(DEVICE)
    before = {name: value.clone() for name, value in layer.named_buffers() if name != "skipped_steps"}
    x = normal(4, 20, 3, 3)
    x[1, 2, 0, 0] = bad
    with kernels.use("triton"):
        y, _ = layer(x, random_belief(2, 3) if below else None, PAIRS, relu=True)
    assert y[1, 2].isnan().all()
    assert y[2:].isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers() if name in before)
    assert layer.skipped_steps == 1


@pytest.mark.parametrize("implementation", ["triton", "pytorch"])
def test_a_spread_that_overflows_is_not_remembered(implementation):
    layer, x = BatchKalmanNorm2d(4, statistics_batch_size=1).to(DEVICE), normal(4, 4, 3, 3)
    x[0] = 1e20
    with kernels.use(implementation):
        for _ in range(2):
            layer(x)
    assert layer.num_batches_tracked == 2
    assert layer.image_spread.isfinite().all()


@gpu_only
def test_skipped_steps_are_reported_once_when_training_ends():
    """On the CPU the warning comes at once."""
    layer = BatchKalmanNorm2d(4).to(DEVICE)
    layer(torch.full((2, 4, 3, 3), float("nan"), device=DEVICE))
    with pytest.warns(RuntimeWarning, match="not finite"):
        layer.eval()


# What is refused, or left to PyTorch


@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (2, 6, 0, 4)])
def test_empty_inputs_are_refused_in_training(shape):
    with kernels.use("triton"), pytest.raises(bkn_zoo.InputError, match="no values"):
        BatchKalmanNorm2d(6).to(DEVICE)(torch.empty(shape, device=DEVICE))


def test_a_residual_on_another_device_is_refused():
    with pytest.raises(bkn_zoo.InputError, match="meta"):
        BatchKalmanNorm2d(6).to(DEVICE)(normal(2, 6, 4, 4), residual=torch.empty(2, 6, 4, 4, device="meta"))


def test_shapes_beyond_32_bits_are_left_to_pytorch():
    with kernels.use("triton"):
        assert kernels.chosen(torch.empty(70_000, 8, 2, 2, device="meta"))
        for shape, inputs in [
            ((1, 2**11, 2**10, 2**10), 0),  # values of an image
            ((2**20, 2**9, 1, 1), 0),  # numbers for channels of all images
            ((2**14, 2**9, 1, 1), 2**15),  # predictions over stretches of the inputs
            ((1, 2**16, 1, 1), 2**15),  # A itself
        ]:
            assert not kernels.chosen(torch.empty(shape, device="meta"), inputs)


@pytest.mark.parametrize("size", [(2**8, 2**8), (2**8, 1, 2**8)], ids=str)
def test_a_slice_whose_offsets_do_not_fit_32_bits_is_copied(size):
    def channels(whole):
        layout = CHANNELS_LAST[2 + len(size)]
        return torch.empty(2, whole, *size, device="meta").to(memory_format=layout)[:, :4]

    for whole, step in [(2**15 - 1, 2**15 - 1), (2**15, 4)]:
        assert norm_launch.position_stride(norm_launch.slice_like(channels(4), channels(whole))) == step


# Operators and launches


def operands(prior, layout):
    """Arguments of both operators, for a layer with a residual and a ReLU."""

    def numbers(*shape):
        return torch.rand(shape, device=DEVICE) + 0.1

    x, residual, weight, bias = normal(4, 3, 2, 5), numbers(4, 3, 2, 5), numbers(3), numbers(3)
    x = {
        "channels first": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }[layout]
    kalman = {
        "first": (None,) * 5,
        "full": (numbers(2, 5), numbers(2, 5), numbers(3, 5), numbers(3), numbers(1)),
        "predicted": (numbers(2, 3), numbers(2, 3), None, None, numbers(1)),
    }[prior]
    running = [*(numbers(3) for _ in range(5)), *(torch.tensor(0, device=DEVICE) for _ in range(2))]
    forward = (x, weight, bias, *kalman, residual, running, 2, 1e-5, 0.1, True, [], 0.0)
    upper = (None, None) if prior == "first" else (numbers(2, 3), numbers(2, 3))
    return forward, (x, *upper, x, residual, weight, bias, numbers(4, 2, 3), *kalman, 2, 1e-5, True)


KINDS = [("first", "channels first"), ("full", "channels last"), ("predicted", "transposed")]


@pytest.mark.parametrize(("prior", "layout"), KINDS)
def test_the_operators_keep_their_contract_with_pytorch(prior, layout):
    """Schema and aliases, fakes with the dtypes and strides of what comes, and tracing, all as torch.library checks."""
    forward, backward = operands(prior, layout)
    torch.library.opcheck(torch.ops.bkn_zoo.norm, forward)
    torch.library.opcheck(torch.ops.bkn_zoo.norm_backward, backward)


@pytest.mark.parametrize("strict", [False, True])
def test_a_compiler_sees_the_operators_and_no_transforms(strict):
    class Sampled(BatchKalmanNorm2d):
        def forward(self, x):
            return super().forward(x, None, Statistics("sample"))[0]

    layer, x = Sampled(4).to(DEVICE).eval(), normal(2, 4, 3, 3)
    with kernels.use("triton"), torch.no_grad():
        exported = torch.export.export(layer, (x,), strict=strict)
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert "bkn_zoo.norm.default" in names
    assert not [name for name in names if "functorch" in name]


@gpu_only
def test_more_groups_than_a_dimension_of_a_grid_has_are_taken():
    y, _ = BatchNorm2d(3).to(DEVICE)(normal(70_000, 3, 2, 2), None, ALONE)
    assert_close(y[-1].mean((1, 2)), torch.zeros(3, device=DEVICE), rtol=0, atol=1e-5)


# Whole networks, on a GPU


def of_the_zoo():
    model = bkn_zoo.create_model("inception_cifar_bkn")
    model.statistics_batch_size = 2
    return model.to(DEVICE)


def converted():
    return bkn_zoo.convert(with_all_kinds_of_transitions(32), statistics_batch_size=2).to(DEVICE)


networks = pytest.mark.parametrize("network", [of_the_zoo, converted])


def losses(network, implementation, dtype):
    """Of twenty training steps of a small network."""
    torch.manual_seed(0)
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.07, momentum=0.9)
    images = torch.randn(16, 3, 32, 32).to(DEVICE, memory_format=torch.channels_last)
    labels = torch.arange(16, device=DEVICE) % 10
    history = []
    with kernels.use(implementation):
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    return torch.tensor(history)


@gpu_only
@networks
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=str)
def test_twenty_training_steps_of_a_network_give_the_same_losses(network, dtype, tolerance):
    kernel, reference = losses(network, "triton", dtype), losses(network, "pytorch", dtype)
    assert reference[-1] < 0.7 * reference[0]
    assert_close(kernel, reference, rtol=tolerance, atol=tolerance)


@gpu_only
@networks
def test_a_cuda_graph_of_a_training_step_replays_it(network):
    model, images = network(), normal(8, 3, 32, 32)

    def step():
        model.zero_grad(set_to_none=False)
        loss = model(images).square().mean()
        loss.backward()
        return loss

    graph, captured = capture(step)
    norm = next(module for module in model.modules() if isinstance(module, BatchKalmanNorm2d))
    steps = norm.num_batches_tracked.clone()
    graph.replay()
    assert_close(captured, step())
    assert norm.num_batches_tracked == steps + 2


@gpu_only
@networks
def test_torch_compile_sees_through_the_operators(network):
    model, images = network(), normal(8, 3, 32, 32)
    eager = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(images)
    assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    compiled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
