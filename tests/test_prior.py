"""Pretrained networks near their population: frozen at gain 0, and gains that learn."""

import copy

import pytest
import torch
from families import FAMILIES
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Adam
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo import kernels
from bkn_zoo.conversion import LEARNING_GAIN, convert, prove, start_near_population
from bkn_zoo.conversion.learning import relative_error
from bkn_zoo.errors import InputError
from bkn_zoo.inference import engines
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.modes import MODES, Statistics
from bkn_zoo.norms import BatchKalmanNorm, BatchKalmanNorm2d

SIZE = 32
needs_openvino = pytest.mark.skipif(engines.ov is None, reason="openvino is not installed")


def pretrained(build, dtype=torch.float64):
    """A network without dropout whose norms know a population, a nearly dead channel of the first among them."""
    network = build().to(dtype)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, _BatchNorm):
            module.momentum = None  # so that little of where it starts is left
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    with torch.no_grad():
        first.weight[0] *= 1e-4  # so that the variance of its channel is below eps
        first.weight[1] = 0.0
        for _ in range(4):
            network.train()(1 + torch.randn(4, 3, SIZE, SIZE, dtype=dtype))
    return network.eval()


def frozen(network):
    """In training, but for its batch norms."""
    network.train()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return network


def train(network, steps, optimizer):
    """Outputs of all steps, and the last one's gradients."""
    generator, outputs = torch.Generator().manual_seed(0), []
    dtype = next(network.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)  # of what networks drop at random
        output = network(torch.randn(2, 3, SIZE, SIZE, dtype=dtype, generator=generator))
        (output * torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output)).sum().backward()
        outputs.append(output.detach())
        optimizer.step()
    gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return torch.stack(outputs), gradients


def small():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, 2), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_gain_zero_is_frozen_batch_norm(family):
    original = pretrained(FAMILIES[family])
    converted = convert(original, statistics_batch_size=1)
    start_near_population(converted, gain=0.0)
    learned = dict(converted.named_parameters())
    priors = {name: learned[name].detach().clone() for name in converted.no_weight_decay()}
    images = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    for mode in MODES:
        assert_close(converted(images, statistics=mode), original(images), rtol=1e-10, atol=1e-10)
    wanted, wanted_gradients = train(frozen(original), 5, Adam(original.parameters(), lr=1e-5))
    given, gradients = train(converted.train(), 5, Adam(converted.parameters(), lr=1e-5))
    assert_close(given, wanted, rtol=1e-10, atol=1e-10)
    for name, gradient in wanted_gradients.items():
        assert_close(gradients[name], gradient, rtol=1e-8, atol=1e-10 * float(gradient.abs().max() + 1))
    for name, before in priors.items():
        assert torch.equal(learned[name], before), name
    for mode in MODES:
        assert_close(converted.eval()(images, statistics=mode), original.eval()(images), rtol=1e-10, atol=1e-10)


def test_gain_one_is_batch_norm_with_an_initial_belief():
    original = pretrained(FAMILIES["resnet"])
    converted = convert(original)
    start_near_population(converted, gain=1.0)
    prove(original, converted, torch.randn(4, 3, 64, 64))


def test_population_variances_below_eps_are_kept():
    converted = convert(pretrained(small, torch.float32))
    start_near_population(converted, gain=0.0)
    norm = next(m for m in converted.modules() if isinstance(m, BatchKalmanNorm2d))
    assert 0 < norm.running_var[0] < norm.eps
    assert norm.running_var[1] == 0 == norm.process_noise[1]
    assert_close(norm.process_noise, norm.running_var, rtol=1e-5, atol=0)
    assert_close(norm.center, norm.running_mean, rtol=0, atol=0)


def test_an_initial_belief_is_a_prediction_with_a_of_zero():
    first = BatchKalmanNorm2d(4, initial_belief=True, dtype=torch.float64)
    above = BatchKalmanNorm2d(4, 2, dtype=torch.float64)
    above.set_center(torch.zeros(4))
    with torch.no_grad():
        for layer in (first, above):
            layer.center.copy_(torch.linspace(-1, 1, 4))
            layer.raw_process_noise.copy_(torch.linspace(-2, 2, 4))
            layer.set_gain(0.3)
    x = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    prior = bkn_zoo.norms.Belief(torch.randn(3, 2).double(), torch.rand(3, 2).double())
    statistics = bkn_zoo.norms.Statistics("batch", 2)
    results = [first(x, None, statistics), above(x, prior, statistics)]
    assert_close(*results)
    for y, belief in results:
        (y.sin().sum() + belief.mean.sin().sum() + belief.var.sum()).backward()
    for name in ("center", "raw_process_noise", "raw_gain", "weight"):
        assert_close(getattr(first, name).grad, getattr(above, name).grad)
    assert_close(first.running_var, above.running_var)
    assert "initial_belief=True" in repr(first)


def test_an_initial_belief_is_refused_above_another_layer():
    with pytest.raises(InputError, match="initial_belief=True needs a first layer"):
        BatchKalmanNorm2d(4, 3, initial_belief=True)


@pytest.mark.parametrize("initial_belief", [True, False])
def test_the_initial_gain_is_that_of_every_layer(initial_belief):
    model = bkn_zoo.create_model("inception_cifar_bkn", initial_gain=0.3, initial_belief=initial_belief)
    priors = [norm for norm in model.modules() if isinstance(norm, BatchKalmanNorm) and norm.has_prior]
    assert priors
    assert all(norm.gain.item() == pytest.approx(0.3) for norm in priors)


@pytest.mark.parametrize("shared", [True, False])
def test_a_zoo_network_asks_for_an_initial_belief(shared, tmp_path):
    options = {"initial_belief": True, "initial_gain": 0.3, "shared_process_noise": shared}
    model = bkn_zoo.create_model("inception_cifar_bkn", num_classes=3, **options)
    norms = [module for module in model.modules() if isinstance(module, BatchKalmanNorm)]
    assert all(norm.has_prior and norm.gain.item() == pytest.approx(0.3) for norm in norms)
    assert len({id(norm.raw_process_noise) for norm in norms}) == (1 if shared else len(norms))
    model.statistics_batch_size = 1
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(norm.center is None or norm.center.grad.any() for norm in norms)
    bkn_zoo.save_pretrained(model.eval(), tmp_path / "network", label_names=list("abc"))
    again = bkn_zoo.from_pretrained(tmp_path / "network")
    images = torch.randn(2, 3, 32, 32)
    for mode in MODES:
        assert_close(again(images, mode), model(images, mode), rtol=0.02, atol=0.02)


def test_without_the_option_states_have_the_names_they_had():
    names = BatchKalmanNorm2d(4).state_dict().keys(), BatchKalmanNorm2d(4, 3).state_dict().keys()
    buffers = ["running_mean", "running_var", "image_mean", "image_var", "image_spread", "num_batches_tracked"]
    assert list(names[0]) == ["weight", "bias", *buffers]
    assert list(names[1]) == ["weight", "bias", "transition", "raw_process_noise", "raw_gain", *buffers]


def test_an_initial_belief_is_saved_and_loaded(tmp_path):
    network = bkn_zoo.create_model("timm:test_resnet", num_classes=3)
    network.statistics_batch_size = 2
    with torch.no_grad():
        network.train()(1 + torch.randn(4, 3, SIZE, SIZE))
    start_near_population(network.eval(), gain=0.3)
    bkn_zoo.save_pretrained(network, tmp_path / "network", label_names=list("abc"))
    stored = bkn_zoo.from_pretrained(tmp_path / "network")
    again = bkn_zoo.create_model("timm:test_resnet", num_classes=3).eval()
    again.load_state_dict(stored.state_dict())
    again.statistics_batch_size = 2
    gains = [norm.gain.item() for norm in stored.modules() if isinstance(norm, BatchKalmanNorm2d)]
    assert gains == pytest.approx([0.3] * 15)
    images = torch.randn(2, 3, SIZE, SIZE)
    for mode in MODES:
        assert_close(again(images, mode), stored(images, mode), rtol=0, atol=0)
        assert_close(stored(images, mode), network(images, mode), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("gain", "name"), [(0.0, "torch"), (0.3, "torch"), pytest.param(0.0, "openvino", marks=needs_openvino)]
)
def test_an_initial_belief_is_run_by_engines(gain, name):
    converted = convert(pretrained(small, torch.float32), statistics_batch_size=2).eval()
    start_near_population(converted, gain=gain)
    engine, images = create_engine(converted, name), torch.randn(2, 3, 16, 16)
    for mode in MODES:
        assert_close(engine(images, mode), converted(images, statistics=mode), rtol=1e-4, atol=1e-5)
        if gain == 0:
            assert_close(engine(images, mode), converted(images), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="Triton is not installed on this platform")
@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_an_initial_belief_runs_on_the_kernels(gain):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    converted = convert(pretrained(small, torch.float32), statistics_batch_size=2).to(device)
    start_near_population(converted, gain=gain)
    images = torch.randn(4, 3, 16, 16, device=device)
    results = []
    for implementation in ("triton", "pytorch"):
        network = copy.deepcopy(converted).train()
        with kernels.use(implementation):
            network(images).square().sum().backward()
            outputs = [network.eval()(images, statistics=mode).detach() for mode in MODES]
        results.append([*outputs, *(parameter.grad for parameter in network.parameters()), *network.buffers()])
    assert_close(*results, rtol=1e-4, atol=1e-5)
    if gain == 0:
        own = {name: p.grad for name, p in network.named_parameters() if name in network.no_weight_decay()}
        assert not any(gradient.any() for gradient in own.values())


# Gains that learn

CHANNELS = 64


def learned_gain(norm, optimizer, shift):
    """q after 300 steps in which the belief's mean should become the domain's: best at q = nT / (nT + V)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        mean = shift**0.5 * torch.randn(1, CHANNELS, 1, 1, generator=generator)
        images = mean + 0.5 * torch.randn(2, CHANNELS, 1, 1, generator=generator)
        images = images + torch.randn(2, CHANNELS, 4, 4, generator=generator)
        optimizer.zero_grad()
        _, belief = norm(images, None, Statistics("batch", 2))
        (belief.mean - mean.flatten(1)).square().mean().backward()
        optimizer.step()
    return norm.gain.item()


def at_a_low_gain(norm):
    norm.set_center(torch.zeros(CHANNELS))
    norm.center.requires_grad_(False)
    norm.set_gain(LEARNING_GAIN)
    return norm


@pytest.mark.parametrize(
    ("optimizer", "shift"), [(lambda gain: torch.optim.SGD(gain, 0.1, 0.9), 0.5), (lambda gain: Adam(gain, 0.03), 0.02)]
)
def test_a_low_gain_learns_its_best_value(optimizer, shift):
    norm = at_a_low_gain(BatchKalmanNorm2d(CHANNELS, centered=True))
    best = 2 * shift / (2 * shift + 0.25 + 1 / 16)
    assert learned_gain(norm, optimizer([norm.raw_gain]), shift) == pytest.approx(best, rel=0.15)


def test_a_low_gain_moves_at_the_learning_rate_of_fine_tuning():
    scaled, usual = BatchKalmanNorm2d(CHANNELS, centered=True), BatchKalmanNorm2d(CHANNELS, initial_belief=True)
    gains = [
        learned_gain(norm, torch.optim.SGD([norm.raw_gain], 0.01, 0.9), 0.125)
        for norm in map(at_a_low_gain, (scaled, usual))
    ]
    assert gains[0] == pytest.approx(0.444, rel=0.15)
    assert gains[1] < 0.015  # with the logit's own gradient


def photographs(batches=6):
    """Batches of images that differ in brightness and contrast, which `sample` statistics would take away."""
    generator = torch.Generator().manual_seed(2)
    shape = batches, 8, 3, 1, 1
    brightness, contrast = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) + 0.5
    return list(brightness + contrast * torch.randn(batches, 8, 3, 16, 16, generator=generator))


def known(images):
    """A network whose population is that of these images."""
    network = small()
    bkn_zoo.recalibrate(network, images)
    return network.eval()


def error(network, images, mode):
    with torch.no_grad():
        return float(sum(relative_error(network(x, statistics=mode), network(x)) for x in images)) / len(images)


def test_statistics_are_learned_without_labels():
    images = photographs()
    network = convert(known(images), statistics_batch_size=4)
    start_near_population(network, gain=0.3)
    before, outputs = error(network, images, "sample"), [network(x) for x in images]
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    requires = [parameter.requires_grad for parameter in network.parameters()]
    losses = bkn_zoo.learn_statistics(network.train(), [(x, 0) for x in images], epochs=15, lr=0.01, gain=0.3)
    assert network.training
    assert [parameter.requires_grad for parameter in network.parameters()] == requires
    network.eval()
    assert error(network, images, "sample") < 0.3 * before
    assert error(network, images, "expected") < 0.3 * before
    assert losses[-1] < 0.3 * losses[0]
    own = network.no_weight_decay()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state[name]) == (name not in own), name
    for x, output in zip(images, outputs, strict=True):
        assert torch.equal(network(x), output)


def test_jitter_changes_the_student_s_images_alone():
    images = photographs(2)
    network = convert(known(images))
    seen = []
    network.get_submodule("0").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    bkn_zoo.learn_statistics(network, images, epochs=1, jitter=lambda x: 0.5 * x)
    for number, x in enumerate(seen):  # a teacher's, then a student's
        assert torch.equal(x, images[number // 2] * (0.5 if number % 2 else 1.0))


def test_learning_that_cannot_be_is_refused():
    images = photographs(2)
    network = convert(known(images))
    with pytest.raises(InputError, match="a gain between 0 and 1"):
        bkn_zoo.learn_statistics(network, images, gain=0.0)
    with pytest.raises(InputError, match="pass a list or a DataLoader"):
        bkn_zoo.learn_statistics(network, iter(images), epochs=2)
    with pytest.raises(InputError, match="the loss is nan"):
        bkn_zoo.learn_statistics(network, [x * float("nan") for x in images])
