"""Engines that run a network at inference, with PyTorch or OpenVINO."""

import operator
import platform
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.cores import check_device, usable_cores
from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.inference import ENGINES, PRECISIONS
from bkn_zoo.inference.folding import frozen, in_float32, in_precision, prepare
from bkn_zoo.inference.graph_cache import PRECISION, graph_options, native
from bkn_zoo.inference.openvino_graph import Graph, build_graph, compiled, ov
from bkn_zoo.models.network import BeliefNetwork, Network
from bkn_zoo.modes import Statistics, choose_statistics
from bkn_zoo.norms.running import RunningNorm, refuse_single_values
from bkn_zoo.progress import waiting

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
KEPT = 12  # cached networks or graphs per engine; OpenVINO needs one for each mode and image size
# In f16. OpenVINO on Arm also sums rows in f16, and 112 times twice this fits.
LARGEST_STATISTIC = 250.0
# PyTorch's count of the changes of a tensor.
CHANGES = operator.attrgetter("_version")
USUAL_SIDE = 224  # of images, if a converted network's checkpoint does not define it

SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes of captured graphs. Other batches are padded to the next size, and larger ones are split."""

_capturing = threading.Lock()
"""A lock for all engines: a capture begins with a synchronization, which would break another capture."""

Prepared = TypeVar("Prepared")


def create_engine(
    model: BeliefNetwork, engine: str = "auto", device: str = "cpu", precision: str = "f32", streams: int = 1
) -> "Engine":
    """Create an engine for `model`: `engine(images, statistics)` returns logits.

    Args:
        model: a network of the zoo, or from `bkn_zoo.convert`, converted as a whole, with images as input and one
            output tensor.
        engine: "torch", "openvino", or "auto" for the fastest installed one: PyTorch for converted networks whose code
            OpenVINO cannot run.
        device: "cpu", or "cuda" for PyTorch.
        precision: "f32", "f16", "bf16", or "auto" for the fastest of the hardware: 16 bits on a GPU, and with OpenVINO
            on processors that support it. Statistics and beliefs stay float32 with PyTorch; with OpenVINO they do not.
        streams: images that OpenVINO runs at once, each on its share of the cores. This gives more images per second,
            but each takes longer. At most one per core, limited by a CPU quota.
    """
    if engine not in ENGINES:
        raise UnknownNameError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}.")
    if not isinstance(model, BeliefNetwork):
        kind = type(model).__name__
        raise InputError(f"engines do not support a {kind}: pass a network of the zoo, or one from bkn_zoo.convert.")
    check_device(device)
    if type(streams) is not int or streams < 1:
        raise InputError(f"streams is {streams!r}: choose a whole number of at least 1.")
    if engine == "auto":
        possible = ov is not None and torch.device(device).type == "cpu"
        possible = possible and (streams > 1 or model.foldable is None or _writes_its_graph(model))
        engine = "openvino" if possible else "torch"
    if engine == "openvino":
        return OpenVINOEngine(model, device, precision, streams)
    if streams != 1:
        raise InputError("streams need OpenVINO: choose engine='openvino' and device='cpu', or omit streams.")
    return TorchEngine(model, device, precision)


class Weights:
    """The modules and tensors of a model when this was created, to notice later changes."""

    def __init__(self, model: nn.Module) -> None:
        places = [place for m in model.modules() for place in (m._parameters, m._buffers, m._modules) if place]
        end = (object(),)  # so that an entry more or less is noticed, too
        self._places = [*(place.values() for place in places), end]
        self._kept = list(chain.from_iterable(self._places))
        self._tensors = list({id(each): each for each in self._kept if isinstance(each, Tensor)}.values())
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._changes = sum(map(CHANGES, self._counted))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Keeps the memory, so that graphs may still use it, and no new tensor gets its address.
        self._memory = [tensor.detach() for tensor in self._tensors]

    def changed(self) -> bool:
        """Whether a module, a tensor or its `.data` was replaced, or a tensor changed in place."""
        same = all(map(operator.is_, self._kept, chain.from_iterable(self._places)))
        same = same and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        return not same or sum(map(CHANGES, self._counted)) != self._changes


class Engine:
    """Runs a network. Each mode is prepared at its first use. Threads may share an engine and use different modes.

    The engine shares unchanged weights with the model. If the model changes, by training, other weights or other
    modules, the engine prepares it again; do not use the engine while the model changes. Call `refresh` after changes
    that PyTorch does not count: in place through `.data`, of a tensor made in inference mode, by a captured step, or by
    a fused optimizer, unless running averages change, too.

    Attributes:
        watched: whether each call looks for changes. For ResNet101 on two Arm cores, this adds 0.2 to 1.5 ms to calls
            that take 15 to 166 ms. The service sets it to False, because its models never change.
    """

    name: str
    streams = 1
    watched = True
    # Where OpenVINO stores the graph for the next start, if only one mode and size is used.
    stored: Path | None = None
    _fastest_precision: Callable[[], str]
    _run: Callable[[Tensor, Statistics], Tensor]

    def __init__(self, model: BeliefNetwork, device: str = "cpu", precision: str = "f32") -> None:
        if precision not in PRECISIONS:
            raise UnknownNameError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}.")
        self.model: Any = model
        self.device = torch.device(device)
        self.chooses = precision == "auto"
        self.precision = self._fastest_precision() if self.chooses else precision
        self.dtype = DTYPES[self.precision]
        self._weights = Weights(model)
        self._prepared: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}

    def __call__(self, images: Tensor, statistics: Statistics | str | None = None) -> Tensor:
        """Logits in float32, (images, classes), or another output of a converted network for each image.

        Args:
            images: (images, 3, height, width), preprocessed; any number and any size that the network supports.
            statistics: "population", "sample" or "expected"; by default that of the model.
        """
        model = self.model
        if isinstance(model, Network):
            model._check(images)
        elif images.ndim != 4 or not images.is_floating_point():
            raise InputError(
                f"images must be (images, channels, height, width) in floating point, but these are "
                f"{tuple(images.shape)} in {images.dtype}."
            )
        chosen = choose_statistics(False, statistics, model.statistics_batch_size, model.default_statistics)
        if len(images) == 0:
            return self(images.new_zeros(1, *images.shape[1:]), chosen)[:0]
        with torch.inference_mode():
            return self._run(images, chosen)

    def refresh(self) -> None:
        """Prepare the model again when it is used next."""
        with self._lock:
            self._prepared.clear()
            self._weights = Weights(self.model)
            self.stored = None

    def precision_at(self, mode: str) -> str:
        """The precision of a statistics mode. With precision="auto", it can differ from `precision`."""
        return self.precision

    def _outdated(self) -> bool:
        """Whether the model has changed. Then it is prepared again."""
        weights = self._weights
        if not (self.watched and weights.changed()):
            return False
        if weights is self._weights:  # no other thread was faster
            self.refresh()
        return True

    def _once(self, key: Any, prepare: Callable[[], Prepared]) -> Prepared:
        """The cached result of `prepare` for `key`. If there are too many, the oldest is removed."""
        found = self._prepared.get(key)
        if found is None:
            with self._locks.setdefault(key, threading.Lock()):  # threads may prepare different modes at the same time
                found = self._prepared.get(key)
                if found is None:
                    weights = self._weights
                    with waiting(f"preparing {getattr(self.model, 'name', 'the network')}"):
                        found = prepare()
                    with self._lock:
                        if weights is self._weights:  # otherwise the model has changed meanwhile
                            if len(self._prepared) == KEPT:
                                del self._prepared[next(iter(self._prepared))]
                            self._prepared[key] = found
        return found


class TorchEngine(Engine):
    """PyTorch, on a CPU, or on a GPU with CUDA graphs; in channels_last, if the network supports it."""

    name = "torch"
    layout = torch.channels_last

    def _fastest_precision(self) -> str:
        if self.device.type == "cuda":
            return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "f16"
        return "f32"  # on a CPU, converting to float32 for every norm costs what faster convolutions gain

    def _run(self, images: Tensor, statistics: Statistics) -> Tensor:
        if self.device.type == "cpu":
            self._outdated()
        try:
            logits = self._run_in(self.layout, images, statistics)
        except RuntimeError as error:
            # Foreign networks may flatten features with `.view`, which fails in channels_last.
            if self.layout == torch.contiguous_format or "view size is not compatible" not in str(error):
                raise
            logits = self._run_in(torch.contiguous_format, images, statistics)
            self.layout = torch.contiguous_format
        # A GPU is still running.
        return self._run_in(self.layout, images, statistics) if logits.is_cuda and self._outdated() else logits

    def _run_in(self, layout: torch.memory_format, images: Tensor, statistics: Statistics) -> Tensor:
        network = self._once((_shared_by(statistics), layout), lambda: self._prepare(statistics, layout))
        # Foreign networks may change their input in place, and it belongs to the caller. A graph has its own images.
        copied = self.model.foldable is not None and self.device.type == "cpu"
        images = images.to(self.device, self.dtype, copy=copied, memory_format=layout)
        if not images.is_cuda:
            return in_float32(network(images, statistics=statistics))
        key = statistics, layout, images.shape[2:]
        return self._once(key, lambda: Captured(network, statistics, images, layout))(images)

    def _prepare(self, statistics: Statistics, layout: torch.memory_format) -> Any:
        # On a GPU, the fused kernels of the norms are the fastest way to compute statistics of the image.
        fused = statistics.mode != "population" and self.device.type == "cuda"
        network = frozen(self.model) if fused else prepare(self.model, statistics)
        return in_precision(network, self.dtype).to(self.device).to(memory_format=layout)


class Captured:
    """One network for images of one size, with a graph for each of `SIZES`. They share memory, so they run in turns."""

    def __init__(self, network: nn.Module, statistics: Statistics, images: Tensor, layout: torch.memory_format) -> None:
        self.network, self.statistics = network, statistics
        like = images[:1].contiguous(memory_format=layout)
        self.images = torch.empty_like(like.expand(SIZES[-1], *like.shape[1:]), memory_format=layout)
        self.images.copy_(like)
        self.stream, self.pool = torch.cuda.Stream(images.device), torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.lock = threading.Lock()

    def __call__(self, images: Tensor) -> Tensor:
        caller = torch.cuda.current_stream(images.device)
        with self.lock, torch.cuda.device(images.device):
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                logits = torch.cat([self._replay(part) for part in images.split(SIZES[-1])])
            caller.wait_stream(self.stream)
        images.record_stream(self.stream)
        logits.record_stream(caller)
        return logits

    def _replay(self, images: Tensor) -> Tensor:
        count = len(images)
        size = next(size for size in SIZES if size >= count)
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        graph, logits = self.graphs[size]
        self.images[:count].copy_(images)
        graph.replay()
        return logits[:count].clone()

    def _capture(self, size: int) -> tuple[Any, Tensor]:
        images = self.images[:size]
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            # Compiles kernels, and chooses algorithms.
            self.network(images, statistics=self.statistics)
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                logits = in_float32(self.network(images, statistics=self.statistics))
        return graph, logits


class OpenVINOEngine(Engine):
    """OpenVINO on a CPU. It runs as many images of a batch at once as it has streams, because batches gain nothing."""

    name = "openvino"

    def __init__(self, model: BeliefNetwork, device: str = "cpu", precision: str = "f32", streams: int = 1) -> None:
        if ov is None:
            raise InputError("the OpenVINO engine needs openvino: install it with pip install 'bkn-zoo[openvino]'.")
        if torch.device(device).type != "cpu":
            raise InputError(f"OpenVINO supports only device='cpu', not {device!r}: choose engine='torch'.")
        super().__init__(model, device, precision)
        if self.precision == "bf16" and "BF16" not in native():
            raise InputError("OpenVINO has no bf16 on this processor: choose precision='f32'.")
        self.streams = min(streams, usable_cores())

    def _fastest_precision(self) -> str:
        if "BF16" in native():
            return "bf16"
        # Other processors than Arm also list FP16, but are slower with it than with f32.
        return "f16" if "FP16" in native() and platform.machine() in ("aarch64", "arm64") else "f32"

    def _run(self, images: Tensor, statistics: Statistics) -> Tensor:
        graph = self._once((_shared_by(statistics), images.shape[2:]), lambda: self._compile(images.shape, statistics))
        if statistics.mode == "sample" and graph.single:
            refuse_single_values(images[:, :, :1, :1], 1, training=False)
        own = 1 / (statistics.group or 1) if statistics.mode == "expected" else 1.0
        first, *others = images.detach().to("cpu", torch.float32).split(self.streams)
        started = graph.start(first, own)
        outdated = self._outdated()  # while the first images run
        logits = graph.finish(started)
        return self._run(images, statistics) if outdated else torch.cat([logits, *(graph(p, own) for p in others)])

    def _compile(self, shape: torch.Size, statistics: Statistics) -> Graph:
        precision = self.precision_at(statistics.mode)
        options = graph_options() | {PRECISION: precision}
        if self.streams > 1:
            options["NUM_STREAMS"] = self.streams
        network = prepare(self.model, statistics, as_stored=True).cpu()
        try:
            built, single = build_graph(network, shape[1:], statistics.mode == "population", options)
        except InputError:
            raise
        except Exception as error:  # runs the code of a converted network on a symbol, which can fail in any way
            raise InputError(f"OpenVINO cannot run this network ({error}): choose engine='torch'.") from error
        return Graph(compiled(built, options, None if single else self.stored), single)

    def precision_at(self, mode: str) -> str:
        """The engine's precision, unless it chose f16 itself and f16 cannot represent an image's statistics."""
        where = too_large_for_f16(self.model, mode) if self.precision == "f16" else None
        if where is not None and not self.chooses:
            raise InputError(
                f"means or variances at {where} are too large for f16 in OpenVINO: choose precision f32, engine torch "
                "or statistics population."
            )
        return self.precision if where is None else "f32"


def too_large_for_f16(model: BeliefNetwork, mode: str) -> str | None:
    """The first norm whose statistics OpenVINO cannot compute in f16 in this mode, by name; None if there is none."""
    mode = choose_statistics(False, mode, model.statistics_batch_size).mode
    for name, norm in model.named_modules():
        if mode != "population" and isinstance(norm, RunningNorm) and norm.has_averages:
            means, variances = norm.running_mean.abs(), torch.maximum(norm.running_var, norm.image_var)
            if torch.maximum(means, variances).max() > LARGEST_STATISTIC:
                return name
    return None


def _writes_its_graph(model: BeliefNetwork) -> bool:
    """Whether the code of a converted network runs on a symbol instead of an image, which only a trial can show."""
    config: Any = getattr(model, "config", None)
    known = isinstance(config, Config) and config.preprocessing  # a network may have another kind of config
    side = config.preprocessing.size if known else USUAL_SIDE
    first: Any = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None:
        return False
    try:
        network = prepare(model, Statistics("population"), as_stored=True).cpu()
        with torch.inference_mode():
            build_graph(network, (first.in_channels, side, side), True, {})
    except Exception:  # any error of the network's own code
        return False
    return True


def _shared_by(statistics: Statistics) -> Statistics:
    """The key of a prepared network: one is for population statistics, one for those of an image."""
    return Statistics("population") if statistics.mode == "population" else Statistics("image", statistics.group)
