"""A network as an OpenVINO graph: its own code runs once on a stand-in for an image, which writes down what is done."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.conversion.converted import Converted
from bkn_zoo.errors import InputError
from bkn_zoo.inference.folding import ImageNorm, weigh
from bkn_zoo.inference.symbols import Symbol, _node, avg_pool2d, ov, rounded_up
from bkn_zoo.models.network import Network

LARGEST_HALF = np.finfo(np.float16).max

if ov is not None:
    from openvino import opset13 as ops


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
    """`network`, prepared for the population's statistics or for an image's, for one image of (3, height, width)."""
    return Graph(compiled(build_graph(network, shape, population, options), options))


def build_graph(network: Network | Converted, shape: tuple[int, ...], population: bool, options: dict[Any, Any]) -> Any:
    """The same, not compiled yet.

    `sample` and `expected` are one graph, with half the memory and the time to compile of two: how much an image's own
    statistics count is an input.
    """
    inputs = [ops.parameter([1, *shape])]
    if not population:
        inputs.append(ops.parameter([1]))
        norms = [module for module in network.modules() if isinstance(module, ImageNorm)]
        if norms:
            weigh(norms, Symbol(inputs[1]))
        network.statistics_batch_size = network.statistics_batch_size or 1  # of which `weigh` took the place
    stand_in: Any = Symbol(inputs[0])
    logits: Any = network.cpu()(stand_in, statistics="population" if population else "expected")
    if type(logits) is not Symbol:
        raise InputError(f"the OpenVINO engine cannot translate a {type(logits).__name__}: choose engine='torch'.")
    model = ov.Model([logits.node], inputs)
    _merge_products(model)
    _store_weights(model, halves=options.get(ov.properties.hint.inference_precision) == "f16")
    return model


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


def _merge_products(model: Any) -> None:
    """Make one product of those that multiply the same vector: the branches of an Inception block share their prior."""
    sharing: dict[Any, list[Any]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and len(node.shape) == 2:
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
            ends = rounded_up([size.get_length() for size in sizes], kernel, strides, pads)
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
            rows = avg_pool2d(node.input_value(0), [1, kernel[1]])
            node.output(0).replace(avg_pool2d(rows, [kernel[0], 1]).output(0))
