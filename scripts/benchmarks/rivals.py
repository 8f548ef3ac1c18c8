"""Engines that were tried and are not used, beside OpenVINO in f32 and f16: `benchmark.py rivals`.

These are PyTorch's AOTInductor with frozen weights, and int8 through NNCF (`pip install nncf`). Both run a network with
its norms folded, for `population` statistics. Compiled packages stay in a folder, because that takes minutes.
"""

import argparse
import logging
import platform
import statistics
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bkn_zoo
from benchmarks.race import photographs, timed
from bkn_zoo.inference.engines import create_engine
from bkn_zoo.inference.folding import prepare
from bkn_zoo.inference.openvino_graph import Graph, build_graph, core, ov
from bkn_zoo.modes import Statistics
from bkn_zoo.publishing.results import table, write_results

POPULATION = Statistics("population")


class Population(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images, statistics="population")


def by_inductor(model: Any, image: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    image = image.contiguous(memory_format=torch.channels_last)
    if not path.exists():
        network = Population(prepare(model, POPULATION).to(memory_format=torch.channels_last)).eval()
        with torch.no_grad():
            exported = torch.export.export(network, (image,))
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs={"freezing": True})
    package = torch._inductor.aoti_load_package(str(path))
    return lambda _: package(image)


def in_8_bits(model: Any, images: list[Tensor], path: Path, rest: str) -> Callable[[Tensor], Tensor]:
    """Calibrated on random images, which is enough to measure speed."""
    if not path.exists():
        import nncf

        logging.getLogger("nncf").setLevel(logging.ERROR)
        options = {ov.properties.hint.inference_precision: "f32"}
        graph = build_graph(prepare(model, POPULATION), tuple(images[0].shape[1:]), True, options)
        data = nncf.Dataset([image.numpy() for image in images])
        ov.save_model(nncf.quantize(graph, data, subset_size=len(images)), path, compress_to_fp16=False)
    options = {"INFERENCE_PRECISION_HINT": rest, "PERFORMANCE_HINT": "LATENCY"}
    return Graph(core().compile_model(core().read_model(path), "CPU", options))


def rivals(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in args.checkpoints:
        model: Any = bkn_zoo.from_pretrained(name)
        images = [photographs(model.config.preprocessing.size)[:1] for _ in range(8)]
        quantized = args.folder / f"{name}.xml"
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            f"openvino {precision}": partial(
                create_engine(model, "openvino", precision=precision), statistics="population"
            )
            for precision in ("f32", "f16")
        }
        ways["AOTInductor f32"] = by_inductor(model, images[0], args.folder / f"{name}.pt2")
        ways["openvino int8, rest f16"] = in_8_bits(model, images, quantized, "f16")
        with torch.inference_mode():
            wanted = model(images[0], statistics="population")
            off = {way: float((run(images[0]) - wanted).abs().max()) for way, run in ways.items()}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, run in ways.items():
                    times[way].append(timed(partial(run, images[0]), 2))
        for way, taken in times.items():
            pairs = zip(taken, times["openvino f16"], strict=True)
            rows.append(
                {"checkpoint": name, "way": way, "ms_per_image": statistics.median(taken)}
                | {"ratio_to_f16": statistics.median(a / b for a, b in pairs), "max_difference": off[way]}
            )
        write_results(args.output, rows, 0, date=date.today().isoformat())
    print(table(rows, list(rows[0])))


def add(commands: Any) -> None:
    """The subcommand."""
    command = commands.add_parser("rivals", help="AOTInductor and int8, which are not used, beside OpenVINO")
    command.add_argument(
        "--checkpoints", nargs="+", default=["efficientnet_lite0_bkn.imagenet", "resnet101_bkn.tiny_imagenet"]
    )
    command.add_argument("--folder", type=Path, default=Path("runs/rivals"), help="of compiled packages")
    command.add_argument("--rounds", type=int, default=10)
    command.add_argument("--output", type=Path, default=Path(f"results/benchmark_rivals.{platform.machine()}.json"))
    command.set_defaults(run=rivals)
