"""The Triton kernels against the PyTorch version of the layer, which is their reference.

They run on a GPU where there is one, and otherwise on Triton's interpreter (conftest.py turns it on), which executes
the same code on the CPU, slowly: only the small cases are run there.
"""

import copy
import itertools
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from cuda_graphs import capture
from studies.variants import BatchKalmanVariant2d
from torch import nn
from torch.autograd import forward_ad

import bkn_zoo
from bkn_zoo import kernels
from bkn_zoo.norms import BatchKalmanNorm1d, BatchKalmanNorm2d, BatchKalmanNorm3d, BatchNorm2d, Belief, Statistics
from bkn_zoo.norms.batch_kalman import new_process_noise
from bkn_zoo.norms.centered import Centered2d

pytestmark = pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed on this platform")

if kernels.HAS_TRITON:
    import triton

    from bkn_zoo.kernels import launch, norm_launch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu_only = pytest.mark.skipif(not GPU, reason="too slow on Triton's interpreter: needs a GPU")

# images, channels, map, statistics group, channels below (or the shapes of the blocks of an A that is not full)
SMALL = [
    (4, 5, (3, 3), 2, 3),
    (2, 3, (1, 1), 1, 4),
    (8, 33, (7, 7), 4, 20),
    (1, 16, (5, 6), 1, 40),
    (4, 16, (2, 2), 4, None),
]
LARGE = [
    (32, 64, (56, 56), 1, None),
    (32, 64, (112, 112), 4, 64),
    (32, 256, (14, 14), 4, 1024),
    (64, 2048, (7, 7), 32, 512),
    (256, 3, (9, 9), 256, 7),
    (256, 352, (7, 7), 1, 96),
]
SMALL_BLOCKS = [
    (4, 6, (3, 3), 2, ((6,),)),
    (3, 6, (3, 3), 1, ((2, 3, 4),)),
    (4, 33, (5, 5), 4, ((20, 7), (13,))),
]
LARGE_BLOCKS = [
    (16, 96, (112, 112), 1, ((96,),)),
    (16, 960, (7, 7), 1, ((960,),)),
    (32, 256, (14, 14), 4, ((32, 8, 4),)),
    (256, 96, (28, 28), 2, ((64,), (32, 128))),
]
SHAPES = [*SMALL, *(pytest.param(shape, marks=gpu_only) for shape in LARGE)]
BLOCKS = [*SMALL_BLOCKS, *(pytest.param(shape, marks=gpu_only) for shape in LARGE_BLOCKS)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_layer(channels, below):
    """A layer above so many channels, or above those that the blocks of its A take; and the channels."""
    if not isinstance(below, tuple):
        return BatchKalmanNorm2d(channels, below), below
    inputs = sum(shape[-1] * (shape[0] if len(shape) == 3 else 1) for shape in below)
    return BatchKalmanNorm2d(channels, inputs, transition_shapes=below), inputs


def run(implementation, shape, dtype, layout, residual, relu, precise=False):
    """Everything that a training step of one layer gives, by name, in float64.

    No gradient comes from outputs close to zero: on which side of the ReLU they fall is a matter of rounding.
    """
    images, channels, size, group, below = shape
    torch.manual_seed(0)
    layer, below = make_layer(channels, below)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_()
        if below:
            for block in layer.transition_blocks:
                block.normal_(std=block.shape[-1] ** -0.5)
            layer.raw_process_noise.normal_()
            layer.set_gain(0.6)
    groups = images // group
    x, shortcut, dy = (torch.randn(images, channels, *size) for _ in range(3))
    prior = Belief(torch.randn(groups, below or 1), torch.rand(groups, below or 1) + 0.1)
    upper = torch.randn(2, groups, channels)
    x, shortcut, dy = ((t * 2 + 1).to(dtype).to(memory_format=layout) for t in (x, shortcut, dy))
    layer, x, shortcut, dy, upper = (t.to(DEVICE) for t in (layer, x, shortcut, dy, upper))
    prior = Belief(*(t.to(DEVICE) for t in prior))
    if precise:
        layer, x, shortcut, dy, upper = (t.double() for t in (layer, x, shortcut, dy, upper))
        prior = Belief(*(t.double() for t in prior))
    for tensor in (x, shortcut, *prior):
        tensor.requires_grad_()
    arguments = (x, prior if below else None, Statistics("batch", group), shortcut if residual else None)
    with kernels.use("pytorch"), torch.no_grad():  # in float64 whatever the precision, so that all leave out the same
        exact_prior = Belief(*(t.double() for t in prior)) if below else None
        exact_shortcut = shortcut.double() if residual else None
        exact = copy.deepcopy(layer).double()(x.double(), exact_prior, Statistics("batch", group), exact_shortcut)
        dy[exact[0].abs() < 0.05] = 0
    with kernels.use(implementation):
        y, belief = layer(*arguments, relu=relu)
        torch.autograd.backward([y, *belief], [dy, *upper])
    results = {"y": y, "belief mean": belief.mean, "belief var": belief.var, "x": x.grad, "residual": shortcut.grad}
    results |= {"prior mean": prior.mean.grad, "prior var": prior.var.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    results |= dict(layer.named_buffers())
    return {name: value.detach().double().cpu() for name, value in results.items() if value is not None}


def largest_difference(results, reference):
    """The largest relative difference in norm, and what it is about."""
    assert results.keys() == reference.keys()
    differences = {
        name: float((results[name] - value).norm() / value.norm().clamp_min(1e-3)) for name, value in reference.items()
    }
    return max((difference, name) for name, difference in differences.items())


FEW, USUAL = [*SMALL, *SMALL_BLOCKS], (torch.channels_last, True, True)
# On the interpreter, layout, residual and ReLU vary with one shape, and the other shapes have the usual.
STEPS = [
    pytest.param(shape, *kind, marks=() if shape == SMALL[0] or (shape in FEW and kind == USUAL) else gpu_only)
    for shape in [*FEW, *LARGE, *LARGE_BLOCKS]
    for kind in itertools.product(LAYOUTS, (False, True), (False, True))
]


@pytest.mark.parametrize(("shape", "layout", "residual", "relu"), STEPS, ids=str)
def test_a_training_step_equals_the_pytorch_version_in_float32(shape, layout, residual, relu):
    case = (shape, torch.float32, layout, residual, relu)
    difference, name = largest_difference(run("triton", *case), run("pytorch", *case))
    assert difference < 1e-5, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3] + SHAPES[5:] + BLOCKS[2:], ids=str)
def test_a_training_step_is_as_close_to_float64_as_its_precision_allows(shape, dtype):
    case = (shape, dtype, torch.channels_last, True, True)
    difference, name = largest_difference(run("triton", *case), run("pytorch", *case, precise=True))
    assert difference < (1e-5 if dtype == torch.float32 else 2e-2), name


def test_more_groups_and_inputs_than_a_tile_has_are_taken() -> None:
    shape = (33, 3, (1, 1), 1, 70)
    assert shape[0] > norm_launch.GROUPS
    assert shape[-1] > norm_launch.DEPTH
    case = (shape, torch.float32, torch.channels_last, False, True)
    difference, name = largest_difference(run("triton", *case), run("pytorch", *case))
    assert difference < 1e-5, name


PRODUCTS = ("belief mean", "belief var", "prior mean", "prior var", "transition")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_beliefs_are_as_exact_as_the_features(dtype: torch.dtype) -> None:
    """What comes of products with A or with beliefs, forward and backward, against float64: a GPU may take tf32."""
    case = ((4, 16, (2, 2), 1, 40), dtype, torch.channels_last, False, False)
    found, reference = (
        {name: each[name] for name in PRODUCTS} for each in (run("triton", *case), run("pytorch", *case, precise=True))
    )
    difference, name = largest_difference(found, reference)
    assert difference < (2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps), name


@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[6:8] + SHAPES[9:], ids=str)
def test_one_process_noise_for_all_channels_gets_the_sum_of_their_gradients(shape):
    images, channels, size, group, below = shape
    torch.manual_seed(0)
    layers = [BatchKalmanNorm2d(channels, below, raw_process_noise=new_process_noise(1)).to(DEVICE) for _ in range(2)]
    prior = Belief(torch.randn(images // group, below), torch.rand(images // group, below) + 0.1)
    prior = Belief(*(t.to(DEVICE) for t in prior))
    x = torch.randn(images, channels, *size).to(DEVICE, memory_format=torch.channels_last)
    dy = torch.randn(x.shape).to(x)
    for layer, implementation in zip(layers, ["triton", "pytorch"], strict=True):
        with kernels.use(implementation):
            layer(x, prior, Statistics("batch", group))[0].backward(dy)
    found, expected = (layer.raw_process_noise.grad for layer in layers)
    assert found.shape == (1,)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SMALL[2], pytest.param(LARGE[2], marks=gpu_only)], ids=str)
def test_the_same_input_gives_the_same_bits(shape):
    case = (shape, torch.float32, torch.channels_last, True, True)
    first, second = run("triton", *case), run("triton", *case)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_variance_is_right_around_a_large_mean(dtype):
    deviation = 1e-2 if dtype == torch.float32 else 1.0  # float16 has steps of 0.5 around 1000
    torch.manual_seed(0)
    x = (1e3 + deviation * torch.randn(4, 16, 8, 8)).to(dtype)
    with kernels.use("triton"):
        _, belief = BatchKalmanNorm2d(16).to(DEVICE)(x.to(DEVICE), None, Statistics("batch", 2))
    exact = x.double().unflatten(0, (2, 2)).var(dim=(1, 3, 4), correction=0)
    torch.testing.assert_close(belief.var.cpu().double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("images", "group"), [(4, 1), (4, 2), (4, 4), (6, 3)])
def test_grouped_batch_normalization_runs_on_the_same_kernels(images, group):
    torch.manual_seed(0)
    x = torch.randn(images, 6, 4, 4, device=DEVICE)
    layers = [BatchNorm2d(6).to(DEVICE) for _ in range(2)]
    outputs = []
    for layer, implementation in zip(layers, ["triton", "pytorch"], strict=True):
        with kernels.use(implementation):
            outputs.append(layer(x, None, Statistics("batch", group), relu=True)[0])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layers[0].running_var, layers[1].running_var)


@pytest.mark.parametrize(("residual", "group", "below"), [(True, 2, 9), (False, 1, 9), (False, 1, ((35,),))])
def test_images_that_are_too_few_to_keep_a_gpu_busy_are_taken_in_pieces(residual, group, below, monkeypatch):
    monkeypatch.setattr(norm_launch, "processors", lambda device: 132)
    shape = (2, 35, (16, 16), group, below)
    assert norm_launch.choose_tiling(2, 35, 256, True, False, 132).pieces == 4
    case = (shape, torch.float32, torch.channels_last, residual, True)
    difference, name = largest_difference(run("triton", *case), run("pytorch", *case))
    assert difference < 1e-5, name


@pytest.mark.parametrize(
    "shape", [(17, 5, (2, 1), 1, 260), (17, 5, (2, 1), 1, ((5,),)), (4, 5, (2, 2), 2, None)], ids=str
)
def test_the_last_program_of_a_short_pass_forms_the_beliefs(shape, monkeypatch):
    """Of more groups than a tile has and more inputs than a stretch; twice in one memory."""
    monkeypatch.setattr(norm_launch, "processors", lambda device: 132)
    monkeypatch.setattr(norm_launch, "GROUPS", 16)
    assert norm_launch.SPLIT < 260
    assert norm_launch.choose_tiling(17, 5, 2, True, False, 132).merged
    kept = launch.memory(2**20, 2**10, DEVICE)
    monkeypatch.setattr(launch, "memory", lambda *_: kept)
    monkeypatch.setattr(launch, "_scratch", launch._Scratch())  # or what earlier tests left would be taken on a GPU
    case = (shape, torch.float32, torch.channels_last, False, True)
    reference = run("pytorch", *case)
    for _ in range(2):
        difference, name = largest_difference(run("triton", *case), reference)
        assert difference < 1e-5, name
        assert not kept[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("below", "group"), [(None, 4), (3, 4), (3, None), (((6,),), 4)])
def test_expected_statistics_are_those_of_the_pytorch_version(dtype, below, group):
    torch.manual_seed(0)
    layer, below = make_layer(6, below)
    layer.to(DEVICE).eval()
    for buffer in (layer.image_mean, layer.image_var, layer.image_spread):
        buffer.uniform_(0.5, 1.5)
    x = (1 + 2 * torch.randn(3, 6, 4, 5, device=DEVICE)).to(dtype)
    prior = Belief(torch.randn(3, below, device=DEVICE), torch.rand(3, below, device=DEVICE)) if below else None
    outputs = []
    for implementation in ("triton", "pytorch"):
        with kernels.use(implementation), torch.no_grad():
            outputs.append(layer(x, prior, Statistics("expected", group), residual=x, relu=True))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(outputs[0][0], outputs[1][0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-5, atol=1e-5)


def test_expected_statistics_have_gradients_all_the_same():
    layer = BatchKalmanNorm2d(6).to(DEVICE).eval()
    x = torch.randn(3, 6, 4, 4, device=DEVICE, requires_grad=True)
    with kernels.use("triton"):
        layer(x, None, Statistics("expected", 4))[0].square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_what_is_predicted_before_the_kernels_is_in_full_precision_under_autocast():
    torch.manual_seed(0)
    layer, inputs = make_layer(6, ((4, 5), (2,)))
    with torch.no_grad():
        for block in layer.transition_blocks:
            block.normal_()
    layer.to(DEVICE)
    prior = Belief(torch.randn(2, inputs, device=DEVICE), torch.rand(2, inputs, device=DEVICE))
    x = torch.randn(2, 6, 3, 3, device=DEVICE, dtype=torch.bfloat16)
    with kernels.use("triton"):
        _, expected = layer(x, prior, Statistics("batch", 1))
        with torch.autocast(DEVICE, torch.bfloat16):
            _, belief = layer(x, prior, Statistics("batch", 1))
    assert all(map(torch.equal, belief, expected))


def centered():
    layer = Centered2d(4, 3)
    layer.set_center(torch.zeros(4))
    return layer


VARIANTS = {
    "a bias": lambda: BatchKalmanVariant2d(4, 3, prediction_bias=True),
    "blocks": lambda: BatchKalmanNorm2d(4, 3, transition_shapes=((2,), (2, 1))),
    "a center": centered,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_runs_on_the_kernels(variant):
    results = []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        layer = VARIANTS[variant]()
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        prior = Belief(torch.randn(2, 3, device=DEVICE), torch.rand(2, 3, device=DEVICE))
        x = torch.randn(4, 4, 3, 3, device=DEVICE)
        with kernels.use(implementation):
            y, belief = layer.to(DEVICE)(x, prior, Statistics("batch", 2))
            (y.relu().square().sum() + belief.mean.sum()).backward()
        results.append([y, *(parameter.grad for parameter in layer.parameters())])
    assert layer.fusible
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class Depthwise(nn.Module):
    """A network with all shapes of A: norms after dense, depthwise and grouped convolutions, after none, after both."""

    def __init__(self, width=8, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU6())
        self.expand = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.BatchNorm2d(2 * width), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width), nn.BatchNorm2d(2 * width), nn.ReLU6()
        )
        self.project = nn.Sequential(nn.Conv2d(2 * width, width, 1), nn.BatchNorm2d(width))
        self.grouped = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=4), nn.BatchNorm2d(width), nn.ReLU())
        self.again = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 1)
        self.joined = nn.BatchNorm2d(2 * width)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, classes))

    def forward(self, x):
        x = self.stem(x)
        x = self.again(self.grouped(x + self.project(self.depthwise(self.expand(x)))))
        return self.head(self.joined(torch.cat([x, self.conv(x)], dim=1)).relu())


def test_every_norm_of_a_converted_network_runs_on_the_kernels(monkeypatch):
    torch.manual_seed(0)
    model = bkn_zoo.convert(Depthwise().to(DEVICE), statistics_batch_size=1)
    norms = [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d)]
    shapes = {block.ndim for norm in norms if norm.prior_features for block in norm.transition_blocks}
    assert shapes == {1, 2, 3}
    with torch.no_grad():
        for norm in norms:
            for block in norm.transition_blocks if norm.prior_features else []:
                block.normal_(std=block.shape[-1] ** -0.5)
    images = torch.randn(2, 3, 8, 8, device=DEVICE)
    found, fused_norm = [], kernels.fused_norm
    monkeypatch.setattr(kernels, "fused_norm", lambda *arguments: found.append(1) or fused_norm(*arguments))
    results = []
    for implementation in ("triton", "pytorch"):
        with kernels.use(implementation):
            model.zero_grad()
            model(images).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert len(found) == len(norms) == 7
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_a_process_noise_far_below_zero_does_not_vanish():
    layer = BatchKalmanNorm2d(4, 4).to(DEVICE)
    with torch.no_grad():
        layer.raw_process_noise.copy_(torch.tensor([-30.0, -18.0, -7.0, 30.0]))
        layer.raw_gain.fill_(-80.0)  # the belief is the prediction, and with A = 0 its variance is R
    prior = Belief(torch.zeros(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE))
    with kernels.use("triton"), torch.no_grad():
        _, belief = layer(torch.randn(2, 4, 3, 3, device=DEVICE), prior, Statistics("batch", 1))
    torch.testing.assert_close(belief.var[0], layer.process_noise, rtol=1e-5, atol=0)


def test_second_derivatives_are_refused():
    layer = BatchKalmanNorm2d(4).to(DEVICE)
    x = torch.randn(2, 4, 3, 3, device=DEVICE, requires_grad=True)
    with kernels.use("triton"):
        (gradient,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_layer_in_half_precision_gets_gradients_of_its_own_dtype(dtype):
    layer = BatchKalmanNorm2d(4, 4).to(DEVICE, dtype)
    prior = Belief(torch.zeros(2, 4, device=DEVICE), torch.ones(2, 4, device=DEVICE))
    with kernels.use("triton"):
        y, _ = layer(torch.randn(2, 4, 3, 3, device=DEVICE, dtype=dtype), prior, Statistics("batch", 1))
        y.square().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {dtype}


def test_kernels_that_cannot_run_here_are_not_replaced_in_silence(monkeypatch):
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    with pytest.raises(bkn_zoo.InputError, match="neither a GPU nor TRITON_INTERPRET=1"), kernels.use("triton"):
        pass


def step_of_a_layer(below, half=(), frozen=()):
    """A layer after a step by the kernels; some of its parameters in half precision, or without a gradient."""
    layer = BatchKalmanNorm2d(4, below).to(DEVICE)
    for name in half:
        getattr(layer, name).data = getattr(layer, name).data.bfloat16()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    prior = Belief(torch.rand(2, below, device=DEVICE), torch.ones(2, below, device=DEVICE))
    y, _ = layer(torch.randn(2, 4, 3, 3, device=DEVICE), prior, Statistics("batch", 1))
    (y * torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y)).sum().backward()
    return layer


def test_a_gradient_is_as_exact_as_its_own_parameter_whatever_the_others_are():
    with kernels.use("triton"):
        torch.manual_seed(0)
        layer = step_of_a_layer(8, half=("weight", "bias"))
        torch.manual_seed(0)
        other = step_of_a_layer(8)
    assert (layer.weight.grad.dtype, layer.transition.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(layer.transition.grad, other.transition.grad, rtol=1e-5, atol=1e-6)


def test_where_a_is_frozen_its_gradient_is_not_kept():
    with kernels.use("triton"):
        layer = step_of_a_layer(64, frozen=("transition",))
    assert layer.transition.grad is None
    assert layer.bias.grad.untyped_storage().nbytes() < 4 * layer.transition.numel()


def operands(prior, layout):
    """Arguments of both operators, for a layer with a residual and a ReLU."""
    torch.manual_seed(0)

    def numbers(*shape):
        return torch.rand(shape, device=DEVICE) + 0.1

    x, residual, weight, bias = torch.randn(4, 3, 2, 5, device=DEVICE), numbers(4, 3, 2, 5), numbers(3), numbers(3)
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
    backward = (x, *upper, x, residual, weight, bias, numbers(4, 2, 3), *kalman, 2, 1e-5, True)
    return forward, backward


@pytest.mark.parametrize(
    ("prior", "layout"),
    [("first", "channels first"), ("full", "channels last"), ("predicted", "transposed")],
)
def test_the_operators_keep_their_contract_with_pytorch(prior, layout):
    """Schema and aliases, fakes with the dtypes and strides of what comes, and tracing, all as torch.library checks."""
    forward, backward = operands(prior, layout)
    torch.library.opcheck(torch.ops.bkn_zoo.norm, forward)
    torch.library.opcheck(torch.ops.bkn_zoo.norm_backward, backward)


def test_what_would_overflow_the_kernels_counters_is_left_to_pytorch():
    with kernels.use("triton"):
        assert kernels.chosen(torch.empty(70_000, 8, 2, 2, device="meta"))
        for shape, inputs in [
            ((1, 2**11, 2**10, 2**10), 0),  # values of an image
            ((2**20, 2**9, 1, 1), 0),  # numbers for channels of all images
            ((2**14, 2**9, 1, 1), 2**15),  # predictions over stretches of the inputs
            ((1, 2**16, 1, 1), 2**15),  # A itself
        ]:
            assert not kernels.chosen(torch.empty(shape, device="meta"), inputs)


def test_more_groups_than_a_dimension_of_a_grid_has_are_taken():
    """65,536 of them, for a grid of programs one after another; on the interpreter, that they are counted as such."""
    groups = 70_000
    if not GPU:
        shape = norm_launch.Shape(groups, 1, 1, 1, False, False, 0, 0, False, False, 1e-5, "tf32", 1)
        plan = norm_launch.plan_forward(shape, False, 0.1, None)
        assert [kernel.programs for kernel in plan.kernels] == [groups] * 3
        return
    x = torch.randn(groups, 3, 2, 2, device=DEVICE)
    y, _ = BatchNorm2d(3).to(DEVICE)(x, None, Statistics("batch", 1))
    torch.testing.assert_close(y[-1].mean((1, 2)), torch.zeros(3, device=DEVICE), rtol=0, atol=1e-5)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Two GPUs are played by a double: tensors of the second, while the first is the current one."""
    current, seen = [0], []

    class Device:
        def __init__(self, device):
            self.index = device

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    class Elsewhere:
        def get_device(self):
            return 1

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    launches = launch.Launches([], (), {}, 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launches, "_launch_again", lambda device, *_: seen.append((device, current[0])))
    launches(Elsewhere(), alone=True)
    assert seen == [(1, 1)]
    assert current == [0]


def test_memory_for_work_grows_and_counters_are_never_work(monkeypatch):
    memory = launch.memory
    monkeypatch.setattr(launch, "memory", lambda size, counters, device: memory(size, counters, "cpu"))
    scratch = launch._Scratch()
    for size, counters, expected in [
        (9, 0, (9, 0)),
        (5, 3, (9, 3)),
        (20, 0, (20, 3)),
        (1, 7, (20, 7)),
        (2, 2, (20, 7)),
    ]:
        work, arrived = scratch.take(size, counters, 0, 99)
        assert work.numel() == expected[0]
        assert arrived.dtype == torch.int32
        if counters:
            assert (arrived.numel(), int(arrived.sum())) == (expected[1], 0)
    assert scratch.take(2, 2, 0, 99)[0] is work
    assert scratch.take(2, 2, 0, 98)[0] is not work


@pytest.mark.parametrize(
    ("stream", "alone", "capturing", "kept"),
    [
        (0, True, False, True),
        (0, False, False, True),
        (7, True, False, True),
        (7, True, True, False),
        (7, False, False, False),
    ],
)
def test_memory_for_work_is_kept_where_nothing_is_captured_or_prepared_for_it(
    stream, alone, capturing, kept, monkeypatch
):
    """A compiled network that is to be captured runs before that on a stream of its own, by the operators."""
    taken = []
    new = launch.memory(1, 1, "cpu")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(launch, "memory", lambda *_: taken.append("new") or new)
    monkeypatch.setattr(launch, "_scratch", SimpleNamespace(take=lambda *_: taken.append("kept") or new))
    launch.Launches([], (), {}, 1)._launch_again(0, (torch.ones(1),), alone)
    assert taken == ["kept" if kept else "new"]


def dual(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


TRANSFORMS = {
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x.cos(),))[1],
    "dual numbers": lambda function, x: dual(function, x, x.cos()),
    "grad": lambda function, x: torch.func.grad(lambda x: (function(x) * x.cos()).sum())(x),
    "vmap": lambda function, x: torch.vmap(lambda image: function(image[None]))(x),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tangents_and_transforms_of_functions_are_left_to_pytorch(transform, compiled):
    layer = BatchKalmanNorm2d(4).to(DEVICE).eval()
    x = torch.randn(2, 4, 3, 3, device=DEVICE)

    def run(x):
        return TRANSFORMS[transform](lambda x: layer(x, None, Statistics("sample"))[0], x)

    with kernels.use("pytorch"):
        expected = run(x)
    run = torch.compile(run, backend="eager") if compiled else run
    for learning in (False, True):
        with kernels.use("triton"), torch.set_grad_enabled(learning):
            torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_a_compiler_sees_the_operators_and_no_question_about_transforms(strict):
    class Sampled(BatchKalmanNorm2d):
        def forward(self, x):
            return super().forward(x, None, Statistics("sample"))[0]

    layer = Sampled(4).to(DEVICE).eval()
    x = torch.randn(2, 4, 3, 3, device=DEVICE)
    with kernels.use("triton"), torch.no_grad():
        exported = torch.export.export(layer, (x,), strict=strict)
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert "bkn_zoo.norm.default" in names
    assert not [name for name in names if "functorch" in name]


@pytest.mark.parametrize("scratch", [0, 64])
def test_kernels_are_launched_as_tritons_own_launcher_would(scratch, monkeypatch):
    """Or by it, where a kernel wants memory of it; of a version that is not known too."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    calls = []
    run = object.__new__(driver.CudaLauncher)
    vars(run).update(
        launch=lambda *arguments: calls.append(arguments), num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
        global_scratch_size=scratch, global_scratch_align=16, profile_scratch_size=0, profile_scratch_align=1,
        arg_annotations="annotations", kernel_signature="signature", gsan_enabled=False,
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    code = SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))
    own = 4096, 8192, 3, 0.5, True
    if scratch == 0:
        run(5, 1, 1, 99, code.function, code.packed_metadata, None, None, None, *own)
        direct, before = launch.launcher(code)
        assert direct is not run  # unless Triton is new: see what its launcher does, and add it to those known
        direct(5, 1, 1, 99, *before, *own)
        assert calls[0] == calls[1]
        assert launch.launcher(code, "99.0.0")[0] is run
    else:
        assert launch.launcher(code)[0] is run


def test_kernels_that_cannot_be_imported_are_not_taken_for_a_missing_triton(tmp_path, monkeypatch):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libcuda is broken')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(sys.modules):
        if name.partition(".")[0] == "triton" or name.startswith("bkn_zoo.kernels."):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="libcuda is broken"):
        runpy.run_path(kernels.__file__)


def test_sample_statistics_leave_the_running_averages_alone():
    torch.manual_seed(0)
    layer = BatchKalmanNorm2d(6).to(DEVICE).eval()
    before = {name: value.clone() for name, value in layer.named_buffers()}
    x = torch.randn(3, 6, 4, 4, device=DEVICE)
    with kernels.use("triton"):
        y, _ = layer(x, None, Statistics("sample"))
    with kernels.use("pytorch"):
        torch.testing.assert_close(y, layer(x, None, Statistics("sample"))[0], rtol=1e-5, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("below", [None, 3])
def test_a_step_that_is_not_finite_leaves_the_running_averages_alone(bad, below):
    layer = BatchKalmanNorm2d(20, below).to(DEVICE)
    before = {name: value.clone() for name, value in layer.named_buffers() if name != "skipped_steps"}
    x = torch.randn(4, 20, 3, 3, device=DEVICE)
    x[1, 2, 0, 0] = bad
    prior = Belief(torch.zeros(2, 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)) if below else None
    with kernels.use("triton"):
        y, _ = layer(x, prior, Statistics("batch", 2), relu=True)
    assert y[1, 2].isnan().all()
    assert y[2:].isfinite().all()
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers() if name in before)
    assert layer.skipped_steps == 1


def test_a_spread_that_overflows_is_not_remembered():
    layer, x = BatchKalmanNorm2d(4, statistics_batch_size=1).to(DEVICE), torch.randn(4, 4, 3, 3, device=DEVICE)
    x[0] = 1e20
    with kernels.use("triton"):
        for _ in range(2):
            layer(x)
    assert layer.num_batches_tracked == 2
    assert layer.image_spread.isfinite().all()


@pytest.mark.skipif(not GPU, reason="on the CPU the warning comes at once; deferring it needs a GPU")
def test_skipped_steps_are_reported_once_when_training_ends():
    layer = BatchKalmanNorm2d(4).to(DEVICE)
    layer(torch.full((2, 4, 3, 3), float("nan"), device=DEVICE))
    with pytest.warns(RuntimeWarning, match="not finite"):
        layer.eval()


def test_inputs_that_are_not_contiguous_are_taken():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, 8, device=DEVICE)[..., ::2]
    shortcut = torch.randn(4, 5, 4, 6, device=DEVICE).permute(0, 3, 1, 2)
    outputs = []
    for implementation in ("triton", "pytorch"):
        with kernels.use(implementation):
            outputs.append(BatchKalmanNorm2d(6).to(DEVICE)(x, residual=shortcut)[0])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["nchw", "channels_last"])
@pytest.mark.parametrize("size", [(5, 4), (5, 1), (1, 5), (1, 1)], ids=str)
def test_gradients_that_are_a_slice_of_channels_are_taken(layout, size):
    gradients = []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        x = torch.randn(4, 6, *size, device=DEVICE).to(memory_format=layout).requires_grad_()
        other = torch.randn(4, 3, *size, device=DEVICE).to(memory_format=layout)
        with kernels.use(implementation):
            y, _ = BatchKalmanNorm2d(6).to(DEVICE)(x, None, Statistics("batch", 2), relu=True)
            joined = torch.cat([other, y, other], dim=1)
            joined.backward(torch.randn(4, 12, *size, device=DEVICE).to(memory_format=layout))
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(2**8, 2**8), (2**8, 1, 2**8)], ids=str)
def test_a_slice_of_channels_is_copied_where_its_offsets_do_not_fit_32_bits(size):
    layout = norm_launch.CHANNELS_LAST[2 + len(size)]

    def channels(whole):
        return torch.empty(2, whole, *size, device="meta").to(memory_format=layout)[:, :4]

    x = channels(4)
    for whole, step in [(2**15 - 1, 2**15 - 1), (2**15, 4)]:
        dy = norm_launch.slice_like(x, channels(whole))
        assert norm_launch.position_stride(dy) == step


VOLUMES = [(torch.channels_last_3d, size) for size in ((2, 3, 4), (1, 3, 4), (2, 3, 1), (2, 1, 1), (1, 1, 1))]


@pytest.mark.parametrize(("layout", "size"), [*VOLUMES, (torch.contiguous_format, (2, 3, 4))], ids=str)
def test_volumes_keep_their_layout(layout, size):
    """In output and gradients, of the residual too; and where gradients arrive as a slice of channels."""
    results = []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        x, residual, other = (torch.randn(4, 6, *size, device=DEVICE).to(memory_format=layout) for _ in range(3))
        x, residual = x.requires_grad_(), residual.requires_grad_()
        with kernels.use(implementation):
            y, _ = BatchKalmanNorm3d(6).to(DEVICE)(x, None, Statistics("batch", 2), residual, relu=True)
            joined = torch.cat([other, y], dim=1)
            joined.backward(torch.randn(joined.shape, device=DEVICE).to(memory_format=layout))
        results.append((y, x.grad, residual.grad))
        assert y.is_contiguous(memory_format=layout)
        assert x.grad.is_contiguous(memory_format=layout)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(), (7,)], ids=str)
def test_features_without_a_map_are_taken(size):
    results = []
    for implementation in ("triton", "pytorch"):
        torch.manual_seed(0)
        x = torch.randn(6, 5, *size, device=DEVICE).requires_grad_()
        with kernels.use(implementation):
            y, _ = BatchKalmanNorm1d(5).to(DEVICE)(x, None, Statistics("batch", 3))
            y.square().sum().backward()
        results.append((y, x.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_scale_without_a_shift_is_left_to_pytorch():
    layer, x = BatchKalmanNorm2d(5, bias=False).to(DEVICE), torch.randn(4, 5, 3, 3, device=DEVICE)
    results = []
    for implementation in ("triton", "pytorch"):
        with kernels.use(implementation):
            results.append(layer(x))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 6, 4, 4), (2, 6, 0, 4)])
def test_empty_inputs_are_refused_in_training(shape):
    with kernels.use("triton"), pytest.raises(bkn_zoo.InputError, match="no values"):
        BatchKalmanNorm2d(6).to(DEVICE)(torch.empty(shape, device=DEVICE))


def test_a_residual_on_another_device_is_refused():
    layer = BatchKalmanNorm2d(6).to(DEVICE)
    x = torch.randn(2, 6, 4, 4, device=DEVICE)
    with pytest.raises(bkn_zoo.InputError, match="meta"):
        layer(x, residual=torch.empty(2, 6, 4, 4, device="meta"))


def test_unknown_implementations_are_refused():
    with pytest.raises(bkn_zoo.UnknownNameError, match="pytorch or triton"), kernels.use("cuda"):
        pass


def of_the_zoo():
    model = bkn_zoo.create_model("inception_cifar_bkn")
    model.statistics_batch_size = 2
    return model.to(DEVICE)


def converted():
    return bkn_zoo.convert(Depthwise(width=32), statistics_batch_size=2).to(DEVICE)


networks = pytest.mark.parametrize("network", [of_the_zoo, converted])


def losses(network, implementation, dtype, steps=20):
    """Training losses of a small network."""
    torch.manual_seed(0)
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.07, momentum=0.9)
    images = torch.randn(16, 3, 32, 32).to(DEVICE, memory_format=torch.channels_last)
    labels = torch.arange(16, device=DEVICE) % 10
    history = []
    with kernels.use(implementation):
        for _ in range(steps):
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
    torch.testing.assert_close(kernel, reference, rtol=tolerance, atol=tolerance)


@gpu_only
@networks
def test_a_cuda_graph_of_a_training_step_replays_it(network):
    torch.manual_seed(0)
    model = network()
    images = torch.randn(8, 3, 32, 32, device=DEVICE)

    def step():
        model.zero_grad(set_to_none=False)
        loss = model(images).square().mean()
        loss.backward()
        return loss

    graph, captured = capture(step)
    norm = next(module for module in model.modules() if isinstance(module, BatchKalmanNorm2d))
    steps = norm.num_batches_tracked.clone()
    graph.replay()
    torch.testing.assert_close(captured, step())
    assert norm.num_batches_tracked == steps + 2


@gpu_only
@networks
def test_torch_compile_sees_through_the_operators(network):
    torch.manual_seed(0)
    model = network()
    images = torch.randn(8, 3, 32, 32, device=DEVICE)
    eager = model(images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(images)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)
    compiled.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
