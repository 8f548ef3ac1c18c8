"""What all tests share: a fixed seed, and norms and networks away from the values at which they start."""

import dataclasses
import gc
import math
import os
import signal
from contextlib import suppress

gc.disable()  # until all is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported: lets test_kernels.py run them here
os.environ["BKN_ZOO_CACHE"] = "off"  # of all that the tests start, too

from shallow import shallow

from bkn_zoo import kernels
from bkn_zoo.models import registry
from bkn_zoo.models.inception import inception_cifar
from bkn_zoo.norms import BatchKalmanNorm, BatchKalmanNorm2d, BatchNorm2d, BatchRenorm2d, Belief, GroupNorm2d
from bkn_zoo.norms.running import RunningNorm

NORMS = {"bkn": BatchKalmanNorm2d, "bn": BatchNorm2d, "brn": BatchRenorm2d, "gn": GroupNorm2d}


SLOW = (
    "test_engines.py", "test_conversion.py", "test_readme.py", "test_practice.py", "test_models.py",
    "test_kernels.py", "test_service_edge.py", "test_prior.py", "test_engines_converted.py",
    "test_page.py", "test_training.py", "test_service_strangers.py", "test_checkpoints.py", "test_hub.py",
    "test_train.py", "test_fit.py", "test_service_workers.py", "test_service_load.py",
    "test_wheel.py", "test_service_bad_input.py", "test_layer.py", "test_export.py", "test_usability.py",
    "test_service.py", "test_batch.py", "test_pooling.py", "test_graph_cache.py",
    "test_cards.py", "test_images.py", "test_cli.py", "test_other_systems.py", "test_running.py", "test_libraries.py",
    "test_progress.py", "test_zoo.py", "test_layers.py", "test_studies.py", "test_report.py", "test_ray.py",
    "test_kalman.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Slow files go first, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


def pytest_collection_finish():
    """What is imported by now stays: to look through it again and again takes a tenth of all time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # or libraries would say at the end that it leaks


def pytest_configure():
    """Let Ctrl-C reach the tests and all that they start: a shell has what runs in the background ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        with suppress(ValueError):  # not the main thread, which alone may set handlers
            signal.signal(signal.SIGINT, signal.default_int_handler)


def hasten_triton_s_interpreter():
    """Leave out what takes it half of its time for nothing.

    It checks every sum of integers for overflow, and drops what it finds unless it debugs; and it looks through all of
    triton.language for what to replace whenever a kernel calls a function, as it did when the kernel was launched.
    A version that is made otherwise is left as it is.
    """
    from triton.runtime import interpreter

    try:
        builder, called = interpreter.interpreter_builder, interpreter.InterpretedFunction
        patch, rewrite = interpreter._patch_lang, interpreter.InterpretedFunction.rewrite
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
    except (AttributeError, TypeError):
        return
    builder.options = options
    prepared = set()

    def call(function, *arguments, **named):
        if function.fn not in prepared:
            patch(function.fn)
            prepared.add(function.fn)
        return rewrite(function)(*arguments, **named)

    called.__call__ = call


if kernels.HAS_TRITON and not torch.cuda.is_available():
    hasten_triton_s_interpreter()


@pytest.fixture(scope="module")
def shallow_network():
    """The small network has a few layers for the tests of a file, which make, train or compile it often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._networks, "inception_cifar", shallow)
        yield


@pytest.fixture
def whole_network(monkeypatch):
    """For a test in such a file that needs it as it is."""
    monkeypatch.setitem(registry._networks, "inception_cifar", inception_cifar)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@torch.no_grad()
def scatter(module):
    """Move the parameters of every norm off their starting values, which hide terms (A = 0, gamma = 1, beta = 0)."""
    for layer in module.modules():
        if isinstance(layer, RunningNorm | GroupNorm2d):
            layer.weight.add_(0.2 * torch.randn_like(layer.weight))
            layer.bias.add_(0.1 * torch.randn_like(layer.bias))
        if isinstance(layer, BatchKalmanNorm) and layer.prior_features is not None:
            for block in layer.transition_blocks:
                block.normal_(0, 0.5 / math.sqrt(layer.prior_features))
            layer.raw_process_noise.add_(0.3 * torch.randn_like(layer.raw_process_noise))
            layer.raw_gain.add_(0.3 * torch.randn_like(layer.raw_gain))


@torch.no_grad()
def remember_something(layer):
    """Give a layer running statistics other than those it starts with, and BRN a step at which its limits are wide."""
    if isinstance(layer, RunningNorm):
        for mean, var, least in (
            (layer.running_mean, layer.running_var, 0.5),
            (layer.image_mean, layer.image_var, 1.0),
        ):
            mean.normal_(0, 0.3)
            var.uniform_(least, least + 1.0)
        layer.image_spread.uniform_(0.1, 0.3)
    if isinstance(layer, BatchRenorm2d):
        layer.num_batches_tracked.fill_(layer.r_steps)


@pytest.fixture(scope="session")
def away_from_start():
    return scatter


@pytest.fixture(scope="session")
def make_norm():
    """Makes a norm of a kind ("bkn", "bn", "brn", "gn") with nothing at its starting value, in float64 unless told."""

    def make(kind, channels, below=None, dtype=torch.float64, **options):
        layer = NORMS[kind](channels, below, **options)
        scatter(layer)
        remember_something(layer)
        return layer.to(dtype)

    return make


@pytest.fixture(scope="session")
def make_belief():
    def make(groups, channels, dtype=torch.float64, requires_grad=False):
        mean, var = torch.randn(groups, channels, dtype=dtype), torch.rand(groups, channels, dtype=dtype) + 0.2
        return Belief(mean.requires_grad_(requires_grad), var.requires_grad_(requires_grad))

    return make


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder of two small checkpoints, called first and second."""
    from service_process import save_small_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_checkpoint(folder / "first")
    save_small_checkpoint(folder / "second", seed=1)
    return folder


@pytest.fixture(scope="session")
def service(checkpoints):
    """The service of these checkpoints, as a process."""
    from service_process import ServiceProcess

    with ServiceProcess(checkpoints) as process:
        yield process


@pytest.fixture(scope="module")
def local(checkpoints):
    """The service within this process, so that its engine can be slowed and killed."""
    from local_service import LocalService

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BKN_ZOO_CHECKPOINTS", str(checkpoints))
        with LocalService("--models", "first,second", "--queue-length", "256") as running:
            yield running
