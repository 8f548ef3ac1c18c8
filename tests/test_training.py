"""The small network trains: it learns, its shared process noise learns, and it compiles."""

import copy
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from shallow import shallow
from torch.testing import assert_close

from bkn_zoo import create_model
from bkn_zoo.models.registry import NORMS
from bkn_zoo.norms import BatchKalmanNorm2d
from bkn_zoo.norms.statistics import observe, pool

CLASSES = 4
# Without a C++ compiler on the machine, inductor cannot run; the graph is captured and differentiated all the same.
BACKEND = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


def gratings(count, pixels=8):
    """Stripes whose direction is the class, of random phase and brightness, under noise."""
    labels = torch.arange(count) % CLASSES
    angle = labels * math.pi / CLASSES
    y, x = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    along = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
    stripes = torch.sin(1.5 * along + 2 * math.pi * torch.rand(count, 1, 1))[:, None]
    return stripes + torch.randn(count, 1, 1, 1) + 0.5 * torch.randn(count, 3, pixels, pixels), labels


def linked(model):
    """Norms that have a layer below."""
    return [module for module in model.modules() if isinstance(module, BatchKalmanNorm2d) and module.prior_features]


@pytest.mark.parametrize(("group", "mode"), [(1, "sample"), (2, "expected")])
def test_small_network_fits_64_images_with_tiny_groups(group, mode):
    """(16, 1) and (16, 2): 16 images a gradient step, normalized alone or in pairs."""
    images, labels = gratings(64)
    model = create_model("inception_cifar_bkn", num_classes=CLASSES)
    model.statistics_batch_size = group
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    accuracies = []
    while len(accuracies) < 16 and (not accuracies or accuracies[-1] <= 0.95):
        for rows in torch.randperm(64).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(images[rows]), labels[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracies.append((model.eval()(images, statistics=mode).argmax(1) == labels).float().mean().item())
    assert accuracies[-1] > 0.95, accuracies
    assert max(abs(norm.gain.item() - 0.5) for norm in linked(model)) > 1e-3


def test_shared_process_noise_is_one_parameter_and_trains():
    model = create_model("inception_cifar_bkn", num_classes=CLASSES)
    norms = linked(model)
    noise = norms[0].raw_process_noise
    assert all(norm.raw_process_noise is noise for norm in norms)
    assert noise.numel() == sum(parameter is noise for parameter in model.parameters()) == 1
    assert_close(norms[0].process_noise, torch.ones(1))

    images, labels = gratings(8)
    model.statistics_batch_size = 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images), labels).backward()
    assert noise.grad.abs().item() > 0
    optimizer.step()
    assert all(norm.process_noise.item() != pytest.approx(1.0, abs=1e-7) for norm in norms)
    assert copy.deepcopy(model).inception_a.branches[0][0].norm.raw_process_noise.item() == noise.item()


def test_unshared_process_noise_is_each_layers_own():
    norms = linked(create_model("inception_cifar_bkn", shared_process_noise=False))
    assert len({id(norm.raw_process_noise) for norm in norms}) == len(norms)
    assert all(norm.process_noise.shape == (norm.num_features,) for norm in norms)


def test_compiled_network_trains_and_infers_as_the_eager_one():
    torch._dynamo.reset()
    images, labels = gratings(4)
    eager = shallow(NORMS["bkn"](), CLASSES)  # compiling takes long
    eager.statistics_batch_size = 2
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # inductor takes minutes over the backward
    losses = [F.cross_entropy(network(images), labels) for network in (eager, compiled)]
    for loss in losses:
        loss.backward()
    assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for (name, expected), actual in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # in `expected` mode, which has every step that the others have
        outputs = [network.eval()(images, statistics="expected") for network in (eager, compiled)]
    assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_compiled_statistics_of_one_group_have_gradients():
    """For any number of images. The statistics alone, since inductor takes its time."""
    torch._dynamo.reset()

    def loss(x):
        belief = pool(observe(x), 2)
        return (belief.mean.sin() + belief.var).square().sum()

    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    compiled = torch.compile(loss, dynamic=True, backend=BACKEND)
    with torch._inductor.config.patch(compile_threads=1):  # else it starts processes, each of which imports PyTorch
        actual, expected = (torch.autograd.grad(function(x), x)[0] for function in (compiled, loss))
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)
