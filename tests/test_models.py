"""Every registered network, in every norm; then what is particular to one of them."""

import copy
import itertools
import pickle

import pytest
import timm
import torch
import torchvision
from shallow import KINDS
from torch import nn
from torch.testing import assert_close

from bkn_zoo import create_model, list_models
from bkn_zoo.errors import UnknownNameError
from bkn_zoo.models.efficientnet_lite import EfficientNetLite
from bkn_zoo.models.inception import HalvingMaxPool
from bkn_zoo.models.resnet import Bottleneck, ResNet
from bkn_zoo.norms import MODES, BatchKalmanNorm2d, Statistics
from bkn_zoo.norms.running import RunningNorm

CLASSES = 5


def photographs(count, height, width=None):
    """Noise on top of a gradient, different in brightness and contrast from image to image."""
    width = width or height
    ramp = torch.linspace(-1, 1, height)[:, None] * torch.randn(count, 3, 1, 1) + torch.randn(count, 3, 1, 1)
    return ramp + (0.3 + torch.rand(count, 3, 1, 1)) * torch.randn(count, 3, height, width)


def sizes(model):
    """A square and another size, small for the network but with several positions left at its top."""
    return ((16, 16), (11, 18)) if model.stride == 2 else ((48, 48), (40, 65))


def size(model):
    return sizes(model)[0][0]


@pytest.fixture(scope="module", params=[*KINDS, "resnet101_bn", "resnet101_brn", "resnet101_gn"])
def trained(request, away_from_start):
    """A network after a training step at (4, 2), its gradients still there, in evaluation mode.

    Without blocks that are like others, for the sake of time: test_checkpoints.py trains ResNet101 with BKN at its full
    depth, and InceptionV2 is whole below.
    """
    torch.manual_seed(0)
    model = create_model(request.param, num_classes=CLASSES)
    if isinstance(model, ResNet):
        del model.layer1[2:], model.layer2[1:], model.layer3[1:], model.layer4[1:]
    if isinstance(model, EfficientNetLite):
        for stage in model.blocks:
            del stage[2:]
    for name in ("inception_4b", "inception_4d", "inception_5b"):
        if hasattr(model, name):
            delattr(model, name)
    away_from_start(model)
    for module in model.modules():
        if isinstance(module, RunningNorm):
            module.momentum = 0.9  # one step is to count
    model.statistics_batch_size = 2
    logits = model(photographs(4, size(model)))
    nn.functional.cross_entropy(logits, torch.arange(4) % CLASSES).backward()
    return model.eval()


@pytest.fixture
def small(away_from_start):
    """Makes the small network in a norm, in float64 unless told, after some steps at the statistics batch given."""

    def make(norm="bkn", group=2, dtype=torch.float64):
        model = create_model(f"inception_cifar_{norm}").to(dtype)
        away_from_start(model)
        model.statistics_batch_size = group
        with torch.no_grad():
            for _ in range(2):
                model(photographs(4, 8).to(dtype))
        return model.eval()

    return make


# The registry


def test_networks_exist_in_every_norm_and_are_listed():
    networks, norms = ("inception_v2", "resnet101", "inception_cifar"), ("bkn", "bn", "brn", "gn")
    assert set(list_models()) >= {f"{network}_{norm}" for network in networks for norm in norms}
    assert list_models("resnet101_*") == [f"resnet101_{norm}" for norm in norms]
    assert list_models("nothing") == []
    for name, classes in (("inception_cifar_bkn", 10), ("resnet101_bn", 1000)):  # of the usual data
        with torch.device("meta"):
            assert create_model(name).fc.out_features == classes


# Each network


def test_forward_gives_logits_at_several_sizes(trained):
    """Those of a square, of another shape, and of one image as small as the network's stride, in every mode."""
    smallest = (trained.stride, trained.stride)
    for (height, width), mode in itertools.product([*sizes(trained), smallest], MODES):
        if (height, width) == smallest and mode == "sample" and not trained.name.startswith("resnet101_bkn"):
            continue  # one value per channel in a layer without a prior is refused
        with torch.no_grad():
            logits = trained(photographs(1, height, width), statistics=mode)
        assert logits.shape == (1, CLASSES)
        assert logits.isfinite().all()


def test_every_parameter_has_a_gradient(trained):
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


def test_logits_depend_on_the_image_and_the_mode_only(trained):
    """In float64: deep networks amplify the rounding of convolutions, which depends on the batch size."""
    model = copy.deepcopy(trained).double()
    images, pair = photographs(4, size(model)).double(), [2, 0]
    with torch.no_grad():
        logits = {mode: model(images, statistics=mode) for mode in MODES}
        for mode, together in logits.items():
            assert together.std(0).min() > 1e-5  # far above the tolerance
            assert_close(model(images[[0]], statistics=mode), together[[0]], rtol=1e-7, atol=1e-7)
            assert_close(model(images[pair], statistics=mode), together[pair], rtol=1e-7, atol=1e-7)
    for one, other in itertools.combinations(logits.values(), 2):
        difference = (one - other).abs().max()
        assert difference == 0 if model.name.endswith("_gn") else difference > 1e-4
    for (name, buffer), used in zip(trained.named_buffers(), model.buffers(), strict=True):
        assert_close(used.to(buffer.dtype), buffer, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("trained", KINDS, indirect=True)
def test_the_exported_network_gives_the_same_logits(trained):
    images = photographs(2, size(trained))
    exported = torch.export.export(trained, (images,)).module()
    with torch.no_grad():
        assert_close(exported(images), trained(images), rtol=1e-5, atol=1e-5)


# Statistics


@pytest.mark.parametrize(
    ("group", "layout"), [*((group, torch.contiguous_format) for group in (1, 3, None)), (2, torch.channels_last)]
)
def test_grouped_network_equals_a_loop_over_the_groups(small, group, layout):
    model = small().train().to(memory_format=layout)
    images = photographs(8, 8).double().contiguous(memory_format=layout).requires_grad_()
    labels = torch.arange(8)

    def gradients(rows, group):
        model.statistics_batch_size = group
        logits = model(images[rows])
        loss = nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        return logits, torch.autograd.grad(loss, [images, *model.parameters()])

    logits, grads = gradients(torch.arange(8), group)
    loop = [gradients(rows, None) for rows in torch.arange(8).split(group or 8)]
    assert_close(logits, torch.cat([part for part, _ in loop]))
    for grad, parts in zip(grads, zip(*(parts for _, parts in loop), strict=True), strict=True):
        assert_close(grad, torch.stack(parts).sum(0))


@pytest.mark.parametrize("norm", ["bkn", "bn", "brn", "gn"])
def test_expected_is_sample_or_population_at_the_extremes(small, norm):
    """For groups of one image, and for groups of whole batches."""
    images = photographs(4, 16)
    for group, same in ((1, "sample"), (None, "population")):
        model = small(norm, group=group, dtype=torch.float32)
        with torch.no_grad():
            assert_close(model(images, statistics="expected"), model(images, statistics=same), rtol=1e-5, atol=1e-5)


def test_default_statistics_hold_where_a_call_does_not_say(small):
    model, images = small(group=4), photographs(3, 16).double()
    assert_close(model(images), model(images, statistics="population"), rtol=0, atol=0)
    model.default_statistics = "sample"
    assert_close(model(images), model(images, statistics="sample"), rtol=0, atol=0)
    for mode in MODES:  # a last batch may be smaller than a group, or empty
        assert model(images[:0], statistics=mode).shape == (0, 10)


@pytest.mark.parametrize("name", ["inception_cifar_bkn", "torchvision:resnet18"])
def test_default_statistics_are_checked_when_they_are_set(name):
    model = create_model(name, num_classes=2)
    model.default_statistics = "sample"
    for wrong in ("nonsense", None, ["sample"]):
        with pytest.raises(
            UnknownNameError, match=r"unknown statistics .*: choose one of population, sample, expected"
        ):
            model.default_statistics = wrong
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same.default_statistics == "sample"
    assert not any("default_statistics" in key for key in model.state_dict())


# How the belief travels


def record_priors_and_beliefs(module):
    seen = {}
    for layer in module.modules():
        if isinstance(layer, BatchKalmanNorm2d):
            layer.register_forward_hook(lambda layer, args, out: seen.update({layer: (args[1], out[1])}))
    return seen


@pytest.mark.parametrize("stride", [1, 2])
def test_residual_block_passes_on_the_belief_of_its_main_branch(make_belief, stride):
    block = Bottleneck(BatchKalmanNorm2d, 16 if stride == 2 else 32, 8, stride)
    seen = record_priors_and_beliefs(block)
    belief = make_belief(2, 16 if stride == 2 else 32, torch.float32)
    x = torch.relu(torch.randn(4, belief.mean.shape[1], 6, 6))
    _, out = block((x, belief), Statistics("batch", 2))
    assert seen[block.bn1][0] is belief
    assert seen[block.bn2][0] is seen[block.bn1][1]
    assert seen[block.bn3][0] is seen[block.bn2][1]
    assert out is seen[block.bn3][1]
    if stride == 2:
        assert seen[block.downsample[1]][0] is belief


def test_inception_block_joins_beliefs_in_the_order_of_features(make_belief):
    block = create_model("inception_cifar_bkn").inception_a
    seen, belief = record_priors_and_beliefs(block), make_belief(2, 32, torch.float32)
    features, out = block((torch.rand(4, 32, 5, 5), belief), Statistics("batch", 2))
    assert sum(prior is belief for prior, _ in seen.values()) == 4
    inner = [prior for prior, _ in seen.values() if prior is not belief]
    tops = [own for _, own in seen.values() if not any(own is prior for prior in inner)]
    assert [top.mean.shape[1] for top in tops] == [64, 128, 32, 32]
    assert features.shape == (4, 256, 5, 5)
    assert_close(out.mean, torch.cat([top.mean for top in tops], 1), rtol=0, atol=0)
    assert_close(out.var, torch.cat([top.var for top in tops], 1), rtol=0, atol=0)


def test_pooling_branch_without_convolution_passes_its_belief_on(make_belief):
    block = create_model("inception_v2_bkn", num_classes=CLASSES).inception_3c
    belief = make_belief(2, 320, torch.float32)
    x = torch.rand(4, 320, 6, 6)
    features, out = block((x, belief), Statistics("batch", 2))
    assert_close(features[:, -320:], nn.functional.max_pool2d(x, 3, 2, ceil_mode=True), rtol=0, atol=0)
    assert_close(out.mean[:, -320:], belief.mean, rtol=0, atol=0)
    assert_close(out.var[:, -320:], belief.var, rtol=0, atol=0)


@pytest.mark.parametrize("name", list_models("*_bkn"))
def test_every_norm_but_the_first_has_a_layer_below(name):
    with torch.device("meta"):
        model = create_model(name)
    norms = [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d)]
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    expected = [None, *(convolution.in_channels for convolution in convolutions[1:])]
    assert sorted(norm.prior_features or 0 for norm in norms) == sorted(channels or 0 for channels in expected)
    assert sum(norm.prior_features is None for norm in norms) == 1


# Sizes and parameters


def parameters_of(name):
    with torch.device("meta"):
        return {name: parameter.numel() for name, parameter in create_model(name).named_parameters()}


def test_resnet101_bn_is_torchvision_s_and_bkn_adds_transitions():
    with torch.device("meta"):
        ours, theirs = create_model("resnet101_bn").state_dict(), torchvision.models.resnet101().state_dict()
    assert {name: ours[name].shape for name in theirs} == {name: value.shape for name, value in theirs.items()}
    extra = {name.rpartition(".")[2] for name in ours.keys() - theirs.keys()}
    assert extra == {"image_mean", "image_var", "image_spread"}
    assert sum(parameters_of("resnet101_bn").values()) == 44_549_160
    assert sum(parameters_of("resnet101_bkn").values()) == pytest.approx(68.0e6, abs=0.05e6)


def test_cifar_network_has_the_parameters_of_the_paper_s_table():
    """0.9M in convolutions, 0.5M fully connected and 0.33M in A; the paper's text says 49M and 52M."""
    counts = parameters_of("inception_cifar_bkn")

    def millions(*ends):
        return sum(count for name, count in counts.items() if name.endswith(ends)) / 1e6

    assert millions("conv.weight") == pytest.approx(0.9, abs=0.05)
    assert millions("fc.weight", "fc.bias", "hidden.weight", "hidden.bias") == pytest.approx(0.5, abs=0.05)
    assert millions("transition") == pytest.approx(0.33, abs=0.005)
    assert sum(counts.values()) < 2e6


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("resnet101_bn", (224, 224), (2048, 7, 7)),  # for 32 images the paper's 7 x 7 x 32 = 1568 values per channel
        ("inception_v2_bn", (224, 224), (1024, 7, 7)),
        ("inception_cifar_bn", (32, 32), (512, 16, 16)),
        *(
            ("inception_v2_bn", (h, w), (1024, -(-h // 32), -(-w // 32)))
            for h, w in ((33, 47), (80, 100), (32, 63), (225, 97))
        ),
    ],
)
def test_the_last_feature_map_has_the_papers_size(name, size, shape):
    with torch.device("meta"):
        model = create_model(name).eval()
        assert model.features(torch.empty(2, 3, *size), Statistics("population")).shape == (2, *shape)


@pytest.mark.parametrize("height", range(1, 9))
@pytest.mark.parametrize("width", [4, 5])
def test_halving_pools_to_the_size_of_a_stride_2_convolution(height, width):
    x = torch.rand(1, 2, height, width)
    pooled, _ = HalvingMaxPool()((x, None))
    assert pooled.shape == nn.functional.conv2d(x, torch.rand(2, 2, 3, 3), stride=2, padding=1).shape
    for row, column in ((row, column) for row in range(pooled.shape[2]) for column in range(pooled.shape[3])):
        window = x[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
        assert_close(pooled[:, :, row, column], window.amax((2, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("standardized_weights", [False, True])
def test_the_bn_form_at_gain_one_is_the_bkn_form(away_from_start, standardized_weights):
    """The whole network: with q = 1 everywhere, outputs and gradients are those of batch normalization."""
    names = ("inception_cifar_bkn", "inception_cifar_bn")
    model, twin = (create_model(name, standardized_weights=standardized_weights).double() for name in names)
    away_from_start(model)
    for norm in model.modules():
        if isinstance(norm, BatchKalmanNorm2d) and norm.prior_features is not None:
            norm.set_gain(1.0)
    twin.load_state_dict(model.state_dict(), strict=False)
    images, gradients = photographs(4, 16).double(), []
    for training in (True, False):
        outputs = [network.train(training)(images) for network in (model, twin)]
        assert_close(*outputs)
    for network, output in zip((model, twin), outputs, strict=True):
        output.square().sum().backward()
        gradients.append([conv.weight.grad for conv in network.modules() if isinstance(conv, nn.Conv2d)])
    assert_close(*gradients)


# EfficientNet-Lite


@pytest.mark.parametrize("lite", [0, 1, 2])
@pytest.mark.parametrize("norm", ["bn", "bkn"])
def test_efficientnet_lite_in_population_mode_equals_timm(lite, norm):
    torch.manual_seed(lite)
    theirs = timm.create_model(f"tf_efficientnet_lite{lite}", num_classes=7).eval()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    ours = create_model(f"efficientnet_lite{lite}_{norm}", num_classes=7).eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == []
    assert {name.rpartition(".")[2] for name in missing} <= {"transition", "raw_process_noise", "raw_gain"}
    # An odd size is padded on both sides, an even one on the right and below.
    for size in (64, 75):
        images = torch.randn(2, 3, size, size)
        with torch.no_grad():
            assert_close(ours(images, statistics="population"), theirs(images))


def test_transition_behind_depthwise_convolution_is_diagonal():
    model = create_model("efficientnet_lite0_bkn", num_classes=3)
    block = model.get_submodule("blocks.1.0")
    assert block.bn2.transition.shape == (96,)
    assert block.bn3.transition.shape == (24, 96)
