"""A network as an OpenVINO graph: its own code runs once on a stand-in for an image, which writes down what is done."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.inference.folding import ImageNorm, weigh
from bkn_zoo.models.network import Network

LARGEST_HALF = np.finfo(np.float16).max

try:
    import openvino as ov
    from openvino import opset13 as ops
except ImportError:  # an optional extra
    ov = None


class Graph:
    """A compiled OpenVINO graph for one image, with a request for each image that is in it at the time.

    Args:
        memory: what it was read from, and uses as long as it lives.
    """

    def __init__(self, compiled: Any, memory: Any = None) -> None:
        self.compiled = compiled
        self.idle: list[Any] = []
        self.memory = memory  # which goes last

    def __call__(self, images: Tensor, own: float = 1.0) -> Tensor:
        """Logits of images, all of which are in it at once.

        Args:
            own: how much an image's own statistics count; a graph for the population's does not ask.
        """
        given = [
            [image.numpy(), np.array([own], np.float32)][: len(self.compiled.inputs)]
            for image in images.contiguous().split(1)
        ]
        requests = [self._request() for _ in given]
        if len(given) == 1:
            requests[0].infer(given[0], share_inputs=True)
        else:
            for request, inputs in zip(requests, given, strict=True):
                request.start_async(inputs, share_inputs=True)
            for request in requests:
                request.wait()
        logits = np.concatenate([request.get_output_tensor(0).data for request in requests])
        self.idle += requests
        return torch.from_numpy(logits)

    def _request(self) -> Any:
        try:
            return self.idle.pop()
        except IndexError:
            return self.compiled.create_infer_request()


def compile_graph(network: Network, shape: tuple[int, ...], population: bool, options: dict[Any, Any]) -> Graph:
    """`network`, prepared for the population's statistics or for an image's, for one image of (3, height, width).

    `sample` and `expected` are one graph, with half the memory and the time to compile of two: how much an image's own
    statistics count is an input.
    """
    inputs = [ops.parameter([1, *shape])]
    if not population:
        inputs.append(ops.parameter([1]))
        norms = [module for module in network.modules() if isinstance(module, ImageNorm)]
        if norms:
            weigh(norms, Symbol(inputs[1]))
    stand_in: Any = Symbol(inputs[0])
    logits: Any = network.cpu()(stand_in, "population" if population else "expected")
    model = ov.Model([logits.node], inputs)
    _merge_products(model)
    _store_weights(model, halves=options.get(ov.properties.hint.inference_precision) == "f16")
    return Graph(compiled(model, options))


def compiled(model: Any, options: dict[Any, Any]) -> Any:
    """A graph, whoever made it, for the processor."""
    if options.get(ov.properties.hint.inference_precision) == "f16":
        average_by_rows(model)
    return core().compile_model(model, "CPU", options)


@functools.cache
def core() -> Any:
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

    dtype, is_cpu, is_cuda = torch.float32, True, False

    def __init__(self, node: Any) -> None:
        self.node = node.output(0) if isinstance(node, ov.Node) else node
        self.shape = tuple(self.node.shape)
        self.ndim = len(self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        translate = TRANSLATIONS.get(function.__name__)
        if translate is None:
            raise InputError(f"the OpenVINO engine cannot translate {function.__name__}: choose engine='torch'.")
        result = translate(*map(_node, args), **{name: _node(value) for name, value in (kwargs or {}).items()})
        return tuple(map(cls, result)) if isinstance(result, tuple) else cls(result)

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        return True

    def to(self, dtype: torch.dtype) -> "Symbol":
        return self

    def reshape(self, shape: tuple[int, ...]) -> "Symbol":
        node = self.node.get_node()
        # Of what was shaped before, one operation: the first is left out of the graph.
        node = node.input_value(0) if node.get_type_name() == "Reshape" else self.node
        return Symbol(ops.reshape(node, list(shape), False))

    def unsqueeze(self, dim: int) -> "Symbol":
        return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))

    def split(self, sizes: list[int], dim: int) -> "list[Symbol]":
        return list(map(Symbol, ops.variadic_split(self.node, dim, sizes).outputs()))

    def relu_(self) -> "Symbol":
        return Symbol(ops.relu(self.node))

    def __add__(self, other: Any) -> "Symbol":
        return Symbol(ops.add(self.node, _node(other)))

    def __sub__(self, other: Any) -> "Symbol":
        return Symbol(ops.subtract(self.node, _node(other)))

    def __mul__(self, other: Any) -> "Symbol":
        return Symbol(ops.multiply(self.node, _node(other)))

    def __rsub__(self, other: float) -> "Symbol":
        return Symbol(ops.subtract(_node(torch.tensor(other, dtype=torch.float32)), self.node))

    add_ = __add__


def _node(value: Any) -> Any:
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, Tensor):
        constant = ops.constant(value.detach().contiguous().numpy(), shared_memory=True)
        return ops.convert(constant, "f32") if value.dtype == torch.float16 else constant
    return [_node(item) for item in value] if isinstance(value, list) else value


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _conv2d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    how = _pair(stride), _pair(padding), _pair(padding), _pair(dilation)
    if groups == 1:
        y = ops.convolution(x, weight, *how)
    else:
        outputs, *kernel = weight.shape
        y = ops.group_convolution(x, ops.reshape(weight, [groups, outputs // groups, *kernel], False), *how)
    return y if bias is None else ops.add(y, ops.reshape(bias, [1, -1, 1, 1], False))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = ops.matmul(x, weight, False, True)
    return y if bias is None else ops.add(y, bias)


def _group_norm(x: Any, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    # Not OpenVINO's own operation, whose compilation is a crash on processors with AMX (2026.4).
    rows = ops.reshape(x, [1, groups, -1], False)
    deviation = ops.subtract(rows, _mean(rows))
    var = _mean(ops.multiply(deviation, deviation))
    scale = ops.power(ops.add(var, _node(torch.tensor(eps))), _node(torch.tensor(-0.5)))
    y = ops.reshape(ops.multiply(deviation, scale), list(x.shape), False)
    weight, bias = (ops.reshape(vector, [1, -1, 1, 1], False) for vector in (weight, bias))
    return ops.add(ops.multiply(y, weight), bias)


def _mean(rows: Any) -> Any:
    return ops.reduce_mean(rows, _node(torch.tensor([-1])), True)


def _max_pool2d(x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, **_: Any) -> Any:
    kernel, strides, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    ends = _rounded_up(x.shape[2:], kernel, strides, pads) if ceil_mode else pads
    return ops.max_pool(x, strides, _pair(dilation), pads, ends, kernel).output(0)


def _rounded_up(sizes: Any, kernel: list[int], strides: list[int], pads: list[int]) -> list[int]:
    """The padding by which maps have the size that PyTorch rounds up to: as far as the last window reaches."""
    ends = []
    for size, k, s, p in zip(sizes, kernel, strides, pads, strict=True):
        last = min(-(-(size + 2 * p - k) // s), (size + p - 1) // s)  # the last to begin before the end's padding
        ends.append(max(p, last * s + k - size - p))
    return ends


def _avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, include_pad: bool = True,
    divisor: int | None = None,
) -> Any:  # fmt: skip
    if ceil_mode or divisor:
        raise InputError("the OpenVINO engine cannot translate this average pooling: choose engine='torch'.")
    pads = _pair(padding)
    return ops.avg_pool(x, _pair(stride or kernel_size), pads, pads, _pair(kernel_size), not include_pad)


def _statistics(x: Any, *_: Any) -> tuple[Any, Any]:
    """Mean and variance of an image's channels, as `torch.batch_norm_update_stats` gives them."""
    # Deviations rather than E[x^2] - E[x]^2, which cancels where means are large, and costs as much. One operation
    # squares them: in f16 on Arm, to subtract and to multiply takes nearly three times as long.
    mean = _avg_pool2d(x, x.shape[2:])
    var = _avg_pool2d(ops.squared_difference(x, mean), x.shape[2:])
    return ops.reshape(mean, [-1], False), ops.reshape(var, [-1], False)


def _pad(x: Any, pads: tuple[int, ...], mode: str, value: float | None) -> Any:
    left, right, top, bottom = pads
    filling = _node(torch.tensor(value or 0.0))
    return ops.pad(x, [0, 0, top, left], [0, 0, bottom, right], mode, filling)


TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "batch_norm_update_stats": _statistics,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "pad": _pad,
    "group_norm": _group_norm,
    "cat": lambda tensors, dim: ops.concat(tensors, dim),
    "flatten": lambda x, start: ops.reshape(x, [*x.shape[:start], -1], False),
    "relu": lambda x: ops.relu(x),
    "relu6": lambda x, inplace: ops.clamp(x, 0.0, 6.0),
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
            matrices = [_constant(product.input_value(1).get_node()).data for product in products]
            joined = _node(torch.from_numpy(np.concatenate(matrices)))
            joint = ops.matmul(products[0].input_value(0), joined, False, True)
            parts = ops.variadic_split(joint, 1, [len(matrix) for matrix in matrices])
            for product, part in zip(products, parts.outputs(), strict=True):
                product.output(0).replace(part)


def _constant(node: Any) -> Any:
    """A constant itself, or the one in 16 bits that a conversion takes."""
    return node.input_value(0).get_node() if node.get_type_name() == "Convert" else node


def _store_weights(model: Any, halves: bool) -> None:
    """Have weights in the 16 bits that f16 computes in, or in 32.

    OpenVINO would convert them too, and take a second or two for ResNet101's where NumPy takes a fifth of one.
    """
    for node in model.get_ordered_ops():
        full = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32 and len(node.shape) > 1
        if halves and full:
            within = np.clip(node.data, -LARGEST_HALF, LARGEST_HALF)  # as OpenVINO does, instead of infinity
            stored = ops.constant(within.astype(np.float16), shared_memory=True)
            node.output(0).replace(ops.convert(stored, "f32").output(0))
        elif not halves and node.get_type_name() == "Convert":
            widened = ops.constant(_constant(node).data.astype(np.float32), shared_memory=True)
            node.output(0).replace(widened.output(0))


def round_up_by_padding(model: Any) -> None:
    """Have no pooling round its size up, which OpenVINO does by a hundred times slower code: it is padded instead."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MaxPool":
            continue
        how, x = node.get_attributes(), node.input_value(0)
        sizes = list(x.partial_shape)[2:]
        plain = set(how["dilations"]) == {1} and not node.output(1).get_target_inputs()
        if how["rounding_type"] == "ceil_torch" and plain and all(size.is_static for size in sizes):
            kernel, strides, pads = (list(how[name]) for name in ("kernel", "strides", "pads_begin"))
            ends = _rounded_up([size.get_length() for size in sizes], kernel, strides, pads)
            pooled = ops.max_pool(x, strides, [1] * len(kernel), pads, ends, kernel)
            node.output(0).replace(pooled.output(0))


def average_by_rows(model: Any) -> None:
    """Take averages of whole maps as those of their rows' averages.

    On Arm f16 is summed in f16: over 112 x 112 positions at once a variance was off by 8 %, and one of 6 infinite. In
    f32 it is as exact at once, and a few percent of an image's time faster.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "AvgPool":
            continue
        how, kernel = node.get_attributes(), list(node.get_attributes()["kernel"])
        sizes = [size.get_max_length() for size in list(node.input_value(0).partial_shape)[2:]]
        if kernel == sizes and len(kernel) == 2 and 1 not in kernel and not any(how["pads_begin"] + how["pads_end"]):
            rows = _avg_pool2d(node.input_value(0), [1, kernel[1]])
            node.output(0).replace(_avg_pool2d(rows, [kernel[0], 1]).output(0))
