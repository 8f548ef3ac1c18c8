"""One network, prepared for inference, run by PyTorch or by OpenVINO.

With population statistics every norm folds into the convolution before it. With those of the image (`sample`,
`expected`) the norms stay, rid of what does not depend on the image.
"""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.models.network import Network
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm2d
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.running import RunningNorm
from bkn_zoo.norms.statistics import Statistics, choose_statistics, finish, in_full_precision, observe

try:
    import openvino as ov
    from openvino import opset13 as ops
except ImportError:  # an optional extra
    ov = None

ENGINES = ("auto", "torch", "openvino")
PRECISIONS = {"f32": torch.float32, "f16": torch.float16}
KEPT = 12  # networks or graphs that an engine keeps; OpenVINO needs one for each mode and image size
LARGEST_VARIANCE = 1000.0  # in f16, where OpenVINO squares deviations in f16 too: eight standard deviations still fit

Prepared = TypeVar("Prepared")


def create_engine(model: Network, engine: str = "auto", device: str = "cpu", precision: str = "f32") -> "Engine":
    """What runs `model` at inference: `engine(images, statistics)` gives its logits.

    Args:
        engine: "torch", "openvino", or "auto" for the fastest that is installed.
        device: "cpu", or "cuda" for PyTorch.
        precision: "f32", or "f16", which is faster where the hardware has it and less exact. PyTorch keeps statistics
            and beliefs in float32 all the same; OpenVINO does not.
    """
    if engine not in ENGINES:
        raise UnknownNameError(f"unknown engine {engine!r}: choose one of {', '.join(ENGINES)}.")
    if engine == "auto":
        engine = "openvino" if ov is not None and torch.device(device).type == "cpu" else "torch"
    return (OpenVINOEngine if engine == "openvino" else TorchEngine)(model, device, precision)


class Engine:
    """Runs a network. Each mode is prepared when first used; threads may share an engine, and mix modes.

    The weights are those that the model has when a mode is first used: after further training, make a new engine.
    """

    def __init__(self, model: Network, device: str = "cpu", precision: str = "f32") -> None:
        if precision not in PRECISIONS:
            raise UnknownNameError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}.")
        self.model, self.device, self.dtype = model, torch.device(device), PRECISIONS[precision]
        self._prepared: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}

    def __call__(self, images: Tensor, statistics: str | None = None) -> Tensor:
        """Logits in float32, (images, classes).

        Args:
            images: (images, 3, height, width), preprocessed; any number, of any size that the network takes.
            statistics: "population", "sample" or "expected"; by default the model's own choice.
        """
        model = self.model
        model._check(images)
        chosen = choose_statistics(False, statistics, model.statistics_batch_size, model.default_statistics)
        if len(images) == 0:
            return torch.empty(0, model.num_classes, device=self.device)
        with torch.inference_mode():
            return self._run(images, chosen)

    def _run(self, images: Tensor, statistics: Statistics) -> Tensor:
        raise NotImplementedError

    def _once(self, key: Any, prepare: Callable[[], Prepared]) -> Prepared:
        """What `prepare` made when `key` was first asked for; the oldest gives way when there are too many."""
        found = self._prepared.get(key)
        if found is None:
            with self._locks.setdefault(key, threading.Lock()):  # threads may prepare different modes side by side
                found = self._prepared.get(key)
                if found is None:
                    found = prepare()
                    with self._lock:
                        if len(self._prepared) == KEPT:
                            del self._prepared[next(iter(self._prepared))]
                        self._prepared[key] = found
        return found


class TorchEngine(Engine):
    """PyTorch, on a CPU or a GPU, in channels_last."""

    def __init__(self, model: Network, device: str = "cpu", precision: str = "f32") -> None:
        super().__init__(model, device, precision)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device={device!r}, but PyTorch finds no GPU here: choose device='cpu'.")

    def _run(self, images: Tensor, statistics: Statistics) -> Tensor:
        network = self._once(statistics, lambda: self._prepare(statistics))
        images = images.to(self.device, self.dtype, memory_format=torch.channels_last)
        return network(images, statistics.mode).float()

    def _prepare(self, statistics: Statistics) -> Network:
        # On a GPU the norms' own fused kernels are the fastest way to `sample`.
        fused = statistics.mode == "sample" and self.device.type == "cuda"
        network = _frozen(self.model) if fused else prepare(self.model, statistics)
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm | FoldedNorm):
                module.to(self.dtype)  # the other norms stay in float32, as all statistics do
        return network.to(self.device).to(memory_format=torch.channels_last)


class OpenVINOEngine(Engine):
    """OpenVINO, on a CPU; the images of a batch one after another, since batches gain next to nothing there."""

    def __init__(self, model: Network, device: str = "cpu", precision: str = "f32") -> None:
        super().__init__(model, device, precision)
        if ov is None:
            raise InputError("the OpenVINO engine needs openvino: install it with pip install 'bkn-zoo[openvino]'.")
        if self.device.type != "cpu":
            raise InputError(f"OpenVINO runs on device='cpu' here, not on {device!r}: choose engine='torch'.")
        self.options = {ov.properties.hint.inference_precision: precision, "PERFORMANCE_HINT": "LATENCY"}

    def _run(self, images: Tensor, statistics: Statistics) -> Tensor:
        graph = self._once((statistics, images.shape[2:]), lambda: self._compile(images.shape, statistics))
        logits = torch.empty(len(images), self.model.num_classes)
        for row, image in zip(logits, images.detach().to("cpu", torch.float32), strict=True):
            row.copy_(graph(image))
        return logits

    def _compile(self, shape: torch.Size, statistics: Statistics) -> "Graph":
        self._check_range(statistics)
        images = ops.parameter([1, *shape[1:]])
        stand_in: Any = Symbol(images)
        logits: Any = prepare(self.model, statistics).cpu()(stand_in, statistics.mode)
        model = ov.Model([logits.node], [images])
        _merge_products(model)
        return Graph(_core().compile_model(model, "CPU", self.options))

    def _check_range(self, statistics: Statistics) -> None:
        if self.dtype == torch.float32 or statistics.mode == "population":
            return
        for name, norm in self.model.named_modules():
            if isinstance(norm, RunningNorm) and max(norm.running_var.max(), norm.image_var.max()) > LARGEST_VARIANCE:
                raise InputError(
                    f"the variances at {name} are too large for the statistics of an image in f16: choose "
                    "precision='f32', engine='torch' or statistics='population'."
                )


class Graph:
    """A compiled OpenVINO graph for one image, with a request for each thread that uses it at the time."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.idle: list[Any] = []

    def __call__(self, image: Tensor) -> Tensor:
        try:
            request = self.idle.pop()
        except IndexError:
            request = self.compiled.create_infer_request()
        logits = request.infer([image.contiguous().numpy()[None]], share_inputs=True)[0].copy()
        self.idle.append(request)
        return torch.from_numpy(logits)[0]


@torch.no_grad()
def prepare(model: Network, statistics: Statistics) -> Network:
    """A copy of `model` for the given statistics alone, lean at those."""
    if statistics.mode == "population":
        return fold(model)
    network = _frozen(model)
    for name, module in list(network.named_modules()):
        if isinstance(module, RunningNorm):
            network.set_submodule(name, ImageNorm(module, statistics))
    return network


@torch.no_grad()
def fold(model: Network) -> Network:
    """A copy of `model`, for population statistics alone, whose convolutions have taken in the norms after them.

    A GroupNorm stays, since its statistics are the image's; so does a norm that follows no convolution.
    """
    network = _frozen(model)
    for name, (conv, pooled) in _convolutions(network).items():
        norm: Any = network.get_submodule(name)
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        bias = torch.zeros_like(shift) if conv.bias is None else conv.bias * scale
        conv.weight.mul_(scale[:, None, None, None])
        conv.bias = nn.Parameter(bias if pooled else bias + shift, requires_grad=False)
        network.set_submodule(name, FoldedNorm(shift if pooled else None))
    return network


def _frozen(model: Network) -> Network:
    return copy.deepcopy(model).eval().float().requires_grad_(False)


def _convolutions(network: Network) -> dict[str, tuple[nn.Conv2d, bool]]:
    """For each norm, by name, the convolution whose output it takes, and whether through an average pooling.

    A small image passes to find out: neither the names nor the order of the modules have to say it.
    """
    source: dict[int, tuple[nn.Conv2d, bool]] = {}
    found: dict[str, tuple[nn.Conv2d, bool]] = {}
    alive = []  # an id is a tensor's own only while the tensor lives

    def watch(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        alive.append(output)
        if isinstance(module, nn.Conv2d):
            source[id(output)] = module, False
        elif id(args[0]) in source and isinstance(module, RunningNorm):
            found[name] = source[id(args[0])]
        elif id(args[0]) in source:
            source[id(output)] = source[id(args[0])][0], True

    hooks = [
        module.register_forward_hook(functools.partial(watch, name))
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.AvgPool2d | RunningNorm)
    ]
    network(torch.zeros(1, 3, network.stride, network.stride, device=next(network.parameters()).device), "population")
    for hook in hooks:
        hook.remove()
    return found


class FoldedNorm(nn.Module):
    """What is left of a norm that a convolution has taken in: the residual sum and the ReLU.

    Args:
        shift: added here where a pooling stands between convolution and norm. The scale passes through an average,
            but a bias before it would be diluted by the zeros around the image.
    """

    shift: Tensor | None

    def __init__(self, shift: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("shift", None if shift is None else shift[:, None, None])

    def forward(
        self, x: Tensor, prior: None, statistics: Statistics, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, None]:
        if statistics.mode != "population":
            raise InputError(f"a folded network knows statistics='population' only, not {statistics.mode!r}.")
        return finish(x if self.shift is None else x + self.shift, residual, relu), None


class ImageNorm(nn.Module):
    """A norm for `sample` or `expected` statistics alone, in as few operations as it takes.

    What does not depend on the image is combined beforehand, and numbers are tensors: a small network feels every
    operation, and one with a Python number costs twice one between tensors.
    """

    def __init__(self, norm: RunningNorm, statistics: Statistics) -> None:
        super().__init__()
        self.expects = statistics.mode == "expected"
        self.believes = isinstance(norm, BatchKalmanNorm2d)
        self.follows = isinstance(norm, BatchKalmanNorm2d) and norm.prior_features is not None
        self.weight, self.bias, self.eps = norm.weight, norm.bias, nn.Buffer(torch.tensor(norm.eps))
        if self.expects:
            own = torch.tensor(1 / (statistics.group or 1))
            others = 1 - own
            self.own, self.others, self.image_mean = nn.Buffer(own), nn.Buffer(others), nn.Buffer(norm.image_mean)
            self.partners_mean = nn.Buffer(others * norm.image_mean)
            self.partners_var = nn.Buffer(others * norm.image_var + others**2 * norm.image_spread)
        if isinstance(norm, BatchKalmanNorm2d) and self.follows:
            distrust = 1 - norm.gain
            self.gain, self.distrust, self.transition = nn.Buffer(norm.gain), nn.Buffer(distrust), norm.transition
            self.transition_squared = nn.Buffer(distrust * norm.transition.square())
            self.process_noise = nn.Buffer(distrust * norm.process_noise.expand(norm.num_features))

    def forward(
        self, x: Tensor, prior: Any, statistics: Statistics, residual: Tensor | None = None, relu: bool = False
    ) -> tuple[Tensor, Belief | None]:
        mean, var = _observe(x)
        if self.expects:  # as RunningNorm.expect
            deviation = mean - self.image_mean
            var = self.own * (var + self.others * (deviation * deviation)) + self.partners_var
            mean = self.own * mean + self.partners_mean
        if self.follows:  # as predict and update
            innovation = mean - F.linear(prior.mean, self.transition)
            correction = self.distrust * innovation
            predicted = F.linear(prior.var, self.transition_squared, self.process_noise)
            mean, var = mean - correction, predicted + self.gain * (var + correction * innovation)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        broadcast = (*mean.shape, 1, 1)
        y = torch.addcmul(shift.reshape(broadcast), in_full_precision(x), scale.reshape(broadcast))
        return finish(y, residual, relu).to(x.dtype), Belief(mean, var) if self.believes else None


def _observe(x: Any) -> Belief:
    """`observe`, by what is fastest for `x`."""
    if isinstance(x, Symbol):
        return x.observe()
    if not x.is_cpu:
        return observe(x)
    if len(x) > 1:
        means, variances = zip(*map(_observe, x.split(1)), strict=True)
        return Belief(torch.cat(means), torch.cat(variances))
    # It takes one image, and in channels_last is ten times as fast as torch.var_mean, and as exact.
    mean, var = torch.batch_norm_update_stats(in_full_precision(x), None, None, 0.0)
    return Belief(mean.unsqueeze(0), var.unsqueeze(0))


@functools.cache
def _core() -> Any:
    """OpenVINO, once for the whole process.

    Each Core gives the thread an alternate stack for signals and takes the one before back when it ends. Two that ended
    in the order in which they began left a stack that was gone, and the next signal (a child's end, say) was a crash.
    """
    return ov.Core()


class Symbol:
    """A value in an OpenVINO graph that is being built, in the place of the tensor that it will be.

    The network's own code runs on it: PyTorch hands each of its functions that meets a Symbol to
    `__torch_function__`. What meets tensors alone is computed on the spot, and becomes a constant.
    """

    dtype = torch.float32

    def __init__(self, node: Any) -> None:
        self.node = node.output(0) if isinstance(node, ov.Node) else node
        self.shape = tuple(self.node.shape)
        self.ndim = len(self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Symbol":
        translate = TRANSLATIONS.get(function.__name__)
        if translate is None:
            raise InputError(f"the OpenVINO engine cannot translate {function.__name__}: choose engine='torch'.")
        return cls(translate(*map(_node, args), **{name: _node(value) for name, value in (kwargs or {}).items()}))

    def observe(self) -> Belief:
        # Deviations rather than E[x^2] - E[x]^2, which cancels where means are large, and costs as much.
        mean = _avg_pool2d(self.node, self.shape[2:])
        deviation = ops.subtract(self.node, mean)
        var = _avg_pool2d(ops.multiply(deviation, deviation), self.shape[2:])
        rows: list[Any] = [Symbol(node).reshape(self.shape[:2]) for node in (mean, var)]
        return Belief(*rows)

    def is_floating_point(self) -> bool:
        return True

    def to(self, dtype: torch.dtype) -> "Symbol":
        return self

    def reshape(self, shape: tuple[int, ...]) -> "Symbol":
        return Symbol(ops.reshape(self.node, list(shape), False))

    def relu_(self) -> "Symbol":
        return Symbol(ops.relu(self.node))

    def __add__(self, other: Any) -> "Symbol":
        return Symbol(ops.add(self.node, _node(other)))

    def __sub__(self, other: Any) -> "Symbol":
        return Symbol(ops.subtract(self.node, _node(other)))

    def __mul__(self, other: Any) -> "Symbol":
        return Symbol(ops.multiply(self.node, _node(other)))

    add_ = __add__


def _node(value: Any) -> Any:
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, Tensor):
        return ops.constant(value.detach().contiguous().numpy(), shared_memory=True)
    return [_node(item) for item in value] if isinstance(value, list) else value


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _conv2d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    if groups != 1:
        raise InputError("the OpenVINO engine cannot translate grouped convolutions: choose engine='torch'.")
    y = ops.convolution(x, weight, _pair(stride), _pair(padding), _pair(padding), _pair(dilation))
    return y if bias is None else ops.add(y, ops.reshape(bias, [1, -1, 1, 1], False))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = ops.matmul(x, weight, False, True)
    return y if bias is None else ops.add(y, bias)


def _max_pool2d(x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, **_: Any) -> Any:
    kernel, strides, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    ends = list(pads)
    if ceil_mode:
        # OpenVINO is slow at rounding sizes up; padding as far as the last window reaches does the same.
        for axis, (size, k, s, p) in enumerate(zip(x.shape[2:], kernel, strides, pads, strict=True)):
            last = min(-(-(size + 2 * p - k) // s), (size + p - 1) // s)  # the last to begin before the end's padding
            ends[axis] = max(p, last * s + k - size - p)
    return ops.max_pool(x, strides, _pair(dilation), pads, ends, kernel).output(0)


def _avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, include_pad: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    if ceil_mode or divisor:
        raise InputError("the OpenVINO engine cannot translate this average pooling: choose engine='torch'.")
    pads = _pair(padding)
    return ops.avg_pool(x, _pair(stride or kernel_size), pads, pads, _pair(kernel_size), not include_pad)


def _pad(x: Any, pads: tuple[int, ...], mode: str, value: float | None) -> Any:
    left, right, top, bottom = pads
    filling = _node(torch.tensor(value or 0.0))
    return ops.pad(x, [0, 0, top, left], [0, 0, bottom, right], mode, filling)


TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "pad": _pad,
    "group_norm": lambda x, groups, weight, bias, eps: ops.group_normalization(x, weight, bias, groups, eps),
    "cat": lambda tensors, dim: ops.concat(tensors, dim),
    "flatten": lambda x, start: ops.reshape(x, [*x.shape[:start], -1], False),
    "relu": lambda x: ops.relu(x),
    "rsqrt": lambda x: ops.power(x, _node(torch.tensor(-0.5))),
    "addcmul": lambda x, y, z: ops.add(ops.multiply(y, z), x),
    "add": lambda x, y: ops.add(x, y),
    "sub": lambda x, y: ops.subtract(x, y),
    "mul": lambda x, y: ops.multiply(x, y),
}


def _merge_products(model: Any) -> None:
    """Make one product of those that multiply the same vector: the branches of an Inception block share their prior."""
    sharing: dict[Any, list[Any]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            vector = node.input_value(0)
            sharing.setdefault((vector.get_node().get_name(), vector.get_index()), []).append(node)
    for products in sharing.values():
        if len(products) > 1:
            matrices = [product.input_value(1).get_node().data for product in products]
            joint = ops.matmul(products[0].input_value(0), ops.constant(np.concatenate(matrices)), False, True)
            parts = ops.variadic_split(joint, 1, [len(matrix) for matrix in matrices])
            for product, part in zip(products, parts.outputs(), strict=True):
                product.output(0).replace(part)
