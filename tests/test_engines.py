"""Folding, and engines against the networks that they run."""

import copy
import json
import runpy
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from bkn_zoo import (
    BknZooError,
    InputError,
    Network,
    UnknownNameError,
    convert,
    create_model,
    list_models,
    recalibrate,
)
from bkn_zoo.inference import engines, openvino_graph
from bkn_zoo.inference.engines import Engine, OpenVINOEngine, TorchEngine, create_engine
from bkn_zoo.inference.folding import ImageNorm, JoinedInception, fold, prepare
from bkn_zoo.inference.openvino_graph import Symbol
from bkn_zoo.models.inception import Inception, MaxPool
from bkn_zoo.models.inception_cifar import InceptionCifar
from bkn_zoo.models.network import Branch, ConvNorm
from bkn_zoo.models.resnet import ResNet
from bkn_zoo.norms import MODES, BatchKalmanNorm2d, BatchNorm2d, GroupNorm2d, Statistics
from bkn_zoo.norms.running import RunningNorm

needs_openvino = pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")
NAMES = ["torch", pytest.param("openvino", marks=needs_openvino)]
each_engine = pytest.mark.parametrize("name", NAMES)
modes = pytest.mark.parametrize("mode", MODES)


def photographs(count: int, height: int, width: int | None = None) -> Tensor:
    """Noise, different in brightness and contrast from image to image."""
    noise = torch.randn(count, 3, height, width or height)
    return torch.randn(count, 3, 1, 1) + (0.3 + torch.rand(count, 3, 1, 1)) * noise


def size(model: Network) -> int:
    return 16 if model.stride == 2 else 64


def shorten(model: Network) -> None:
    """Take out blocks that are like others, which only cost time here."""
    for name in ("inception_4b", "inception_4d", "inception_5b"):
        if hasattr(model, name):
            delattr(model, name)
    if isinstance(model, InceptionCifar):
        model.inception_c, model.hidden = Branch(MaxPool()), nn.Linear(480, 1000)
    if isinstance(model, ResNet):
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            del stage[1 + (stage is model.layer1) :]


def trained_model(name: str, away_from_start: Callable[[nn.Module], None]) -> Network:
    """A network with parameters away from their starting values, and with the statistics of two training batches."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=5)
    shorten(model)
    away_from_start(model)
    model.statistics_batch_size = 2
    norms = [module for module in model.modules() if isinstance(module, RunningNorm)]
    for share in (1.0, 0.5):
        for norm in norms:
            norm.momentum = share
        with torch.no_grad():
            model(photographs(4, size(model)))
    return model.eval()


# Every network with BKN and every norm in the smallest; and the one norm that is not folded, beside residual sums.
EACH = sorted({*list_models("*_bkn"), *list_models("inception_cifar_*"), "resnet101_gn"})


@pytest.fixture(scope="module", params=EACH)
def model(request: pytest.FixtureRequest, away_from_start: Callable[[nn.Module], None]) -> Network:
    return trained_model(request.param, away_from_start)


@pytest.fixture(scope="module")
def small(away_from_start: Callable[[nn.Module], None]) -> Network:
    return trained_model("inception_cifar_bkn", away_from_start)


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, small: Network) -> Engine:
    return create_engine(small, request.param)


@torch.no_grad()
def assert_agrees(engine: Callable[..., Tensor], model: nn.Module, images: Tensor, mode: str) -> None:
    wanted = model(images, statistics=mode)
    tolerance = (1e-4 if mode == "population" else 1e-3) * min(1.0, wanted.std().item())
    assert_close(engine(images, mode), wanted, atol=tolerance, rtol=0)


def test_folding_leaves_the_logits_as_they_were(model: Network) -> None:
    folded = fold(model)
    side = size(model)
    assert_agrees(folded, model, photographs(2, side), "population")
    assert_agrees(folded, model, photographs(1, side + 3, side + 8), "population")


def test_folding_takes_in_every_norm_but_group_normalization(model: Network) -> None:
    def count(network: Network, kind: type[nn.Module]) -> int:
        return sum(isinstance(module, kind) for module in network.modules())

    folded = fold(model)
    assert count(folded, RunningNorm) == 0
    assert count(folded, GroupNorm2d) == count(model, GroupNorm2d)


@pytest.mark.parametrize("mode", ["population", "sample"])
def test_branches_that_begin_alike_are_joined(model: Network, mode: str) -> None:
    """Of every Inception block, unless its norms take channels together; that they compute the same is shown below."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = prepare(model, Statistics(mode, 4))
    joined = [module for module in prepared.modules() if isinstance(module, JoinedInception)]
    blocks = [] if model.name.endswith("_gn") else [m for m in model.modules() if isinstance(m, Inception)]
    assert len(joined) == len(blocks)
    for after, block in zip(joined, blocks, strict=True):
        firsts = [branch[0] for branch in block.branches if isinstance(branch[0], ConvNorm)]
        assert after.widths == [first.conv.out_channels for first in firsts if first.pool is None]
        assert len(after.head.norm.weight if mode != "population" else after.head.conv.bias) == sum(after.widths)
    assert_close(dict(model.state_dict()), before, atol=0, rtol=0)


@torch.no_grad()
def test_branches_that_differ_in_a_number_are_not_joined(small: Network) -> None:
    model = copy.deepcopy(small)
    model.inception_b.branches[1][0].norm.eps = 0.5
    prepared = prepare(model, Statistics("sample"))
    assert len(prepared.inception_b.widths) == 2
    assert len(prepared.inception_a.widths) == 3
    assert_agrees(prepared, model, photographs(2, 16), "sample")


@pytest.mark.parametrize("name", NAMES)
def test_expected_statistics_after_training_on_whole_batches(
    away_from_start: Callable[[nn.Module], None], name: str
) -> None:
    """BN has then seen no single images, and takes the population for an image's partners."""
    model = create_model("inception_cifar_bn", num_classes=5)
    shorten(model)
    away_from_start(model)
    with torch.no_grad():
        model(photographs(4, 16))
    model.eval().statistics_batch_size = 4
    assert_agrees(create_engine(model, name), model, photographs(2, 16), "expected")


def test_folding_adds_the_shift_after_a_pooling(away_from_start: Callable[[nn.Module], None]) -> None:
    model = trained_model("inception_v2_bn", away_from_start)
    pooled = [module for module in fold(model).modules() if isinstance(module, ConvNorm) and module.pool is not None]
    assert pooled
    for layer in pooled:
        assert layer.norm.shift.abs().min() > 0
        assert not layer.conv.bias.any()


def test_folding_keeps_the_bias_of_a_convolution(small: Network) -> None:
    model = copy.deepcopy(small)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(0.3 * torch.randn(module.out_channels))
    assert_agrees(fold(model), model, photographs(2, 16), "population")


def converted_network(bias: bool = True) -> Any:
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(5)]
    if not bias:
        norms[0].bias = None  # as BatchNorm2d(4, bias=False) of newer versions of PyTorch has none
    layers = [nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Conv2d(4, 5, 3), norms[1]]
    model = convert(nn.Sequential(*layers, nn.Flatten()), statistics_batch_size=2)
    model.train()(photographs(4, 8))
    return model.eval()


@pytest.mark.parametrize(
    "change",
    [
        lambda conv: conv.register_forward_hook(lambda m, args, y: 2 * y),
        lambda conv: conv.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
        lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
        lambda conv: parametrizations.weight_norm(conv).parametrizations.weight.original0.data.mul_(2),
    ],
    ids=["hook", "hook before", "pruned", "parametrized"],
)
@pytest.mark.parametrize("kind", ["zoo", "converted"])
def test_a_convolution_that_computes_more_than_its_weights_say_is_left(
    small: Network, kind: str, change: Callable[[nn.Module], Any]
) -> None:
    model: Any = copy.deepcopy(small) if kind == "zoo" else converted_network()
    change(model.inception_b.branches[1][0].conv if kind == "zoo" else model.get_submodule("3"))
    images = photographs(2, 16 if kind == "zoo" else 8)
    engine = create_engine(model, "torch")
    engine(images, "population")  # before the network itself, which computes pruned weights anew
    for mode in MODES:
        assert_agrees(engine, model, images, mode)


@modes
def test_the_hooks_of_a_block_are_called(small: Network, mode: str) -> None:
    model = copy.deepcopy(small)
    model.inception_b.register_forward_hook(lambda m, args, state: (2 * state[0], state[1]))
    assert_agrees(create_engine(model, "torch"), model, photographs(2, 16), mode)


def test_a_convolution_that_others_took_the_place_of_is_left() -> None:
    model, images = converted_network(), photographs(2, 8)
    model.set_submodule("3", nn.Sequential(nn.Conv2d(4, 4, 1), model.get_submodule("3")))
    assert_agrees(create_engine(model, "torch"), model, images, "population")


@pytest.mark.parametrize("other", [nn.Identity(), nn.GroupNorm(1, 5), nn.BatchNorm2d(5)])
def test_a_layer_in_the_place_of_a_converted_norm_runs(other: nn.Module) -> None:
    model, images = converted_network(), photographs(2, 8)
    model.set_submodule("4", other.eval())
    for mode in MODES:
        assert_agrees(create_engine(model, "torch"), model, images, mode)


def test_a_norm_may_have_a_scale_alone() -> None:
    model, images = converted_network(bias=False), photographs(2, 8)
    for mode in MODES:
        assert_agrees(create_engine(model, "torch"), model, images, mode)


class Changing(nn.Module):
    """What changes its input, and a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        self.seen += 1
        return self.norm(self.conv(x)).flatten(1) * self.seen


def test_an_engine_leaves_images_alone_that_a_network_changes() -> None:
    images = photographs(2, 8).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    create_engine(convert(Changing()), "torch")(images)
    assert torch.equal(images, before)


class Viewing(nn.Module):
    """What flattens features in a way that PyTorch refuses in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).view(x.size(0), -1)


def test_a_network_that_views_its_features_in_one_layout_runs() -> None:
    model, images = convert(Viewing()).eval(), photographs(2, 8)
    engine = create_engine(model, "torch")
    for mode in MODES:
        assert_agrees(engine, model, images, mode)
    assert engine.layout == torch.contiguous_format  # found out once
    with pytest.raises(RuntimeError, match="channels"):
        engine(images[:, :2])


@needs_openvino
def test_openvino_takes_a_transposed_first_convolution() -> None:
    layers = [nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten()]
    model, images = convert(nn.Sequential(*layers)).eval(), photographs(2, 8)
    assert_agrees(create_engine(model, "openvino"), model, images, "population")


@needs_openvino
def test_a_network_that_changes_its_buffers_is_no_other_runtime_s() -> None:
    """There they are constants: each call would be the first."""
    with pytest.raises(InputError, match=r"changes its buffer seen at each call.*engine='torch'"):
        create_engine(convert(Changing()), "openvino")(photographs(2, 8))


@modes
def test_hooks_of_norms_are_refused(small: Network, mode: str) -> None:
    model = copy.deepcopy(small)
    model.inception_b.branches[1][0].norm.register_forward_hook(lambda m, args, result: result)
    with pytest.raises(InputError, match=r"inception_b.branches.1.0.norm has hooks"):
        create_engine(model, "torch")(photographs(1, 16), mode)


def test_a_folded_network_refuses_the_statistics_of_an_image(small: Network) -> None:
    with pytest.raises(InputError, match="a folded network knows statistics='population' only, not 'sample'"):
        fold(small)(photographs(1, 16), "sample")


@each_engine
def test_engines_agree_with_the_network(model: Network, name: str) -> None:
    engine = create_engine(model, name)
    images = photographs(2, size(model))
    for mode in MODES if model.stride == 2 else ("population", "expected"):  # which has all that `sample` has
        assert_agrees(engine, model, images, mode)


@each_engine
def test_engines_take_any_size(name: str, away_from_start: Callable[[nn.Module], None]) -> None:
    model = trained_model("inception_v2_bkn", away_from_start)
    engine = create_engine(model, name)
    for height, width in ((65, 64), (70, 97)):
        assert_agrees(engine, model, photographs(1, height, width), "population")


@modes
def test_engines_take_any_number_of_images(engine: Engine, small: Network, mode: str) -> None:
    for count in (1, 5):
        assert_agrees(engine, small, photographs(count, 16), mode)
    assert engine(photographs(0, 16), mode).shape == (0, small.num_classes)


@modes
def test_an_image_gets_the_same_logits_in_any_batch(engine: Engine, mode: str) -> None:
    images = photographs(4, 16)
    alone = torch.cat([engine(image[None], mode) for image in images])
    assert_close(engine(images, mode), alone, atol=1e-5, rtol=0)


def test_an_image_in_any_layout_of_memory_is_read_while_it_is_there(engine: Engine) -> None:
    """A copy in the layout that OpenVINO takes must live until it has been read, whoever asks for memory meanwhile."""
    images = photographs(8, 24)
    expected = engine(images, "population")  # an image is handed over in the same way in every mode
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.full((3, 24, 24), torch.nan)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(allocate)
        try:
            found = [engine(images.contiguous(memory_format=torch.channels_last), "population") for _ in range(10)]
        finally:
            stop.set()
    for logits in found:
        assert_close(logits, expected, atol=1e-4, rtol=0)


def test_without_a_choice_the_statistics_are_those_of_the_model(engine: Engine, small: Network) -> None:
    images = photographs(2, 16)
    assert_close(engine(images), engine(images, "population"))
    model = copy.deepcopy(small)
    model.default_statistics = "sample"
    assert_close(TorchEngine(model)(images), engine(images, "sample"), atol=1e-4, rtol=0)


@each_engine
def test_expected_without_a_group_is_the_population(small: Network, name: str) -> None:
    model = copy.deepcopy(small)
    model.statistics_batch_size = None
    engine = create_engine(model, name)
    images = photographs(2, 16)
    assert_close(engine(images, "expected"), engine(images, "population"), atol=0, rtol=0)


@each_engine
def test_a_process_noise_for_every_channel_is_prepared_too(
    name: str, away_from_start: Callable[[nn.Module], None]
) -> None:
    model = create_model("inception_cifar_bkn", shared_process_noise=False)
    shorten(model)
    away_from_start(model)
    assert_agrees(create_engine(model, name), model.eval(), photographs(1, 16), "sample")


@each_engine
def test_threads_may_mix_modes_from_the_first_call_on(small: Network, name: str) -> None:
    engine = create_engine(small, name)
    calls = [(photographs(1 + number % 2, 16), MODES[number % 3]) for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        logits = list(pool.map(lambda call: engine(*call), calls))
    for (images, mode), found in zip(calls, logits, strict=True):
        assert_close(found, engine(images, mode), atol=1e-5, rtol=0)


@each_engine
def test_an_engine_leaves_the_model_alone(small: Network, name: str) -> None:
    model = copy.deepcopy(small).train()
    before = copy.deepcopy(model.state_dict())
    engine = create_engine(model, name)
    for mode in ("population", "sample"):
        engine(photographs(1, 16).requires_grad_(), mode)
    assert model.training
    assert_close(dict(model.state_dict()), dict(before), atol=0, rtol=0)


def test_a_preparation_shares_the_weights_that_it_runs_as_they_are(small: Network) -> None:
    """Or a network would be in memory twice."""
    mine = {weight.data_ptr(): name for name, weight in small.named_parameters()}
    shared = {mine.get(weight.data_ptr()) for weight in prepare(small, Statistics("sample")).parameters()}
    assert {"conv.conv.weight", "fc.weight"} <= shared
    assert any(name is not None and name.endswith("norm.transition") for name in shared)


@each_engine
@pytest.mark.parametrize("mode", ["population", "expected"])  # which shares its preparation with `sample`
def test_a_model_that_has_changed_is_prepared_anew(small: Network, name: str, mode: str) -> None:
    """An engine shares some of its weights: without that, it would run old and new ones mixed."""
    model, images = copy.deepcopy(small), photographs(2, 16)
    engine = create_engine(model, name)
    assert_agrees(engine, model, images, mode)
    recalibrate(model, [3 * photographs(4, 16)])
    assert_agrees(engine, model, images, mode)
    with torch.no_grad():
        model.load_state_dict({key: value * 1.1 for key, value in model.state_dict().items()})
    assert_agrees(engine, model, images, mode)


@pytest.mark.parametrize("kind", ["conv.weight", "norm.weight", "transition", "raw_gain", "running_var", "fc.bias"])
def test_a_change_of_one_kind_of_tensors_alone_is_seen(small: Network, kind: str) -> None:
    model, images = copy.deepcopy(small), photographs(1, 16)
    engine = create_engine(model, "torch")
    mode = "population" if kind.startswith("running") else "sample"
    before = engine(images, mode)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(kind):
                tensor.add_(0.5 * torch.rand_like(tensor))
    assert_agrees(engine, model, images, mode)
    assert (engine(images, mode) - before).abs().max() > 1e-2 * before.abs().max()
    assert len(engine._prepared) == 1  # what was prepared before is gone


def test_a_model_whose_tensors_are_replaced_is_prepared_anew(small: Network) -> None:
    """By some that PyTorch does not count the changes of, too."""
    model, images = copy.deepcopy(small).requires_grad_(False), photographs(1, 16)
    engine = create_engine(model, "torch")
    assert_agrees(engine, model, images, "sample")
    for share in (1.1, 1.2):
        with torch.inference_mode():
            state = {key: value * share for key, value in small.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert_agrees(engine, model, images, "sample")


def test_what_was_prepared_of_a_model_that_has_changed_meanwhile_is_not_kept(small: Network) -> None:
    model, images = copy.deepcopy(small), photographs(1, 16)
    engine = create_engine(model, "torch")
    prepare = engine._prepare

    def slowly(statistics: Statistics, *rest: Any) -> Network:
        found = prepare(statistics, *rest)
        if statistics.mode == "population":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            engine(images, "sample")  # another thread's, which sees the change
        return found

    engine._prepare = slowly
    engine(images, "population")
    engine._prepare = prepare
    assert_agrees(engine, model, images, "population")


def test_a_tensor_that_something_took_the_place_of_is_a_change(small: Network) -> None:
    model, images = copy.deepcopy(small), photographs(1, 16)
    engine = create_engine(model, "torch")
    assert_agrees(engine, model, images, "population")
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    prune.random_unstructured(convolution, "weight", amount=0.9)  # it is a parameter of another name now
    engine._notice_changes()
    assert not engine._prepared
    prune.remove(convolution, "weight")
    assert_agrees(engine, model, images, "population")


@each_engine
def test_the_oldest_preparation_gives_way(small: Network, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "KEPT", 2)
    engine = create_engine(small, name)
    for height in (16, 17, 18, 16):
        assert_agrees(engine, small, photographs(1, height, 16), "population")
    assert len(engine._prepared) == (1 if name == "torch" else 2)


@each_engine
def test_sample_and_expected_share_one_preparation(small: Network, name: str) -> None:
    engine = create_engine(small, name)
    for mode in ("expected", "sample", "expected"):
        assert_agrees(engine, small, photographs(1, 16), mode)
    assert len(engine._prepared) == 1


@modes
def test_f16_is_close_in_pytorch(small: Network, mode: str) -> None:
    images = photographs(4, 16)
    logits = create_engine(small, "torch", precision="f16")(images, mode)
    exact = TorchEngine(small)(images, mode)
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.02 * exact.std()


@needs_openvino
@modes
def test_f16_is_close_in_openvino_where_the_processor_has_it(small: Network, mode: str) -> None:
    images = photographs(4, 16)
    exact = TorchEngine(small)(images, mode)
    assert (OpenVINOEngine(small, precision="f16")(images, mode) - exact).abs().max() < 0.05 * exact.std()


@needs_openvino
def test_f16_in_openvino_refuses_statistics_that_it_cannot_hold(small: Network) -> None:
    model = copy.deepcopy(small)
    model.inception_b.branches[0][0].norm.image_var[3] = 1e4
    engine = create_engine(model, "openvino", precision="f16")
    with pytest.raises(InputError, match=r"means or variances at inception_b\.branches\.0\.0\.norm are too large"):
        engine(photographs(1, 16), "sample")
    engine(photographs(1, 16), "population")


def image_norm(norm: RunningNorm, x: Tensor, name: str) -> Tensor:
    """`x` through an ImageNorm, run by the engine of that name."""
    lean, statistics = ImageNorm(norm.requires_grad_(False), Statistics("sample")), Statistics("sample")
    if name == "torch":
        return lean(x, None, statistics)[0]
    parameter = openvino_graph.ops.parameter(list(x.shape))
    y = lean(Symbol(parameter), None, statistics)[0]
    return torch.from_numpy(run_graph(y, parameter, x))


def run_graph(y: Symbol, parameter: object, x: Tensor, precision: str = "f32") -> object:
    graph = engines.ov.Model([y.node], [parameter])
    options = {engines.ov.properties.hint.inference_precision: precision}
    return openvino_graph.compiled(graph, options)([x.numpy()])[0].copy()


@each_engine
def test_large_means_do_not_spoil_the_variance(name: str) -> None:
    x = 1e3 + 0.1 * torch.randn(1, 5, 12, 12).contiguous(memory_format=torch.channels_last)
    exact, _ = BatchNorm2d(5).double().eval()(x.double(), None, Statistics("sample"))
    assert_close(image_norm(BatchNorm2d(5), x, name), exact.float(), atol=1e-2, rtol=0)


@needs_openvino
@pytest.mark.parametrize("precision", ["f16", "f32"])
@pytest.mark.parametrize("shape", [(112, 112), (56, 57), (3, 5), (1, 300)])
def test_many_positions_do_not_spoil_the_statistics(shape: tuple[int, int], precision: str) -> None:
    """In f16, where a processor may sum them in f16 too."""
    x = 2 + 10 * torch.randn(1, 8, *shape)
    parameter = openvino_graph.ops.parameter(list(x.shape))
    pointwise = nn.Conv2d(8, 8, 1, bias=False).requires_grad_(False)  # after which OpenVINO lays channels last
    nn.init.eye_(pointwise.weight[:, :, 0, 0])
    norm = ImageNorm(BatchNorm2d(8).requires_grad_(False), Statistics("sample"))
    y = norm(pointwise(Symbol(parameter)), None, Statistics("sample"))[0]
    found = torch.from_numpy(run_graph(y, parameter, x, precision))
    tolerance = 0.01 if precision == "f16" else 1e-4
    assert_close(found, F.batch_norm(x, None, None, training=True), atol=tolerance, rtol=tolerance)


@needs_openvino
@pytest.mark.parametrize(("side", "value"), [(64, 1.0), (8, 1100.0), (4, 5000.0)])
def test_the_average_of_a_whole_map_in_f16_is_that_in_f32(side: int, value: float) -> None:
    x = torch.full((1, 8, side, side), value)
    parameter = openvino_graph.ops.parameter(list(x.shape))
    y = F.avg_pool2d(Symbol(parameter), side)
    found = torch.from_numpy(run_graph(y, parameter, x, "f16"))
    assert_close(found, torch.full((1, 8, 1, 1), value), atol=0, rtol=2e-3)


@needs_openvino
@pytest.mark.parametrize(("precision", "kind"), [("f16", "f16"), ("f32", "f32"), ("bf16", "f32")])
@pytest.mark.parametrize("mode", ["population", "sample"])
def test_a_graph_has_weights_as_it_computes_with_them(
    small: Network, monkeypatch: pytest.MonkeyPatch, precision: str, kind: str, mode: str
) -> None:
    """OpenVINO takes long to convert them, and in f16 keeps what is stored without a copy."""
    graphs: list[Any] = []
    monkeypatch.setattr(openvino_graph, "compiled", lambda graph, options: graphs.append(graph))
    options = {engines.ov.properties.hint.inference_precision: precision}
    stored = copy.deepcopy(small)
    for weight in stored.parameters():
        weight.data = weight.data.half() if weight.ndim > 1 else weight.data
    network = prepare(stored, Statistics(mode), as_stored=True)
    openvino_graph.compile_graph(network, (3, 16, 16), mode == "population", options)
    constants = [node for node in graphs[0].get_ordered_ops() if node.get_type_name() == "Constant"]
    weights = [node for node in constants if len(node.shape) > 1 and max(node.shape) > 1]
    assert {node.get_element_type().get_type_name() for node in weights} == {kind}


@needs_openvino
def test_a_norm_takes_few_operations_of_a_graph(small: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile a graph takes time for each: with what all norms share made for each of them, they were 65."""
    graphs: list[Any] = []
    monkeypatch.setattr(openvino_graph, "compiled", lambda graph, options: graphs.append(graph))
    network = prepare(small, Statistics("sample"))
    openvino_graph.compile_graph(network, (3, 16, 16), False, {})
    norms = [module for module in network.modules() if isinstance(module, ImageNorm)]
    assert len(graphs[0].get_ordered_ops()) <= 55 * len(norms)


@each_engine
def test_a_constant_channel_is_normalized_to_its_shift(name: str) -> None:
    norm = BatchKalmanNorm2d(4)
    nn.init.normal_(norm.bias)
    y = image_norm(norm, torch.full((1, 4, 3, 3), 2.5), name)
    assert_close(y, norm.bias[None, :, None, None].expand(1, 4, 3, 3), atol=1e-4, rtol=0)


@needs_openvino
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (7, 9), (5, 12)])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (3, 1), (2, 2), (3, 3), (2, 3)])
def test_openvino_rounds_the_size_of_a_pooling_as_pytorch_does(
    kernel: int, stride: int, shape: tuple[int, int], ceil_mode: bool, padding: int
) -> None:
    x = torch.randn(1, 3, *shape)
    parameter = openvino_graph.ops.parameter(list(x.shape))
    options = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    found = run_graph(F.max_pool2d(Symbol(parameter), kernel, **options), parameter, x)
    assert_close(torch.from_numpy(found), F.max_pool2d(x, kernel, **options), atol=0, rtol=0)


@needs_openvino
def test_a_pooling_of_openvino_s_own_frontend_does_not_round_up() -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            cases = [(images, padding) for images in (x, x[:, :, 1:]) for padding in (0, 1)]
            return tuple(F.max_pool2d(images, 3, 2, padding, ceil_mode=True) for images, padding in cases)

    x, pools = torch.randn(1, 3, 8, 8), Pools()
    model = engines.ov.convert_model(torch.export.export(pools, (x,)))
    model.reshape(list(x.shape))
    openvino_graph.round_up_by_padding(model)
    nodes = [node for node in model.get_ops() if node.get_type_name() == "MaxPool"]
    assert [node.get_attributes()["rounding_type"] for node in nodes] == ["floor"] * 4
    run = openvino_graph.compiled(model, {engines.ov.properties.hint.inference_precision: "f32"})
    for found, wanted in zip(run([x.numpy()]).values(), pools(x), strict=True):
        assert_close(torch.from_numpy(found.copy()), wanted, atol=0, rtol=0)


@needs_openvino
def test_what_openvino_cannot_translate_is_named(small: Network) -> None:
    model = copy.deepcopy(small)
    model.head = lambda x: torch.cumsum(x, 1)
    with pytest.raises(InputError, match="cannot translate cumsum: choose engine='torch'"):
        OpenVINOEngine(model)(photographs(1, 16))
    symbol = Symbol(openvino_graph.ops.parameter([1, 4, 8, 8]))
    with pytest.raises(InputError, match="cannot translate grouped convolutions"):
        nn.Conv2d(4, 4, 3, groups=4)(symbol)
    with pytest.raises(InputError, match="cannot translate this average pooling"):
        F.avg_pool2d(symbol, 3, ceil_mode=True)


def test_auto_is_the_fastest_engine_that_is_installed(small: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(create_engine(small)) is (TorchEngine if engines.ov is None else OpenVINOEngine)
    monkeypatch.setattr(engines, "ov", None)
    assert type(create_engine(small)) is TorchEngine


def test_openvino_states_its_precision(small: Network) -> None:
    pytest.importorskip("openvino")
    engine = OpenVINOEngine(small)
    engine(photographs(1, 16))
    (graph,) = engine._prepared.values()
    assert graph.compiled.get_property("INFERENCE_PRECISION_HINT") == engines.ov.Type.f32


@needs_openvino
@pytest.mark.parametrize(
    ("machine", "native", "chosen"),
    [
        ("x86_64", ["BF16", "FP32", "FP16", "INT8"], "bf16"),
        ("x86_64", ["FP32", "FP16", "INT8"], "f32"),  # where f16 is slower
        ("aarch64", ["FP32", "FP16"], "f16"),
        ("aarch64", ["FP32"], "f32"),
    ],
)
def test_auto_is_the_fastest_precision_that_the_processor_has(
    small: Network, machine: str, native: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "core", lambda: SimpleNamespace(get_property=lambda *_: native))
    monkeypatch.setattr(engines.platform, "machine", lambda: machine)
    assert create_engine(small, "openvino", precision="auto").precision == chosen
    assert create_engine(small, "openvino").precision == "f32"
    assert create_engine(small, "torch", precision="auto").precision == "f32"


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "f16")])
def test_auto_on_a_gpu_is_bf16_where_it_need_not_be_emulated(
    small: Network, native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert create_engine(small, device="cuda", precision="auto").precision == chosen
    assert create_engine(small, device="cuda").precision == "f32"


@needs_openvino
def test_where_f16_cannot_hold_the_statistics_auto_computes_them_in_f32(
    small: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenVINOEngine, "_fastest_precision", lambda self: "f16")
    model = copy.deepcopy(small)
    model.inception_b.branches[0][0].norm.image_var[3] = 1e4
    engine = create_engine(model, "openvino", precision="auto")
    engine(photographs(1, 16), "sample")
    (graph,) = engine._prepared.values()
    assert graph.compiled.get_property("INFERENCE_PRECISION_HINT") == engines.ov.Type.f32
    assert engine.precision == "f16"  # of all else


def test_a_missing_openvino_is_said(small: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ov", None)
    with pytest.raises(InputError, match=r"needs openvino: install it with pip install 'bkn-zoo\[openvino\]'"):
        create_engine(small, "openvino")


def test_the_module_imports_without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert runpy.run_path(openvino_graph.__file__)["ov"] is None


@needs_openvino
@pytest.mark.parametrize("mode", MODES)
def test_with_streams_an_image_s_logits_do_not_depend_on_who_runs_beside_it(small: Network, mode: str) -> None:
    images = photographs(5, 16)
    engine = create_engine(small, "openvino", streams=2)
    assert_agrees(engine, small, images, mode)
    alone = torch.cat([engine(image[None], mode) for image in images])
    assert engine(images, mode).equal(alone)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda rows: engine(images[rows], mode), [[4, 0], [1], [2, 3, 0], [4]] * 5):
            assert all(any(row.equal(known) for known in alone) for row in found)


@pytest.mark.parametrize("streams", [0, 1.5, "2", True])
def test_streams_are_for_openvino_and_a_whole_number_of_at_least_one(small: Network, streams: Any) -> None:
    with pytest.raises(InputError, match="streams are OpenVINO's: choose engine='openvino' and device='cpu'"):
        create_engine(small, "torch", streams=2)
    with pytest.raises(InputError, match=f"streams is {streams!r}, but must be a whole number of at least 1"):
        create_engine(small, streams=streams)


def test_unknown_names_are_said(small: Network) -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'onnx': choose one of auto, torch, openvino"):
        create_engine(small, "onnx")
    with pytest.raises(UnknownNameError, match="unknown precision 'int8': choose one of auto, f32, f16, bf16"):
        create_engine(small, precision="int8")
    with pytest.raises(UnknownNameError, match="unknown statistics 'batch'"):
        create_engine(small)(photographs(1, 16), "batch")


def test_devices_that_are_not_there_are_said(monkeypatch: pytest.MonkeyPatch, small: Network) -> None:
    for device in ("tpu", "cuda:64" if torch.cuda.is_available() else "cuda", "xpu", "privateuseone", "meta", ""):
        with pytest.raises(InputError, match=f"device '{device}' is nothing that PyTorch finds here: choose from cpu"):
            create_engine(small, device=device)
    if engines.ov is not None:
        monkeypatch.setattr(engines, "check_device", lambda device: None)
        with pytest.raises(InputError, match="OpenVINO runs on device='cpu' here, not on 'cuda'"):
            create_engine(small, "openvino", "cuda")


@pytest.mark.parametrize(
    "images",
    [torch.zeros(3, 16, 16), torch.zeros(1, 1, 16, 16), torch.zeros(1, 3, 1, 16), torch.zeros(1, 3, 16, 16).int()],
)
def test_engines_refuse_the_images_that_the_network_refuses(engine: Engine, small: Network, images: Tensor) -> None:
    with pytest.raises(BknZooError) as refused:
        small(images)
    with pytest.raises(type(refused.value), match="images") as refused_too:
        engine(images)
    assert str(refused_too.value) == str(refused.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@modes
def test_pytorch_on_a_gpu_agrees_with_the_network(model: Network, mode: str) -> None:
    images = photographs(3, size(model))
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = create_engine(model, device="cuda")(images, mode)
        assert_close(logits.cpu(), model(images, mode), atol=1e-3, rtol=0)


def test_the_benchmark_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ov", None)
    script = Path(__file__).parent.parent / "scripts" / "benchmark.py"
    output = tmp_path / "infer.json"
    command = [str(script), "infer", "--cases", "inception_cifar:32", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(script), run_name="__main__")
    rows = json.loads(output.read_text())["rows"]
    assert [(row["norm"], row["engine"], row["statistics"]) for row in rows] == [
        *(("bkn", engine, mode) for engine in ("eager", "torch") for mode in MODES),
        *(("bn", engine, "population") for engine in ("eager", "torch")),
    ]
    assert all(row["max_difference"] < 1e-3 for row in rows)
    assert all(row["ms_per_image"] > 0 and row["ratio_to_torch"] > 0 for row in rows)


def test_a_signal_finds_a_stack_after_engines_have_come_and_gone() -> None:
    """In a process of its own, which would crash."""
    pytest.importorskip("openvino")
    program = """
        import gc, os, signal, torch, bkn_zoo
        from bkn_zoo.inference.engines import create_engine

        signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
        model = bkn_zoo.create_model("inception_cifar_gn").eval()
        engines = [create_engine(model, "openvino") for _ in range(2)]
        while engines:
            [engine(torch.zeros(1, 3, 32, 32)) for engine in engines]
            del engines[0]
            gc.collect()
        os.kill(os.getpid(), signal.SIGUSR1)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout) == (0, "handled\n"), result.stderr
