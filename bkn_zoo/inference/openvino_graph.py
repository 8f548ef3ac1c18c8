"""Builds an OpenVINO graph of a network: its own code runs once on a symbol, which records the operations."""

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bkn_zoo.errors import InputError
from bkn_zoo.inference.folding import ImageNorm, in_float32, weigh
from bkn_zoo.inference.graph_cache import PRECISION, cache_folder, core, delete_old_graphs
from bkn_zoo.inference.symbols import Symbol, _node, avg_pool2d, on_x86, ov
from bkn_zoo.models.network import BeliefNetwork
from bkn_zoo.modes import Statistics
from bkn_zoo.norms.kalman import Belief

LARGEST_HALF = np.finfo(np.float16).max

if ov is not None:
    from openvino import opset13 as ops


class Graph:
    """A compiled OpenVINO graph for one image, with one request per concurrent image; `single` as in `build_graph`."""

    def __init__(self, compiled: Any, single: bool = False) -> None:
        self.compiled, self.single = compiled, single
        self.idle: list[Any] = []

    def __call__(self, images: Tensor, own: float = 1.0) -> Tensor:
        """Logits of images, which all run at once; `own` as in `start`."""
        return self.finish(self.start(images, own))

    def start(self, images: Tensor, own: float = 1.0) -> list[tuple[Any, Any]]:
        """Start a request for each image, with the share of its own statistics, for `finish`."""
        started = []
        for image in images.contiguous().split(1):
            inputs = [image.numpy(), np.array([own], np.float32)][: len(self.compiled.inputs)]
            try:
                request = self.idle.pop()
            except IndexError:
                request = self.compiled.create_infer_request()
            request.start_async(inputs, share_inputs=True)
            started.append((request, inputs))  # whose memory it reads
        return started

    def finish(self, started: list[tuple[Any, Any]]) -> Tensor:
        """The logits of the images of `start`."""
        requests = [request for request, _ in started]
        for request in requests:
            request.wait()
        logits = np.concatenate([request.get_output_tensor(0).data for request in requests])
        self.idle += requests
        return torch.from_numpy(logits)


def build_graph(
    network: BeliefNetwork, shape: tuple[int, ...], population: bool, options: dict[Any, Any]
) -> tuple[Any, bool]:
    """The graph of a prepared network, and whether a norm without a prior observes a single value per channel.

    `sample` and `expected` share one graph: the share of an image's own statistics is an input.
    """
    inputs = [ops.parameter([1, *shape])]
    precision = options.get(PRECISION)
    pairs = precision == "bf16" and on_x86()
    beliefs: list[Belief] = []
    # Per channel, of norms without a prior.
    values: list[int] = []
    if not population:
        inputs.append(ops.parameter([1]))
        norms: list[Any] = [module for module in network.modules() if isinstance(module, ImageNorm)]
        if norms:
            weigh(norms, Symbol(inputs[1]))
        for norm in norms:
            if norm.has_prior and (norm.gain == norm.gain[0]).all():
                # OpenVINO fuses more operations with fewer inputs, and a number does not count as one.
                norm.gain, norm.distrust = norm.gain[0], norm.distrust[0]
            if not norm.has_prior:
                norm.register_forward_pre_hook(lambda norm, args: values.append(args[0].shape[2:].numel()))
            elif pairs:
                vars(norm)["_predict"] = functools.partial(_noted, beliefs, norm._predict)
    stand_in: Any = Symbol(inputs[0])
    # The group is not used: `weigh` has set the share of the image.
    statistics = Statistics("population") if population else Statistics("expected", 1)
    buffers = [buffer for buffer in network.cpu().buffers() if not buffer.is_inference()]
    changes = sum(buffer._version for buffer in buffers)
    logits: Any = in_float32(network(stand_in, statistics=statistics))
    if sum(buffer._version for buffer in buffers) != changes:
        raise InputError("a graph cannot change buffers, as this network does: choose engine='torch'.")
    model = ov.Model([logits.node], inputs)
    _merge_products(model)
    if pairs:
        _pair_products(model, beliefs)
    _store_weights(model, halves=precision == "f16")
    return model, 1 in values


def compiled(model: Any, options: dict[str, Any], file: Path | None = None) -> Any:
    """Compile a graph for the processor, or read it from the cache. With a file, also store the graph itself."""
    if options.get(PRECISION) == "f16":
        average_by_rows(model)
    folder = cache_folder()
    if folder is not None:
        options = {**options, "CACHE_DIR": str(folder)}
        # The cache hashes names, which otherwise depend on the graphs that were built before.
        model.set_friendly_name("graph")
        for number, node in enumerate(model.get_ordered_ops()):
            node.set_friendly_name(str(number))
        for number, port in enumerate((*model.inputs, *model.outputs)):
            port.set_names({f"port {number}"})
    if file is not None:
        file = file.with_suffix(f".{options[PRECISION]}.xml")
        # The disk may be full. Files are replaced as a whole, because other processes may be reading them.
        with suppress(RuntimeError, OSError), TemporaryDirectory(dir=file.parent) as scratch:
            saved = Path(scratch) / file.name
            ov.save_model(model, saved, compress_to_fp16=False)
            for suffix in (".bin", ".xml"):
                saved.with_suffix(suffix).replace(file.with_suffix(suffix))
            model = file
    made = core().compile_model(model, "CPU", options)
    if folder is not None:
        delete_old_graphs(folder)
    return made


def _noted(beliefs: list[Belief], predict: Callable[[Any], Any], prior: Belief | None) -> Any:
    """The result of `predict`. Adds the belief to a list; a first layer with an initial belief has none."""
    if prior is not None:
        beliefs.append(prior)
    return predict(prior)


def _products(model: Any) -> dict[Any, list[Any]]:
    """All products of a vector and a matrix, by the vector."""
    found: dict[Any, list[Any]] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and len(node.shape) == 2:
            found.setdefault(_place(node.input_value(0)), []).append(node)
    return found


def _place(value: Any) -> tuple[str, int]:
    """A name of a value in a graph."""
    return value.get_node().get_name(), value.get_index()


def _merge_products(model: Any) -> None:
    """Merge matrix products with the same vector: the branches of an Inception block share their prior."""
    for products in _products(model).values():
        if len(products) > 1:
            matrices = [_constant(product.input_value(1).get_node()).data for product in products]
            joined = _node(torch.from_numpy(np.concatenate(matrices)))
            joint = ops.matmul(products[0].input_value(0), joined, False, True)
            parts = ops.variadic_split(joint, 1, [len(matrix) for matrix in matrices])
            for product, part in zip(products, parts.outputs(), strict=True):
                product.output(0).replace(part)


def _pair_products(model: Any, beliefs: list[Belief]) -> None:
    """Join the product of A and a mean with that of the squares and a variance, a batch, which is faster with AMX."""
    products = _products(model)
    for belief in beliefs:
        pair = [products.pop(_place(value.node), []) for value in cast(Any, belief)]
        if [len(found) for found in pair] != [1, 1]:  # not a full matrix, or joined before
            continue
        both = [found[0] for found in pair]
        matrices = [_constant(node.input_value(1).get_node()).data for node in both]
        # A product may have been merged with a factor of another layer's A.
        if matrices[0].shape != matrices[1].shape:
            continue
        rows = ops.reshape(ops.concat([node.input_value(0) for node in both], 0), [2, 1, -1], False)
        joint = ops.matmul(rows, _node(torch.from_numpy(np.stack(matrices))), False, True)
        parts = ops.split(ops.reshape(joint, [2, -1], False), 0, 2)
        for node, part in zip(both, parts.outputs(), strict=True):
            node.output(0).replace(part)


def _constant(node: Any) -> Any:
    """A constant, or the 16-bit constant behind a conversion."""
    return node.input_value(0).get_node() if node.get_type_name() == "Convert" else node


def _store_weights(model: Any, halves: bool) -> None:
    """Store weights in 16 bits for f16, otherwise in 32. OpenVINO would, too, but takes ten times as long as NumPy."""
    for node in model.get_ordered_ops():
        full = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32 and len(node.shape) > 1
        if halves and full:
            within = np.clip(node.data, -LARGEST_HALF, LARGEST_HALF)  # like OpenVINO, to avoid infinity
            stored = ops.constant(within.astype(np.float16), shared_memory=True)
            node.output(0).replace(ops.convert(stored, "f32").output(0))
        elif not halves and node.get_type_name() == "Convert":
            widened = ops.constant(_constant(node).data.astype(np.float32), shared_memory=True)
            node.output(0).replace(widened.output(0))


def average_by_rows(model: Any) -> None:
    """Compute averages of whole maps as averages of the averages of rows, because on Arm f16 is summed in f16."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "AvgPool":
            continue
        how, kernel = node.get_attributes(), list(node.get_attributes()["kernel"])
        sizes = [size.get_max_length() for size in list(node.input_value(0).partial_shape)[2:]]
        if kernel == sizes and len(kernel) == 2 and 1 not in kernel and not any(how["pads_begin"] + how["pads_end"]):
            rows = avg_pool2d(node.input_value(0), [1, kernel[1]])
            node.output(0).replace(avg_pool2d(rows, [kernel[0], 1]).output(0))
