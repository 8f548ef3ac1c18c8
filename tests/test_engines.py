"""Folding, and engines against the networks that they run."""

import copy
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from shallow import KINDS
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from bkn_zoo import BknZooError, InputError, UnknownNameError, convert, create_model
from bkn_zoo.conversion import start_near_population
from bkn_zoo.inference import engines, openvino_graph, symbols
from bkn_zoo.inference.engines import OpenVINOEngine, TorchEngine, create_engine
from bkn_zoo.inference.folding import ImageNorm, fold_norms, prepare
from bkn_zoo.inference.graph_cache import PRECISION
from bkn_zoo.inference.openvino_graph import Symbol
from bkn_zoo.models.inception import InceptionCifar, MaxPool
from bkn_zoo.models.network import Branch
from bkn_zoo.models.resnet import ResNet
from bkn_zoo.norms import MODES, BatchKalmanNorm2d, BatchNorm2d, Belief, GroupNorm2d, Statistics
from bkn_zoo.norms.running import RunningNorm

needs_openvino = pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")
NAMES = ["torch", pytest.param("openvino", marks=needs_openvino)]
each_engine = pytest.mark.parametrize("name", NAMES)
modes = pytest.mark.parametrize("mode", MODES)
SAMPLE = Statistics("sample")


def photographs(count, height, width=None):
    """Noise, different in brightness and contrast from image to image."""
    noise = torch.randn(count, 3, height, width or height)
    return torch.randn(count, 3, 1, 1) + (0.3 + torch.rand(count, 3, 1, 1)) * noise


def size(model):
    return 16 if model.stride == 2 else 64


def shorten(model):
    """Take out blocks that are like others, which only cost time here."""
    for name in ("inception_4a", "inception_4b", "inception_4d", "inception_5b"):
        if hasattr(model, name):
            delattr(model, name)
    if isinstance(model, InceptionCifar):
        model.inception_c, model.hidden = Branch(MaxPool()), nn.Linear(480, 1000)
    if isinstance(model, ResNet):
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            del stage[1 + (stage is model.layer1) :]


def trained_model(name, away_from_start, group=2, **options):
    """A network with parameters away from their starting values, and with the statistics of two training batches."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=5, **options)
    shorten(model)
    away_from_start(model)
    model.statistics_batch_size = group
    for share in (1.0, 0.5):
        for norm in model.modules():
            if isinstance(norm, RunningNorm):
                norm.momentum = share
        with torch.no_grad():
            model(photographs(4, size(model)))
    return model.eval()


# And the one norm that is not folded, beside residual sums.
@pytest.fixture(scope="module", params=[*KINDS, "resnet101_gn"])
def model(request, away_from_start):
    return trained_model(request.param, away_from_start)


@pytest.fixture(scope="module")
def small(away_from_start):
    return trained_model("inception_cifar_bkn", away_from_start)


@pytest.fixture
def own(small):
    """A copy that a test may change."""
    return copy.deepcopy(small)


@pytest.fixture(scope="module", params=NAMES)
def engine(request, small):
    return create_engine(small, request.param)


@torch.no_grad()
def assert_agrees(engine, model, images, *chosen):
    for mode in chosen:
        wanted = model(images, statistics=mode)
        tolerance = (1e-4 if mode == "population" else 1e-3) * min(1.0, wanted.std().item())
        assert_close(engine(images, mode), wanted, atol=tolerance, rtol=0)


# Folding


def test_folding_takes_in_norms_and_keeps_the_logits(model):
    folded, side = fold_norms(model), size(model)
    for shape in ((2, side), (1, side + 3, side + 8)):
        assert_agrees(folded, model, photographs(*shape), "population")
    kept = [module for module in folded.modules() if isinstance(module, RunningNorm | GroupNorm2d)]
    assert len(kept) == sum(isinstance(module, GroupNorm2d) for module in model.modules())


def converted_network(bias=True):
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(5)]
    if not bias:
        norms[0].bias = None  # as BatchNorm2d(4, bias=False) of newer versions of PyTorch has none
    layers = [nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Conv2d(4, 5, 3), norms[1]]
    model = convert(nn.Sequential(*layers, nn.Flatten()), statistics_batch_size=2)
    model.train()(photographs(4, 8))
    return model.eval()


CHANGES = {
    "hook": lambda conv: conv.register_forward_hook(lambda m, args, y: 2 * y),
    "hook before": lambda conv: conv.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
    "parametrized": lambda conv: parametrizations.weight_norm(conv).parametrizations.weight.original0.data.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_convolution_with_hooks_or_masks_is_left(own, change):
    own.inception_b.register_forward_hook(lambda m, args, state: (2 * state[0], state[1]))
    converted = converted_network()
    for model, place, side in ((own, "inception_b.branches.1.0.conv", 16), (converted, "3", 8)):
        CHANGES[change](model.get_submodule(place))
        engine, images = create_engine(model, "torch"), photographs(2, side)
        engine(images, "population")  # before the network itself, which computes pruned weights again
        assert_agrees(engine, model, images, *MODES)


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("3", nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 5, 3))), ("4", nn.Identity()),
        ("4", nn.GroupNorm(1, 5)), ("4", nn.BatchNorm2d(5)),
    ],
)  # fmt: skip
def test_converted_network_with_replaced_layers_runs(place, other):
    model = converted_network(bias=False)  # the norms have a scale alone
    model.set_submodule(place, other.eval())
    assert_agrees(create_engine(model, "torch"), model, photographs(2, 8), *MODES)


@modes
def test_hooks_of_norms_are_refused(own, mode):
    own.inception_b.branches[1][0].norm.register_forward_hook(lambda m, args, result: result)
    with pytest.raises(InputError, match=r"inception_b.branches.1.0.norm has hooks"):
        create_engine(own, "torch")(photographs(1, 16), mode)


# Engines and networks


class Changing(nn.Module):
    """Changes its input, and a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.seen = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Buffer(torch.zeros(()))

    def forward(self, x):
        x += 1
        self.seen += 1
        return self.norm(self.conv(x)).flatten(1) * self.seen


def test_engine_changes_neither_its_input_nor_the_network():
    images = photographs(2, 8).contiguous(memory_format=torch.channels_last)
    before, model = images.clone(), convert(Changing())
    engine, seen = create_engine(model, "torch"), model.seen.clone()
    for _ in range(2):
        engine(images)
    assert torch.equal(images, before)
    assert model.seen == seen


@pytest.mark.parametrize("config", [{"hidden": 3}, SimpleNamespace(preprocessing="none")])
def test_converted_network_with_its_own_config_runs(config):
    model, images = converted_network(), photographs(2, 8)
    model.config = config
    assert_agrees(create_engine(model), model, images, "population")


@needs_openvino
def test_openvino_refuses_a_network_that_changes_its_buffers():
    """There they are constants: each call would be the first. The network is left as it was."""
    model = convert(Changing())
    seen = model.seen.clone()
    for mode in MODES:
        with pytest.raises(InputError, match=r"a graph cannot change buffers.*engine='torch'"):
            create_engine(model, "openvino")(photographs(2, 8), mode)
    assert type(create_engine(model)) is TorchEngine
    assert model.seen == seen


class Viewing(Changing):
    """Flattens features in a way that PyTorch refuses in channels_last."""

    def forward(self, x):
        return self.norm(self.conv(x)).view(x.size(0), -1)


def test_a_network_that_views_its_features_in_one_layout_runs():
    model, images = convert(Viewing()).eval(), photographs(2, 8)
    engine = create_engine(model, "torch")
    assert_agrees(engine, model, images, *MODES)
    assert engine.layout == torch.contiguous_format  # found out once
    with pytest.raises(RuntimeError, match="channels"):
        engine(images[:, :2])


@each_engine
def test_engines_agree_with_the_network(model, name):
    chosen = MODES if model.stride == 2 else ("population", "expected")  # which has all that `sample` has
    engine, side = create_engine(model, name), size(model)
    assert_agrees(engine, model, photographs(2, side), *chosen)
    assert_agrees(engine, model, photographs(1, side + 1, side + 33), "population")  # of any size


def near_population():
    """A converted network whose first norm has an initial belief."""
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten()
    trained = nn.Sequential(*layers).train()
    trained(photographs(4, 8))
    network = convert(trained.eval())
    assert start_near_population(network, gain=0.3) == ["1", "3"]
    nn.init.normal_(network[3].transition)
    return network


@needs_openvino
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_graphs_for_bf16_compute_the_same_on_all_processors(small, machine, monkeypatch):
    monkeypatch.setattr(symbols.platform, "machine", lambda: machine)
    for network, images in ((small, photographs(1, 16)), (near_population(), photographs(1, 8))):
        built, _ = openvino_graph.build_graph(prepare(network, SAMPLE), images.shape[1:], False, {PRECISION: "bf16"})
        # Exact on every processor.
        graph = openvino_graph.Graph(openvino_graph.compiled(built, {PRECISION: "f32"}))
        assert_agrees(lambda images, mode, graph=graph: graph(images), network, images, "sample")


@modes
def test_engines_take_any_number_of_images(engine, small, mode):
    images = photographs(5, 16)
    assert_agrees(engine, small, images, mode)
    alone = torch.cat([engine(image[None], mode) for image in images])
    assert_close(engine(images, mode), alone, atol=1e-5, rtol=0)
    assert engine(photographs(0, 16), mode).shape == (0, small.num_classes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@modes
def test_pytorch_on_a_gpu_agrees_with_the_network(model, mode):
    images = photographs(3, size(model))
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = create_engine(model, device="cuda")(images, mode)
        assert_close(logits.cpu(), model(images, mode), atol=1e-3, rtol=0)


# Preparations, and models that change


MIDDLE = "inception_b.branches.1.0"  # a layer between the first and the last


@each_engine
@pytest.mark.parametrize("kind", ["conv.weight", "norm.weight", "norm.transition", "norm.running_var"])
def test_change_of_a_single_tensor_is_noticed(own, name, kind):
    images, engine = photographs(1, 16), create_engine(own, name)
    mode = "population" if kind.endswith("running_var") else "sample"
    before = engine(images, mode)
    own.state_dict()[f"{MIDDLE}.{kind}"].mul_(3).add_(0.1)
    assert_agrees(engine, own, images, mode)
    assert (engine(images, mode) - before).abs().max() > 1e-4 * before.abs().max()


@each_engine
def test_replaced_parameter_or_module_is_noticed(own, name):
    images, engine = photographs(1, 16), create_engine(own, name)
    assert_agrees(engine, own, images, "population")
    layer = own.get_submodule(MIDDLE)
    layer.conv.weight = nn.Parameter(2 * layer.conv.weight.detach() + 0.1)
    assert_agrees(engine, own, images, "population")
    own.set_submodule(f"{MIDDLE}.conv", nn.Conv2d(layer.conv.in_channels, layer.conv.out_channels, 1, bias=False))
    assert_agrees(engine, own, images, "population")
    # PyTorch does not count this.
    layer.conv.weight.data.add_(0.1)
    engine.refresh()
    assert_agrees(engine, own, images, "population")


def scaled(state):
    return {name: 1.1 * tensor if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def replace_data(model):
    weight = model.get_submodule(MIDDLE).conv.weight
    weight.data = weight.data + 0.1


REPLACEMENTS = {
    "data of a middle tensor": replace_data,
    "assigned state": lambda model: model.load_state_dict(scaled(model.state_dict()), assign=True),
    "precision and back": lambda model: model.bfloat16().float(),
    "precision of one layer and back": lambda model: model.get_submodule(MIDDLE).conv.bfloat16().float(),
}


@each_engine
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_replaced_memory_of_tensors_is_noticed(own, name, replacement):
    images, engine = photographs(1, 16), create_engine(own, name)
    before = engine(images, "population")
    REPLACEMENTS[replacement](own)
    after = engine(images, "population")
    assert not torch.equal(after, before)
    assert_agrees(engine, own, images, "population")
    assert torch.equal(engine(images, "population"), after)


def test_engine_that_is_not_watched_changes_with_refresh(own):
    images, engine = photographs(1, 16), create_engine(own, "torch")
    engine.watched = False
    before = engine(images, "population")
    replace_data(own)
    assert torch.equal(engine(images, "population"), before)
    engine.refresh()
    assert_agrees(engine, own, images, "population")


# Precision


@pytest.mark.parametrize(("name", "share"), [("torch", 0.02), pytest.param("openvino", 0.05, marks=needs_openvino)])
@modes
def test_f16_is_close(small, mode, name, share):
    """In OpenVINO only where the processor has it: elsewhere it computes in f32."""
    images = photographs(4, 16)
    logits, exact = create_engine(small, name, precision="f16")(images, mode), TorchEngine(small)(images, mode)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < share * exact.std()
    assert name == "openvino" or not torch.equal(logits, exact)


@needs_openvino
def test_f16_in_openvino_refuses_statistics_that_it_cannot_hold(own, monkeypatch):
    """And with "auto", such a network runs in f32."""
    own.inception_b.branches[0][0].norm.image_var[3] = 1e4
    engine = create_engine(own, "openvino", precision="f16")
    with pytest.raises(InputError, match=r"means or variances at inception_b\.branches\.0\.0\.norm are too large"):
        engine(photographs(1, 16), "sample")
    engine(photographs(1, 16), "population")
    monkeypatch.setattr(OpenVINOEngine, "_fastest_precision", lambda self: "f16")
    automatic = create_engine(own, "openvino", precision="auto")
    automatic(photographs(1, 16), "sample")
    assert automatic.precision == "f16"  # of all else
    assert [automatic.precision_at(mode) for mode in MODES] == ["f16", "f32", "f32"]
    own.statistics_batch_size = None
    assert automatic.precision_at("expected") == "f16"  # it is the same as `population` then
    assert TorchEngine(own, precision="f16").precision_at("sample") == "f16"


PROCESSORS = [
    ("x86_64", ["BF16", "FP32", "FP16", "INT8"], "bf16"), ("x86_64", ["FP32", "FP16", "INT8"], "f32"),  # f16 is slower
    ("aarch64", ["FP32", "FP16"], "f16"), ("aarch64", ["FP32"], "f32"),
]  # fmt: skip


@needs_openvino
@pytest.mark.parametrize(("machine", "native", "chosen"), PROCESSORS)
def test_auto_is_the_fastest_precision_of_the_processor(small, machine, native, chosen, monkeypatch):
    monkeypatch.setattr(engines, "native", lambda: native)
    monkeypatch.setattr(engines.platform, "machine", lambda: machine)
    assert create_engine(small, "openvino", precision="auto").precision == chosen
    assert create_engine(small, "openvino").precision == "f32"
    assert create_engine(small, "torch", precision="auto").precision == "f32"


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "f16")])
def test_auto_on_a_gpu_is_bf16_where_it_need_not_be_emulated(small, native, chosen, monkeypatch):
    monkeypatch.setattr(engines, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert create_engine(small, device="cuda", precision="auto").precision == chosen
    assert create_engine(small, device="cuda").precision == "f32"


# Single operations


def by_openvino(operation, x, precision="f32"):
    """`operation`, of an input that it takes for a tensor, of `x` in a graph of OpenVINO."""
    parameter = openvino_graph.ops.parameter(list(x.shape))
    graph = engines.ov.Model([operation(Symbol(parameter)).node], [parameter])
    run = openvino_graph.compiled(graph, {PRECISION: precision})
    return torch.from_numpy(run([x.numpy()])[0].copy())


@needs_openvino
@pytest.mark.parametrize("precision", ["f16", "f32"])
@pytest.mark.parametrize("shape", [(112, 112), (56, 57), (3, 5), (1, 300)])
def test_many_positions_do_not_spoil_the_statistics(shape, precision):
    """In f16, where a processor may sum them in f16 too."""
    x = 2 + 10 * torch.randn(1, 8, *shape)
    pointwise = nn.Conv2d(8, 8, 1, bias=False).requires_grad_(False)  # after which OpenVINO lays channels last
    nn.init.eye_(pointwise.weight[:, :, 0, 0])
    norm = ImageNorm(BatchNorm2d(8).requires_grad_(False), SAMPLE)
    found = by_openvino(lambda x: norm(pointwise(x), None, SAMPLE)[0], x, precision)
    tolerance = 0.01 if precision == "f16" else 1e-4
    assert_close(found, F.batch_norm(x, None, None, training=True), atol=tolerance, rtol=tolerance)


def test_a_large_mean_leaves_the_prediction_exact():
    """With a gain of nearly zero, in f32 here; in 16 bits means are large from about 100."""
    layer = BatchKalmanNorm2d(2, 2).requires_grad_(False).eval()
    layer.set_gain(3e-6)
    below = Belief(torch.ones(1, 2), torch.ones(1, 2))
    _, belief = ImageNorm(layer, SAMPLE)(3e5 + torch.randn(1, 2, 8, 8), below, SAMPLE)
    assert_close(belief.mean, F.linear(below.mean, layer.transition) + 0.9, atol=1e-3, rtol=0)
    # In which the prediction has another type.
    with torch.autocast("cpu", torch.bfloat16):
        ImageNorm(layer, SAMPLE)(torch.randn(1, 2, 8, 8), below, SAMPLE)


@needs_openvino
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (7, 9), (5, 12)])
def test_openvino_rounds_the_size_of_a_pooling_as_pytorch_does(shape, ceil_mode, padding):
    x = torch.randn(1, 3, *shape)
    for kernel, stride in [(3, 2), (3, 1), (2, 2), (3, 3), (2, 3)]:
        options = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
        found = by_openvino(lambda x, options=options: F.max_pool2d(x, **options), x)
        assert_close(found, F.max_pool2d(x, **options), atol=0, rtol=0)


@needs_openvino
@pytest.mark.parametrize("shape", [(1, 4, 9), (1, 4, 3, 5)])
def test_openvino_normalizes_groups_of_any_dimensions(shape):
    norm, x = nn.GroupNorm(2, 4).requires_grad_(False), torch.randn(shape)
    nn.init.normal_(norm.weight)
    assert_close(by_openvino(norm, x), norm(x))


# What is refused


@each_engine
def test_sample_of_single_values_is_refused(name):
    """The normalized features would be constant; `expected` shares its graph with `sample`, and runs."""
    layers = [nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.Flatten()]
    engine = create_engine(convert(nn.Sequential(*layers), statistics_batch_size=2).eval(), name)
    engine(photographs(1, 8), "expected")
    for _ in range(2):
        with pytest.raises(InputError, match="has one value per channel: use statistics='population'"):
            engine(photographs(1, 8), "sample")
    engine(photographs(1, 9), "sample")


def test_without_openvino_pytorch_is_used_and_openvino_refused(small, monkeypatch):
    assert type(create_engine(small)) is (TorchEngine if engines.ov is None else OpenVINOEngine)
    monkeypatch.setattr(engines, "ov", None)
    assert type(create_engine(small)) is TorchEngine
    with pytest.raises(InputError, match=r"needs openvino: install it with pip install 'bkn-zoo\[openvino\]'"):
        create_engine(small, "openvino")
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert runpy.run_path(symbols.__file__)["ov"] is None


@needs_openvino
@modes
def test_with_streams_an_image_s_logits_do_not_depend_on_others(small, mode):
    images, engine = photographs(5, 16), create_engine(small, "openvino", streams=2)
    assert_agrees(engine, small, images, mode)
    alone = torch.cat([engine(image[None], mode) for image in images])
    assert engine(images, mode).equal(alone)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda rows: engine(images[rows], mode), [[4, 0], [1], [2, 3, 0], [4]] * 5):
            assert all(any(row.equal(known) for known in alone) for row in found)


NOWHERE = ("tpu", "cuda:64" if torch.cuda.is_available() else "cuda", "xpu", "privateuseone", "meta", "")
REFUSED = [
    *(({"streams": n}, f"streams is {n!r}: choose a whole number of at least 1") for n in (0, 1.5, "2", True)),
    ({"engine": "torch", "streams": 2}, "streams need OpenVINO: choose engine='openvino' and device='cpu'"),
    ({"engine": "onnx"}, "unknown engine 'onnx': choose one of auto, torch, openvino"),
    ({"precision": "int8"}, "unknown precision 'int8': choose one of auto, f32, f16, bf16"),
    *(({"device": device}, f"device '{device}' is not available: choose cpu") for device in NOWHERE),
]


def test_bf16_that_the_processor_lacks_is_refused(small, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setattr(engines, "native", lambda: ["FP32", "FP16"])
    with pytest.raises(InputError, match="no bf16 on this processor: choose precision='f32'"):
        create_engine(small, "openvino", precision="bf16")


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_options_that_do_not_exist_are_refused(small, options, words, monkeypatch):
    with pytest.raises(BknZooError, match=words):
        create_engine(small, **options)
    monkeypatch.setattr(engines, "check_device", lambda device: None)
    with pytest.raises(InputError, match=r"OpenVINO supports only device='cpu', not 'cuda'|needs openvino"):
        create_engine(small, "openvino", "cuda")


IMAGES = [torch.zeros(3, 16, 16), torch.zeros(1, 1, 16, 16), torch.zeros(1, 3, 1, 16), torch.zeros(1, 3, 16, 16).int()]


def test_engines_refuse_the_images_that_the_network_refuses(engine, small):
    for images in IMAGES:
        with pytest.raises(BknZooError) as refused:
            small(images)
        with pytest.raises(type(refused.value), match="images") as refused_too:
            engine(images)
        assert str(refused_too.value) == str(refused.value)
    with pytest.raises(UnknownNameError, match="unknown statistics 'batch'"):
        engine(photographs(1, 16), "batch")
