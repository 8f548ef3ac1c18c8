"""Networks train: they learn, their shared process noise learns, and their gradients compile."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from shallow import shallow
from torch.testing import assert_close

from bkn_zoo import create_model
from bkn_zoo.models.registry import NORMS
from bkn_zoo.norms import BatchKalmanNorm2d

CLASSES = 4


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


@pytest.mark.usefixtures("shallow_network")
@pytest.mark.parametrize(("group", "mode"), [(1, "sample"), (2, "expected")])
def test_network_fits_64_images_with_tiny_groups(group, mode):
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
    assert any(norm.gain.item() != 0.5 for norm in linked(model))


def test_process_noise_is_one_parameter_or_each_layers_own():
    model = create_model("inception_cifar_bkn", num_classes=CLASSES)
    noise = linked(model)[0].raw_process_noise
    assert all(norm.raw_process_noise is noise for norm in linked(model))
    assert noise.numel() == sum(parameter is noise for parameter in model.parameters()) == 1
    images, labels = gratings(8)
    F.cross_entropy(model(images), labels).backward()
    assert noise.grad.abs().item() > 0
    norms = linked(create_model("inception_cifar_bkn", shared_process_noise=False))
    assert len({id(norm.raw_process_noise) for norm in norms}) == len(norms)
    assert all(norm.process_noise.shape == (norm.num_features,) for norm in norms)


def test_compiled_gradients_equal_the_eager_ones():
    """test_compile.py compares outputs."""
    torch._dynamo.reset()
    images, labels = gratings(4)
    eager = shallow(NORMS["bkn"](), CLASSES)
    eager.statistics_batch_size = 2
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # inductor takes minutes over the backward
    for network in (eager, compiled):
        F.cross_entropy(network(images), labels).backward()
    for (name, expected), actual in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
