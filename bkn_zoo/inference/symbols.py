"""Symbols that replace tensors: a network's own code runs on them once and builds an OpenVINO graph."""

import math
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.kernels.pool import out_size

try:
    import openvino as ov
    from openvino import opset13 as ops
except ImportError:  # an optional extra
    ov = None

LARGE_MAP = 256
"""Positions from which OpenVINO averages a map faster by a reduction than by a pooling, on x86_64."""


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _translated(name, self, other)


class Symbol:
    """A value in an OpenVINO graph that is being built, in place of a tensor.

    PyTorch passes every function call with a Symbol to `__torch_function__`. Functions of tensors only are computed at
    once, and their results become constants.
    """

    dtype, is_cpu, is_cuda, requires_grad, device = torch.float32, True, False, False, torch.device("cpu")
    is_nested = is_sparse = is_quantized = is_mkldnn = is_meta = False
    training = False

    def __init__(self, node: Any) -> None:
        self.node = node.output(0) if isinstance(node, ov.Node) else node
        self.viewed = False  # whether another Symbol shares the memory

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # networks check whether something is a tensor
        return Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.node.shape)

    @property
    def ndim(self) -> int:
        return len(self.node.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _translated(function.__name__, *args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.removesuffix("_") in TRANSLATIONS or name in SAME:
            return partial(_translated, name, self)
        raise AttributeError(f"the OpenVINO engine cannot translate {name}: choose engine='torch'.")

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return True

    def is_contiguous(self, **_: Any) -> bool:
        return True

    def _decides(self, *_: Any) -> Any:
        raise InputError("OpenVINO cannot translate control flow that depends on values: choose engine='torch'.")

    __bool__ = __float__ = __int__ = __index__ = __iter__ = _decides
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _decides
    __hash__ = object.__hash__

    __add__ = __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub"), _operator("rsub")
    __mul__ = __rmul__ = _operator("mul")
    __truediv__ = _operator("div")
    __iadd__, __isub__, __imul__, __itruediv__ = map(_operator, ("add_", "sub_", "mul_", "div_"))


def _translated(name: str, first: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
    """The result of a function of PyTorch, by its name."""
    if name in SAME:
        return SAME[name](first, *args, **kwargs)
    base = name.removesuffix("_")
    translate = TRANSLATIONS.get(base)
    if translate is None:
        raise InputError(f"the OpenVINO engine cannot translate {name}: choose engine='torch'.")
    result = translate(_node(first), *map(_node, args), **{key: _node(value) for key, value in kwargs.items()})
    if inplace or base != name:
        if type(first) is not Symbol or first.viewed:  # others would have to change with it
            raise InputError(f"the OpenVINO engine cannot translate this {name} in place: choose engine='torch'.")
        first.node = Symbol(result).node
        return first
    several = isinstance(result, tuple | list)
    found = tuple(map(Symbol, result if several else (result,)))
    if base in VIEWS and type(first) is Symbol:
        for each in (first, *found):
            each.viewed = True
    return found if several else found[0]


def _node(value: Any) -> Any:
    if type(value) is Symbol:
        return value.node
    if isinstance(value, Tensor):
        constant = ops.constant(value.detach().contiguous().numpy(), shared_memory=True)
        return ops.convert(constant, "f32") if value.dtype == torch.float16 else constant
    return [_node(item) for item in value] if isinstance(value, list | tuple) else value


def number(value: Any) -> Any:
    """A node; for a number, a float32 constant."""
    return _node(torch.tensor(float(value))) if isinstance(value, int | float) else value


def reshape(x: Any, shape: Any) -> Any:
    node = x.get_node()
    # Merge two reshapes into one: the first is left out of the graph.
    source = node.input_value(0) if node.get_type_name() == "Reshape" else x
    return ops.reshape(source, [int(size) for size in shape], False)


def _sizes(sizes: Any) -> Any:
    """A list of arguments that may be passed separately or as one sequence."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _pair(value: Any) -> list[int]:
    return [value] * 2 if isinstance(value, int) else [*value] * 2 if len(value) == 1 else list(value)


def _conv2d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
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


def _einsum(equation: Any, *operands: Any) -> Any:
    if equation != "gbi,boi->gbo" or operands[0].shape[0] != 1:
        raise InputError("the OpenVINO engine cannot translate this einsum: choose engine='torch'.")
    rows, blocks = operands
    count, outputs, inputs = blocks.shape
    products = ops.matmul(reshape(rows, [count, 1, inputs]), blocks, False, True)
    return reshape(products.output(0), [1, count, outputs])


def _group_norm(x: Any, groups: int, weight: Any, bias: Any, eps: float) -> Any:
    # Not OpenVINO's own operation, which crashes in compilation on processors with AMX (2026.4).
    rows = ops.reshape(x, [1, groups, -1], False)
    deviation = ops.subtract(rows, _mean(rows, -1, True))
    var = _mean(ops.multiply(deviation, deviation).output(0), -1, True)
    scale = ops.power(ops.add(var, number(eps)), number(-0.5))
    y = ops.reshape(ops.multiply(deviation, scale), list(x.shape), False)
    return ops.add(ops.multiply(y, _per_channel(weight, len(x.shape))), _per_channel(bias, len(x.shape)))


def _per_channel(vector: Any, ndim: int) -> Any:
    return ops.reshape(vector, [1, -1] + [1] * (ndim - 2), False)


def _batch_norm(
    x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    if training or mean is None:
        raise InputError("the OpenVINO engine cannot translate statistics of a batch: choose engine='torch'.")
    scale = ops.power(ops.add(var, number(eps)), number(-0.5))
    scale = scale if weight is None else ops.multiply(scale, weight)
    shift = ops.subtract(number(0) if bias is None else bias, ops.multiply(mean, scale))
    return ops.add(ops.multiply(x, _per_channel(scale, len(x.shape))), _per_channel(shift, len(x.shape)))


def on_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _mean_of_map(x: Any) -> Any:
    """The mean over height and width, by the faster operation. In f16, poolings are made exact later."""
    # On Arm a reduction was not measured, and it might sum in f16.
    if math.prod(list(x.shape)[2:]) >= LARGE_MAP and on_x86():
        return ops.reduce_mean(x, _node(torch.tensor([2, 3])), True)
    return avg_pool2d(x, list(x.shape)[2:])


def _mean(x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    ndim = len(x.shape)
    dims = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(each % ndim for each in dims)
    if ndim == 4 and dims == [2, 3]:
        mean = _mean_of_map(x)
        return mean if keepdim else reshape(mean.output(0), list(x.shape)[:2])
    return ops.reduce_mean(x, _node(torch.tensor(dims)), keepdim)


def _max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> Any:
    kernel, strides, pads = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
    ends = _rounded_up(x.shape[2:], kernel, strides, pads) if ceil_mode else pads
    return ops.max_pool(x, strides, _pair(dilation), pads, ends, kernel).output(0)


def _rounded_up(sizes: Any, kernel: list[int], strides: list[int], pads: list[int]) -> list[int]:
    """The padding that gives maps the rounded-up size of PyTorch, up to the end of the last window."""
    windows = zip(sizes, kernel, strides, pads, strict=True)
    return [max(p, (out_size(size, k, s, p, True) - 1) * s + k - size - p) for size, k, s, p in windows]


def avg_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    if ceil_mode or divisor_override:
        raise InputError("the OpenVINO engine cannot translate this average pooling: choose engine='torch'.")
    pads = _pair(padding)
    return ops.avg_pool(x, _pair(stride or kernel_size), pads, pads, _pair(kernel_size), not count_include_pad)


def _adaptive_avg_pool2d(x: Any, output_size: Any) -> Any:
    sizes = list(x.shape)[2:]
    wanted = [size if new is None else new for size, new in zip(sizes, _pair(output_size), strict=True)]
    if any(size % new for size, new in zip(sizes, wanted, strict=True)):
        raise InputError("the OpenVINO engine cannot translate this average pooling: choose engine='torch'.")
    return avg_pool2d(x, [size // new for size, new in zip(sizes, wanted, strict=True)])


def _statistics(x: Any, *_: Any) -> tuple[Any, Any]:
    """Mean and variance of an image's channels, like `torch.batch_norm_update_stats`."""
    # Deviations instead of E[x^2] - E[x]^2, which loses precision for large means and costs as much. One operation
    # squares them: in f16 on Arm, subtracting and multiplying takes nearly three times as long.
    if len(x.shape) != 4:
        x = reshape(x, [1, x.shape[1], -1, 1])
        x = x.output(0)
    mean = _mean_of_map(x)
    var = _mean_of_map(ops.squared_difference(x, mean))
    return ops.reshape(mean, [-1], False), ops.reshape(var, [-1], False)


def _pad(x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    left, right, top, bottom = pad
    return ops.pad(x, [0, 0, top, left], [0, 0, bottom, right], mode, number(value or 0.0))


def _split(x: Any, split_size_or_sections: Any, dim: int = 0) -> list[Any]:
    size, given = x.shape[dim], split_size_or_sections
    whole = [given] * (size // given) if isinstance(given, int) else list(given)
    rest = [size - sum(whole)] if size > sum(whole) else []
    return ops.variadic_split(x, dim, [*whole, *rest]).outputs()


def _transpose(x: Any, dim0: int, dim1: int) -> Any:
    order = list(range(len(x.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.transpose(x, order)


def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape, end = list(x.shape), end_dim % len(x.shape)
    return reshape(x, [*shape[:start_dim], math.prod(shape[start_dim : end + 1]), *shape[end + 1 :]])


def _unsqueeze(x: Any, dim: int) -> Any:
    shape = list(x.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return reshape(x, shape)


def _unflatten(x: Any, dim: int, sizes: Any) -> Any:
    shape = list(x.shape)
    known = -math.prod(sizes)
    shape[dim : dim % len(shape) + 1] = [shape[dim] // known if size == -1 else size for size in sizes]
    return reshape(x, shape)


def _clamp(x: Any, min: float | None = None, max: float | None = None) -> Any:
    return ops.clamp(x, -math.inf if min is None else float(min), math.inf if max is None else float(max))


def _arithmetic(operation: str) -> Callable[..., Any]:
    return lambda x, other, alpha=1: getattr(ops, operation)(number(x), _scaled(other, alpha))


def _scaled(x: Any, alpha: Any) -> Any:
    return number(x) if alpha == 1 else ops.multiply(number(x), number(alpha))


def _multiply(x: Any, other: Any) -> Any:
    x, other = number(x), number(other)
    if len(other.shape) == 2 and len(x.shape) == 3 and x.shape[0] == 1:
        # In three dimensions OpenVINO chooses a layout that a matrix product would have to change.
        rows = ops.multiply(ops.reshape(x, list(x.shape)[1:], False), other)
        return ops.reshape(rows, [1, *rows.shape], False)
    return ops.multiply(x, other)


TRANSLATIONS: dict[str, Callable[..., Any]] = {
    "conv2d": _conv2d,
    "linear": _linear,
    "einsum": _einsum,
    "batch_norm_update_stats": _statistics,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": avg_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "mean": _mean,
    "sum": lambda x, dim: ops.reduce_sum(x, _node(torch.tensor([dim])), False),
    "pad": _pad,
    "cat": lambda tensors, dim=0: ops.concat(tensors, dim),
    "clone": lambda x, **_: x,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "unsqueeze": _unsqueeze,
    "reshape": lambda x, *shape: reshape(x, _sizes(shape)),
    "view": lambda x, *shape: reshape(x, _sizes(shape)),
    "split": _split,
    "chunk": lambda x, chunks, dim=0: _split(x, -(-x.shape[dim] // chunks), dim),
    "transpose": _transpose,
    "permute": lambda x, *dims: ops.transpose(x, list(_sizes(dims))),
    "index_select": lambda x, dim, index: ops.gather(x, index, dim),
    "relu": lambda x: ops.relu(x),
    "relu6": lambda x: ops.clamp(x, 0.0, 6.0),
    "hardtanh": lambda x, min_val=-1.0, max_val=1.0: _clamp(x, min_val, max_val),
    "clamp": _clamp,
    "leaky_relu": lambda x, negative_slope=0.01: ops.prelu(x, number(negative_slope)),
    "sigmoid": lambda x: ops.sigmoid(x),
    "tanh": lambda x: ops.tanh(x),
    "silu": lambda x: ops.swish(x),
    "gelu": lambda x, approximate="none": ops.gelu(x, "TANH" if approximate == "tanh" else "ERF"),
    "hardswish": lambda x: ops.hswish(x),
    "hardsigmoid": lambda x: ops.hsigmoid(x),
    "mish": lambda x: ops.mish(x),
    "rsqrt": lambda x: ops.power(x, number(-0.5)),
    "addcmul": lambda x, y, z: ops.add(ops.multiply(y, z), x),
    "add": _arithmetic("add"),
    "sub": _arithmetic("subtract"),
    "rsub": lambda x, other: ops.subtract(number(other), x),
    "mul": _multiply,
    "div": _arithmetic("divide"),
}
"""Translations by the names of PyTorch's functions and methods. Names with a final underscore work in place."""

VIEWS = ("flatten", "unflatten", "unsqueeze", "reshape", "view", "split", "chunk", "transpose", "permute")
"""Functions whose result may share the memory of their first argument."""


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
    if wanted not in ([], [torch.float32]):
        raise InputError("the OpenVINO engine cannot translate a change of precision: choose engine='torch'.")
    return x


def _dropout(x: Any, p: float = 0.5, training: bool = True) -> Any:
    return x if not training else x._decides()


SAME: dict[str, Callable[..., Any]] = {
    "to": _to,
    "float": lambda x, **_: x,
    "contiguous": lambda x, **_: x,
    "detach": lambda x: x,
    "dropout": _dropout,
    "dropout2d": _dropout,
}
"""Functions that return their first argument unchanged."""
