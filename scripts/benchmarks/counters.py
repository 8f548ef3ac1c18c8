"""Where OpenVINO spends an image's time, by kind of operation: `benchmark.py counters`."""

import argparse
import statistics
from collections import Counter
from typing import Any

import torch

import bkn_zoo
from benchmarks.common import MACHINE, add_command, photographs, save, show
from bkn_zoo.inference.folding import prepare
from bkn_zoo.inference.graph_cache import PRECISION
from bkn_zoo.inference.openvino_graph import Graph, build_graph, compiled
from bkn_zoo.modes import Statistics

CHECKPOINTS = ["efficientnet_lite0_bkn.imagenet", "resnet101_bkn.tiny_imagenet", "inception_v2_bkn.tiny_imagenet"]
KINDS = {
    "Convolution": "convolutions",
    "GroupConvolution": "convolutions",
    "FullyConnected": "products",
    "Subgraph": "subgraphs",
    "AvgPool": "poolings",
    "ReduceMean": "poolings",
}


def count(graph: Graph, image: torch.Tensor, images: int) -> tuple[dict[str, float], dict[str, int]]:
    """Median milliseconds per image and number of operations, by kind."""
    taken: dict[str, list[float]] = {}
    found: Counter[str] = Counter()
    for number in range(images + 2):
        graph(image)
        if number < 2:  # these are slower
            continue
        sums: Counter[str] = Counter()
        for node in graph.idle[-1].get_profiling_info():
            kind = KINDS.get(node.node_type, "other")
            sums[kind] += 1e3 * node.real_time.total_seconds()
            found[kind] += node.real_time.total_seconds() > 0
        for kind, value in sums.items():
            taken.setdefault(kind, []).append(value)
    medians = {kind: statistics.median(values) for kind, values in taken.items()}
    return medians, {kind: round(each / images) for kind, each in found.items()}


def counters(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rows: list[dict[str, Any]] = []
    for name in args.checkpoints:
        model: Any = bkn_zoo.from_pretrained(name)
        size = model.config.preprocessing.size
        image = photographs(size)[:1]
        for precision in args.precisions:
            for mode in ("population", "sample"):
                options = {PRECISION: precision, "PERFORMANCE_HINT": "LATENCY"}
                network = prepare(model, Statistics(mode, model.statistics_batch_size), as_stored=True)
                built, _ = build_graph(network, (3, size, size), mode == "population", options)
                taken, found = count(Graph(compiled(built, options | {"PERF_COUNT": "YES"})), image, args.rounds)
                row = {"checkpoint": name, "size": size, "precision": precision, "statistics": mode}
                for kind in (*KINDS.values(), "other"):
                    row |= {f"{kind}_ms": taken.get(kind, 0.0), kind: found.get(kind, 0)}
                rows.append(row)
                save(args, rows, device="cpu")
    show(rows)


def add(commands: Any) -> None:
    command = add_command(commands, counters, "counters", "OpenVINO's time by kind of operation", 20, MACHINE)
    command.add_argument("--checkpoints", nargs="+", default=CHECKPOINTS)
    command.add_argument("--precisions", nargs="+", default=["f32", "f16"])
