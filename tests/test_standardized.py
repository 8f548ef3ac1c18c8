"""Standardized weights, and transitions of low rank: definitions, limits, and what happens to a network afterwards."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu import DEVICE, gpu_only
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import bkn_zoo
from bkn_zoo import kernels
from bkn_zoo.errors import ConversionError, InputError
from bkn_zoo.images import Preprocessing
from bkn_zoo.inference import folding, openvino_graph, symbols
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.inference.graph_cache import PRECISION
from bkn_zoo.models import registry
from bkn_zoo.norms import MODES, BatchKalmanNorm2d, Belief, Statistics
from bkn_zoo.norms.batch_kalman import multiplied_once
from bkn_zoo.norms.standardized import (
    StandardizedConv,
    StandardizedConv2d,
    in_one_launch,
    standardize,
    standardize_convolutions,
    standardized_convolutions,
    standardized_once,
)

pytestmark = pytest.mark.usefixtures("shallow_network")
NORMS = list(registry.NORMS)
OPTIONS = {"standardized_weights": True, "transition_rank": 4}


def conv(*shape, **options):
    network = nn.Sequential(nn.Conv2d(*shape, **options))
    standardize_convolutions(network)
    return network[0]


def trained(name="inception_cifar_bkn", **options):
    """A network whose norms have left their initial values, in evaluation mode."""
    model = bkn_zoo.create_model(name, 4, **options)
    model.statistics_batch_size = 2
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, BatchKalmanNorm2d):
                for block in layer.transition_blocks:
                    block.normal_(0, 0.2)
        for _ in range(3):
            model.train()(torch.randn(4, 3, 32, 32) * (0.5 + torch.rand(4, 3, 1, 1)))
    return model.eval()


def test_weight_has_mean_0_and_variance_1_over_fan_in():
    weight = torch.randn(5, 3, 2, 4, dtype=torch.float64) * 3 + 1
    result = standardize(weight)
    for own, raw in zip(result, weight, strict=True):
        assert_close(own, (raw - raw.mean()) / ((raw.var(correction=0) + 1e-4) * raw.numel()).sqrt())
    assert_close(result.flatten(1).mean(1), torch.zeros(5, dtype=torch.float64))


def test_weight_is_that_of_timm():
    rival = pytest.importorskip("timm.layers").ScaledStdConv2d(3, 5, 3, eps=1e-4)
    x = torch.randn(2, 3, 5, 5)
    assert_close(nn.functional.conv2d(x, standardize(rival.weight), rival.bias, padding=1), rival(x))


def test_shift_and_scale_of_the_raw_weight_change_nothing():
    weight = torch.randn(5, 3, 2, 4, dtype=torch.float64)
    assert_close(standardize(weight + 7.0), standardize(weight))
    assert_close(standardize(weight * 7.0, eps=0.0), standardize(weight, eps=0.0))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolution_keeps_its_parameters_and_options(kind):
    plain = kind(4, 6, 3, stride=2, padding=1, groups=2)
    network = nn.Sequential(copy.deepcopy(plain))
    standardize_convolutions(network)
    assert network.state_dict().keys() == nn.Sequential(plain).state_dict().keys()
    plain.weight.data = standardize(plain.weight.data)
    x = torch.randn(2, 4, *[7] * (plain.weight.ndim - 2))
    assert_close(network(x), plain(x))


def test_depthwise_convolutions_stay_plain():
    network = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1), nn.Conv2d(1, 3, 1))
    standardize_convolutions(network)
    assert standardized_convolutions(network) == [network[1]]
    assert type(network[0]) is type(network[2]) is nn.Conv2d
    with pytest.raises(InputError, match="there is no module '3'"):
        standardize_convolutions(network, "3")


@pytest.mark.parametrize("norm", NORMS)
def test_every_convolution_of_a_network_is_standardized(norm):
    model = bkn_zoo.create_model(f"resnet101_{norm}", 2, standardized_weights=True)
    plain = bkn_zoo.create_model(f"resnet101_{norm}", 2)
    assert model.state_dict().keys() == plain.state_dict().keys()
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(isinstance(module, StandardizedConv2d) for module in convs)
    assert model.norm_options["standardized_weights"]
    assert not plain.norm_options["standardized_weights"]


def test_kept_weight_is_dropped_when_the_raw_one_changes():
    layer = conv(3, 4, 3).eval()
    x = torch.randn(1, 3, 5, 5)

    def check():
        with torch.no_grad():
            assert_close(layer(x), nn.functional.conv2d(x, standardize(layer.weight), layer.bias))

    check()
    with torch.no_grad():
        first = layer.standardized_weight()
        assert layer.standardized_weight() is first
        assert layer.train().eval().standardized_weight() is not first
        layer.weight.normal_()
    check()
    layer.load_state_dict({"weight": torch.randn_like(layer.weight), "bias": torch.zeros(4)})
    check()
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    check()
    layer.double()
    x = x.double()
    check()
    layer.weight.data.normal_()
    check()
    # A fused optimizer does not count its steps either.
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    layer(x).square().sum().backward()
    optimizer.step()
    check()


@gpu_only
def test_captured_graph_computes_the_weight_itself():
    layer, x = conv(3, 4, 3).cuda().eval().requires_grad_(False), torch.randn(1, 3, 5, 5, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer.eval()
    layer.weight.normal_()
    graph.replay()
    assert_close(y, nn.functional.conv2d(x, standardize(layer.weight), layer.bias))


def test_vmap_over_the_weights_of_several_networks():
    layers = [conv(3, 4, 3).eval() for _ in range(2)]
    x = torch.randn(1, 3, 5, 5)
    weights, _ = torch.func.stack_module_state(layers)
    with torch.no_grad():
        y = torch.vmap(lambda each: torch.func.functional_call(layers[0], each, (x,)))(weights)
        assert_close(y, torch.stack([layer(x) for layer in layers]))


def test_frozen_convolution_has_gradients_where_asked():
    layer = conv(3, 4, 3).eval()
    with torch.inference_mode():
        layer(torch.randn(1, 3, 5, 5))
    layer(torch.randn(1, 3, 5, 5)).sum().backward()
    assert layer.weight.grad.abs().sum() > 0
    layer.weight.requires_grad_(False)
    x = torch.randn(1, 3, 5, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_share_nothing(copied):
    model = trained(**OPTIONS)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model(x, "sample")
        other = copied(model)
        assert_close(other(x, "sample"), wanted, atol=0, rtol=0)
        own, others = standardized_convolutions(model), standardized_convolutions(other)
        assert len(own) == len(others) > 0
        others[0].weight.normal_()
        assert_close(model(x, "sample"), wanted, atol=0, rtol=0)


@pytest.fixture
def several():
    layers = [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(40, 7, 1).to(memory_format=torch.channels_last),
        nn.Conv2d(130, 4, 3, bias=False).to(memory_format=torch.channels_last),
    ]
    network = nn.ModuleList(layers).to(DEVICE)
    standardize_convolutions(network)
    return network


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_one_launch_equals_one_by_one(several):
    gradients = [torch.randn_like(layer.weight) for layer in several]
    with kernels.use("triton"):
        assert in_one_launch(list(several))
        with standardized_once(several):
            results = [layer.ready_weight() for layer in several]
            for layer in several:  # as FSDP2 frees weights and gathers them again
                old, layer.weight.data = layer.weight.data, layer.weight.data.clone()
                old.fill_(torch.nan)
            torch.autograd.backward(results, gradients)
    assert all(layer.ready_weight() is None for layer in several)
    for layer, result, gradient in zip(several, results, gradients, strict=True):
        raw = layer.weight.detach().double().requires_grad_()
        wanted = standardize(raw)
        wanted.backward(gradient.double())
        assert_close(result.double(), wanted, rtol=1e-5, atol=1e-6)
        assert_close(layer.weight.grad.double(), raw.grad, rtol=1e-4, atol=1e-5)
        assert layer.weight.grad.stride() == layer.weight.stride()


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_one_launch_refuses_second_derivatives(several):
    with kernels.use("triton"), standardized_once(several):
        total = several[0].ready_weight().pow(3).sum()
    (first,) = torch.autograd.grad(total, several[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_checkpointed_layers_standardize_by_themselves(several):
    layer, x = several[0], torch.randn(2, 3, 5, 5, device=DEVICE)
    with kernels.use("triton"), standardized_once(several):
        y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    own = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(x).sum().backward()
    assert_close(own, layer.weight.grad)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_one_launch_without_gradients_is_only_used_without(several):
    layer = several.eval()[0]
    ready = torch.no_grad()(layer.ready_weight)
    with kernels.use("triton"):
        assert not in_one_launch(list(several))
        with torch.no_grad(), standardized_once(several):
            assert_close(ready(), layer.standardized_weight(), rtol=1e-5, atol=1e-6)
            # A network within this one.
            assert not in_one_launch(list(several))
            with ThreadPoolExecutor() as other:
                assert other.submit(ready).result() is None
            with torch.enable_grad():
                layer(torch.ones(1, 3, 4, 4, device=DEVICE)).sum().backward()
    assert layer.weight.grad.any()
    assert ready() is None


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("case", ["", "pruned", "permuted", "without autocast", "replaced"])
def test_one_launch_changes_no_evaluation(several, case):
    layer, x = several.eval()[0], torch.randn(2, 3, 6, 6, device=DEVICE)
    raw = torch.randn_like(layer.weight)
    if case == "pruned":
        prune.l1_unstructured(layer, "weight", 0.5)
        layer.weight_orig.data = raw  # not `weight`, before the next call
    if case == "permuted":
        layer.weight = nn.Parameter(raw.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    weights, results = {"weight": raw} if case == "replaced" else {}, []
    for implementation in ("triton", "pytorch"):
        # torch.autocast would refuse without a GPU.
        torch.set_autocast_enabled("cuda", case == "without autocast")
        once = standardized_once(several)
        with torch.no_grad(), kernels.use(implementation), once, torch.autocast("cuda", enabled=False):
            results.append(torch.func.functional_call(layer, weights, x))
        torch.set_autocast_enabled("cuda", False)
    assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_trace_contains_what_the_kernels_compute():
    model, x = trained(**OPTIONS).to(DEVICE), torch.randn(2, 3, 32, 32, device=DEVICE)
    model.default_statistics = "sample"
    with kernels.use("triton"), torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert_close(traced(x + 1), model(x + 1), rtol=1e-3, atol=1e-3)


@gpu_only
def test_training_step_agrees_with_one_by_one(monkeypatch):
    model = bkn_zoo.create_model("inception_cifar_bkn", 4, **OPTIONS).cuda()
    model.statistics_batch_size = 2
    other, x = copy.deepcopy(model), torch.randn(4, 3, 32, 32, device="cuda")
    model(x).square().sum().backward()
    monkeypatch.setattr("bkn_zoo.norms.standardized.in_one_launch", lambda convs: False)
    other(x).square().sum().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


# A = U V.


def test_rank_equals_the_materialized_transition():
    low = BatchKalmanNorm2d(24, 30, transition_rank=3, dtype=torch.float64)
    full = BatchKalmanNorm2d(24, 30, dtype=torch.float64)
    assert low.transition["left"].shape == (24, 3)
    assert not low.transition["left"].any()
    assert low.transition["right"].any()
    nn.init.normal_(low.transition["left"])
    full.transition.data = (low.transition["left"] @ low.transition["right"]).detach()
    x = torch.randn(4, 24, 3, 3, dtype=torch.float64)
    prior = Belief(torch.randn(2, 30, dtype=torch.float64), torch.rand(2, 30, dtype=torch.float64))
    outputs = []
    for layer in (low, full):
        layer.statistics_batch_size = 2
        y, belief = layer(x, prior)
        (y.square().sum() + belief.mean.sum() + belief.var.square().sum()).backward()
        outputs.append((y, *belief))
    assert_close(outputs[0], outputs[1])
    assert_close(low.transition["left"].grad, full.transition.grad @ low.transition["right"].T)
    assert_close(low.transition["right"].grad, low.transition["left"].T @ full.transition.grad)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("frozen", ["", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_a_network_equal_those_of_layers(dtype, frozen):
    """In float32 under autocast, too."""
    network = nn.ModuleList(BatchKalmanNorm2d(24, below, transition_rank=3) for below in (30, 30, 40)).to(DEVICE, dtype)
    for layer in network:
        nn.init.normal_(layer.transition["left"])
        layer.transition.get_parameter(frozen or "left").requires_grad_(not frozen)
    network[1].transition.requires_grad_(True)
    x, rows = torch.randn(4, 24, 3, 3, device=DEVICE, dtype=dtype), torch.rand(1, 40, device=DEVICE)
    priors = [Belief(rows[:, : layer.prior_features], 1 + rows[:, : layer.prior_features]) for layer in network]

    def outputs(run):
        return [run(layer, prior)[0] for layer, prior in zip(network, priors, strict=True)]

    def gradients(ys):
        sum(y.float().pow(3).sum() for y in ys).backward()
        found = [parameter.grad for parameter in network.parameters()]
        network.zero_grad()
        return found

    def checkpointed(layer, prior):
        return checkpoint(layer, x, prior, use_reentrant=False)

    with kernels.use("triton"):
        wanted = gradients(outputs(lambda layer, prior: layer(x, prior)))
        with multiplied_once(network, x):
            recomputed = gradients(outputs(checkpointed))
        with torch.autocast(x.device.type, torch.bfloat16), multiplied_once(network, x):
            for layer in network:
                left, right = (factor.detach().double() for factor in layer.factors)
                assert_close(layer._ready.double(), left @ right, rtol=1e-5, atol=1e-6)
            ys = outputs(lambda layer, prior: layer(x, prior))
    assert all(layer._ready is None for layer in network)
    assert_close(gradients(ys), wanted)
    assert_close(recomputed, wanted)


class Marked(torch.Tensor):
    pass


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton")
def test_products_of_other_types_are_left_to_layers():
    layer = BatchKalmanNorm2d(24, 30, transition_rank=3).to(DEVICE)
    x = torch.randn(4, 24, 3, 3, device=DEVICE)
    with kernels.use("triton"), multiplied_once(layer, x):
        assert layer._ready is not None
    layer.transition.left = nn.Parameter(layer.transition.left.detach().as_subclass(Marked))
    with kernels.use("triton"), multiplied_once(layer, x):
        assert layer._ready is None


def test_rank_that_saves_nothing_gives_the_full_matrix():
    assert BatchKalmanNorm2d(8, 8, transition_rank=4).transition.shape == (8, 8)
    assert BatchKalmanNorm2d(8, 8, transition_shapes=[(8,)], transition_rank=1).transition.shape == (8,)
    with pytest.raises(InputError, match="transition_rank is 0"):
        BatchKalmanNorm2d(8, 8, transition_rank=0)


def test_reset_draws_the_right_factor():
    layer = BatchKalmanNorm2d(24, 30, transition_rank=3)
    nn.init.zeros_(layer.transition["right"])
    nn.init.ones_(layer.transition["left"])
    layer.reset_parameters()
    assert layer.transition["right"].any()
    assert not layer.transition["left"].any()


def test_factors_learn_and_decay_is_off():
    model = bkn_zoo.create_model("inception_cifar_bkn", 4, **OPTIONS)
    names = {name for name, _ in model.named_parameters() if "transition" in name}
    assert any(name.endswith("transition.left") for name in names)
    assert names <= model.no_weight_decay()
    before = {name: value.clone() for name, value in model.named_parameters() if name in names}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):  # V moves once U is not zero
        optimizer.zero_grad()
        model(torch.randn(4, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    assert [name for name in names if torch.equal(model.get_parameter(name), before[name])] == []


# Engines, exports and checkpoints.


@pytest.fixture(params=[0, folding.SMALL_TRANSITION], ids=["factors", "products"])
def form_of_transitions(request, monkeypatch):
    """Engines use the factors of large transitions, and multiply those of small ones."""
    monkeypatch.setattr(folding, "SMALL_TRANSITION", request.param)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
@pytest.mark.parametrize("mode", MODES)
def test_engines_agree_with_the_network(engine, mode, whole_network, form_of_transitions):
    if engine == "openvino":
        pytest.importorskip("openvino")
    model, x = trained(**OPTIONS), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(create_engine(model, engine)(x, mode), model(x, mode), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("small", [0, 2**11, folding.SMALL_TRANSITION])
def test_graphs_for_bf16_compute_the_same(small, whole_network, monkeypatch):
    """Graphs for AMX join products, also where only one of the norms with the same prior has factors."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(folding, "SMALL_TRANSITION", small)
    monkeypatch.setattr(symbols.platform, "machine", lambda: "x86_64")
    model, x = trained(**OPTIONS), torch.randn(1, 3, 32, 32)
    network = folding.prepare(model, Statistics("sample"))
    built, _ = openvino_graph.build_graph(network, x.shape[1:], False, {PRECISION: "bf16"})
    graph = openvino_graph.Graph(openvino_graph.compiled(built, {PRECISION: "f32"}))
    with torch.no_grad():
        assert_close(graph(x), model(x, "sample"), rtol=1e-4, atol=1e-5)


def test_openvino_takes_factors_in_16_bits(whole_network, form_of_transitions):
    pytest.importorskip("openvino")
    model, x = trained(**OPTIONS), torch.randn(2, 3, 32, 32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.half()
    outputs = create_engine(model, "openvino")(x, "sample")
    with torch.no_grad():
        assert_close(outputs, model.float()(x, "sample"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["population", "sample"])
def test_engine_takes_pruned_convolutions(mode):
    model, x = trained(**OPTIONS), torch.randn(2, 3, 32, 32)
    prune.l1_unstructured(standardized_convolutions(model)[1], "weight", 0.5)
    with torch.no_grad():
        assert_close(create_engine(model, "torch")(x, mode), model(x, mode), rtol=1e-4, atol=1e-5)


def test_engines_contain_plain_convolutions():
    network = folding.frozen(trained(**OPTIONS))
    assert not any(isinstance(module, StandardizedConv) for module in network.modules())


def test_export_agrees_with_the_network(tmp_path, form_of_transitions):
    pytest.importorskip("onnxscript")
    about = {"label_names": list("abcd"), "preprocessing": Preprocessing(32, (0.4,) * 3, (0.2,) * 3)}
    bkn_zoo.save_pretrained(trained(**OPTIONS), tmp_path / "mine", default_statistics="sample", **about)
    # The export itself compares the file with the network.
    assert bkn_zoo.export(tmp_path / "mine", tmp_path / "mine.onnx", statistics="sample").exists()


def test_checkpoint_keeps_raw_weights_and_continues(tmp_path):
    model, x = trained(**OPTIONS), torch.randn(2, 3, 32, 32)
    bkn_zoo.save_pretrained(model, tmp_path / "mine", label_names=list("abcd"), default_statistics="sample")
    loaded = bkn_zoo.from_pretrained(tmp_path / "mine")
    assert loaded.norm_options == model.norm_options
    assert loaded.norm_options["transition_rank"] == 4
    for one, other in zip(standardized_convolutions(loaded), standardized_convolutions(model), strict=True):
        assert_close(one.weight, other.weight, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert_close(loaded(x), model(x, "sample"), rtol=1e-2, atol=1e-2)
    loaded.train()(torch.randn(4, 3, 32, 32)).sum().backward()
    assert loaded.conv.conv.weight.grad.abs().sum() > 0


# Converted networks.


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 20, 3), nn.BatchNorm2d(20), nn.ReLU(),
        nn.Conv2d(20, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def test_convert_standardizes_convolutions_before_norms():
    network = bkn_zoo.convert(small_network(), standardized_weights=True, transition_rank=2, statistics_batch_size=2)
    assert standardized_convolutions(network) == [network[0], network[3]]
    assert network[4].transition["left"].shape == (20, 2)
    for _ in range(2):
        network(torch.randn(4, 3, 9, 9)).square().sum().backward()
    assert network[3].weight.grad.abs().sum() > 0
    with pytest.raises(ConversionError, match="standardized"):
        bkn_zoo.start_near_population(network)
    copied = pickle.loads(pickle.dumps(network.eval()))
    x = torch.randn(2, 3, 9, 9)
    nn.init.normal_(network[4].transition["left"])
    copied.load_state_dict(network.state_dict())
    with torch.no_grad():
        assert_close(copied(x, statistics="sample"), network(x, statistics="sample"))
        assert_close(create_engine(network, "torch")(x, "sample"), network(x, statistics="sample"))


@pytest.mark.parametrize("trained", [True, False])
def test_state_dict_says_whether_weights_are_standardized(tmp_path, trained):
    """Otherwise a file would load without an error into the other kind of network, which computes something else."""
    ours, other = (
        bkn_zoo.convert(small_network(), statistics_batch_size=2, standardized_weights=way)
        for way in (trained, not trained)
    )
    torch.save(ours.state_dict(), tmp_path / "weights.pt")
    saved = torch.load(tmp_path / "weights.pt")
    with pytest.raises(InputError, match=f"trained with standardized_weights={trained}: "):
        other.load_state_dict(saved)
    averaged, others = AveragedModel(ours), AveragedModel(other)
    with pytest.raises(InputError, match=f"trained with standardized_weights={trained}: "):
        others.load_state_dict(averaged.state_dict())
    averaged.load_state_dict(averaged.state_dict())
    ours.load_state_dict(saved)
    # Without this note, as in safetensors or of the original network, they load.
    other.load_state_dict(dict(saved))
    ours.load_state_dict(small_network().state_dict(), strict=False)


def test_network_of_a_library_keeps_the_options(tmp_path):
    pytest.importorskip("timm")
    network = bkn_zoo.create_model("timm:test_resnet", 4, **OPTIONS)
    assert standardized_convolutions(network)
    bkn_zoo.save_pretrained(network.eval(), tmp_path / "mine", label_names=list("abcd"))
    assert len(standardized_convolutions(bkn_zoo.from_pretrained(tmp_path / "mine"))) > 0
    squeezing = bkn_zoo.create_model("timm:test_efficientnet", 4, standardized_weights=True)
    kinds = {name: type(module) for name, module in squeezing.named_modules()}
    assert kinds["blocks.3.0.conv_pw"] is StandardizedConv2d
    assert kinds["blocks.3.0.se.conv_reduce"] is kinds["blocks.3.0.se.conv_expand"] is nn.Conv2d
    with pytest.raises(InputError, match="not standardized in their training"):
        bkn_zoo.create_model("timm:test_resnet", 4, pretrained=True, standardized_weights=True)
