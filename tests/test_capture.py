"""Training steps and inference in CUDA graphs, and compiled: the same as launched one kernel at a time."""

import copy
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu import DEVICE as NAME
from gpu import GPU, gpu_only
from torch.testing import assert_close

import bkn_zoo
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.norms import MODES
from bkn_zoo.training.augmentation import Batch
from bkn_zoo.training.capture import captured, side_stream
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import begin
from bkn_zoo.training.step import make_step

DEVICE = torch.device(NAME)


def network(name="inception_cifar_bkn", group=2, **options):
    torch.manual_seed(0)
    model = bkn_zoo.create_model(name, **options).to(DEVICE).to(memory_format=torch.channels_last)
    model.statistics_batch_size = group
    return model


def batches(count, size=16):
    source = torch.Generator().manual_seed(0)
    images = torch.randn(count, size, 3, 32, 32, generator=source)
    labels = torch.randint(10, (count, size), generator=source)
    return [(x.to(DEVICE), y.to(DEVICE)) for x, y in zip(images, labels, strict=True)]


def test_side_stream_is_awaited_after_an_error(monkeypatch):
    waited = []
    streams = {name: SimpleNamespace(wait_stream=lambda other, name=name: waited.append(name)) for name in "ab"}
    monkeypatch.setattr(torch.cuda, "Stream", lambda: streams["b"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams["a"])
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    with pytest.raises(ZeroDivisionError), side_stream():
        raise ZeroDivisionError
    assert waited == ["b", "a"]


def train(how, steps=20, **options):
    """Losses of each step, with a learning rate that changes, and the network."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    model = network(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05, device=DEVICE), momentum=0.9, fused=True)
    mode = how if how == "reduce-overhead" else None
    run = model if how == "launched" else torch.compile(model, mode=mode, fullgraph=True)
    losses = []
    for number, (images, labels) in enumerate(batches(2) * (steps // 2)):
        optimizer.param_groups[0]["lr"].fill_(0.05 * (1 - number / steps))
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), model


@gpu_only
@pytest.mark.parametrize("how", ["compiled", "reduce-overhead"])
@pytest.mark.parametrize("options", [{}, {"standardized_weights": True, "transition_rank": 16}], ids=["", "compact"])
def test_twenty_compiled_steps_are_the_same_as_launched_ones(how, options):
    """test_fit.py compares captured ones."""
    torch._dynamo.reset()
    (losses, model), (expected, launched) = train(how, **options), train("launched", **options)
    assert expected[-1] < 0.9 * expected[0]
    assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    for (name, buffer), other in zip(model.named_buffers(), launched.buffers(), strict=True):
        assert (buffer - other).double().norm() <= 2e-2 * other.double().norm(), name
    assert model.conv.norm.num_batches_tracked == 20


@pytest.mark.parametrize("odd", [False, pytest.param(True, marks=gpu_only)])
def test_steps_that_cannot_be_replayed_are_launched(odd, monkeypatch):
    """Steps on a CPU, and batches of another size than the captured one."""
    seen = []

    def step(images):
        seen.append(len(images))
        return images.sum()

    monkeypatch.setattr("bkn_zoo.training.capture.EAGER_STEPS", 1)
    take = captured(step)
    full = torch.ones(4, device=DEVICE)
    results = [take(full) for _ in range(4)] + [take(full[:3] if odd else full)]
    assert [result.item() for result in results] == [4, 4, 4, 4, 3 if odd else 4]
    assert seen == ([4, 4, *([3] if odd else [])] if GPU else [4] * 5)


@gpu_only
def test_a_capture_that_failed_is_tried_again(monkeypatch):
    fails = [True]

    def step(numbers):
        if torch.cuda.is_current_stream_capturing() and fails.pop():
            raise MemoryError("no room")
        return numbers.sum()

    monkeypatch.setattr("bkn_zoo.training.capture.EAGER_STEPS", 1)
    take = captured(step)
    full = torch.full((4,), 0.5, device=DEVICE)
    take(full)
    with pytest.raises(MemoryError):
        take(full)
    fails.append(False)
    assert [take(full).item(), take(2 * full).item(), take(full.double()).dtype] == [2, 4, torch.float64]


@gpu_only
def test_a_step_of_several_processes_is_captured():
    """One process in a group of one: its gradients and running averages still go through NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    recipe = Recipe(
        model="inception_cifar_bkn", dataset="cifar10", epochs=1, gradient_batch=16, statistics_batch_size=2,
        graph=True, precision="float32", micro_batch=8, ema=0.9,
    )  # fmt: skip
    rows = [Batch(images, F.one_hot(labels, 10).float()) for images, labels in batches(16)]

    def losses():
        training = begin(recipe, network(), DEVICE)
        for group in training.optimizer.param_groups:
            group["lr"].fill_(0.05)
        step = make_step(training, recipe, DEVICE)
        return torch.stack([step(row) for row in rows]).cpu(), copy.deepcopy(training.result)

    expected, alone = losses()
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        found, together = losses()
    finally:
        dist.destroy_process_group()
    assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(together.buffers(), alone.buffers(), strict=True):
        assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


@gpu_only
@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["inception_cifar_bkn", "inception_cifar_bn", "inception_cifar_gn"])
def test_the_engine_replays_what_the_network_computes(name, mode, precision):
    """Any number of images: those that a graph was captured for, fewer, and more than the largest one takes."""
    model = network(name)
    for images, _ in batches(3):
        model(images)
    model.eval()
    engine = create_engine(model, "torch", "cuda", precision)
    images = torch.cat([images for images, _ in batches(3)])
    tolerance = 2e-3 if precision == "f32" else 5e-2  # convolutions in f32 may take tf32, each graph another way
    with torch.inference_mode():
        expected = model(images, statistics=mode)
    scale = expected.abs().max().item()
    for count in (1, 3, 32, 45, 2):
        logits = engine(images[:count], mode)
        assert_close(logits / scale, expected[:count] / scale, rtol=0, atol=tolerance)


@gpu_only
def test_threads_share_an_engine_and_mix_modes():
    model = network().eval()
    engine = create_engine(model, "torch", "cuda")
    images = torch.cat([images for images, _ in batches(2)])
    with torch.inference_mode():
        expected = {mode: model(images, statistics=mode) for mode in MODES}

    def ask(mode):
        with torch.cuda.stream(torch.cuda.Stream()):
            for count in (1, 5, 32) * 4:
                logits = engine(images[:count], mode)
                torch.cuda.current_stream().synchronize()
                assert (logits - expected[mode][:count]).abs().max() <= 2e-3 * expected[mode].abs().max()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, MODES * 2))
