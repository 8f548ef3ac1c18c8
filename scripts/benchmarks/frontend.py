"""OpenVINO's own frontend beside the stand-in: `python scripts/benchmark.py frontend`.

On one thread, and in seconds of the processor rather than the clock's, which would count what else the machine does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.race import Contestant, calibrated, photographs
from bkn_zoo.inference.engines import TorchEngine
from bkn_zoo.inference.folding import prepare
from bkn_zoo.inference.openvino_graph import Graph, compile_graph, core
from bkn_zoo.inference.tracing import translate
from bkn_zoo.models import Network
from bkn_zoo.norms import MODES, Statistics
from bkn_zoo.publishing.results import table, write_results

WAYS = ("torch", "stand-in", "frontend")
OPTIONS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}


def frontend(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        name, _, side = case.rpartition(":")
        samples = photographs(int(side))
        model = calibrated(name, samples)
        contestants = [each for mode in args.modes for each in enter(model, samples[0], mode, args.ways)]
        race(contestants, args.rounds)
        rows += [contestant.row for contestant in contestants]
        write_results(args.output, rows, args.seed, date=date.today().isoformat())
    print(table(rows, list(rows[0])))


def enter(model: Network, image: Tensor, mode: str, chosen: list[str]) -> list[Contestant]:
    """One image through PyTorch's engine and through both ways to OpenVINO."""
    prepared = partial(prepare, model, Statistics(mode, None if mode == "population" else model.statistics_batch_size))
    own = 1 / (model.statistics_batch_size or 1) if mode == "expected" else 1.0
    ways: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "torch": lambda: partial(TorchEngine(model), statistics=mode),
        "stand-in": lambda: partial(compile_graph(prepared(), image.shape, mode == "population", OPTIONS), own=own),
        "frontend": lambda: Graph(core().compile_model(translate(prepared(), mode, image[None]), "CPU", OPTIONS)),
    }
    with torch.inference_mode():
        wanted = model(image[None], mode)[0]
    contestants = []
    for way in chosen:
        start = time.process_time()
        run = ways[way]()
        logits = run(image[None])
        row = {
            "model": model.name, "size": image.shape[-1], "statistics": mode, "way": way,
            "build_s": time.process_time() - start,
            "max_difference": float((logits.reshape(-1) - wanted).abs().max() / wanted.abs().max()),
        }  # fmt: skip
        contestants.append(Contestant(row, partial(run, image[None])))
    return contestants


def timed(step: Callable[[], object], steps: int) -> float:
    """Milliseconds of the processor per step, over `steps` of them."""
    start = time.process_time()
    for _ in range(steps):
        step()
    return 1e3 * (time.process_time() - start) / steps


def race(contestants: list[Contestant], rounds: int) -> None:
    """In turns of about a tenth of a second."""
    steps = [max(1, round(100 / timed(contestant.step, 2))) for contestant in contestants]
    times: dict[tuple[str, str], list[float]] = {(c.row["statistics"], c.row["way"]): [] for c in contestants}
    for _ in range(rounds):
        for taken, contestant, count in zip(times.values(), contestants, steps, strict=True):
            taken.append(timed(contestant.step, count))

    def ratio(taken: list[float], rival: tuple[str, str]) -> float | None:
        pairs = zip(taken, times[rival], strict=True) if rival in times else []
        return statistics.median(a / b for a, b in pairs) if pairs else None

    for (mode, way), taken, contestant in zip(times, times.values(), contestants, strict=True):
        contestant.row.update(ms_per_image=statistics.median(taken), spread_ms=max(taken) - min(taken))
        for rival in ("torch", "stand-in"):
            contestant.row[f"ratio_to_{rival}"] = ratio(taken, (mode, rival))
        contestant.row["ratio_to_population"] = ratio(taken, ("population", way))


def add(commands: Any) -> None:
    """The subcommand."""
    command = commands.add_parser("frontend", help="OpenVINO by its own frontend, beside the stand-in and PyTorch")
    command.add_argument(
        "--cases", nargs="+",
        default=["inception_cifar_bkn:32", "inception_v2_bkn:128", "resnet101_bkn:128", "torchvision:mobilenet_v2:224"],
        help="network and size of its input",
    )  # fmt: skip
    command.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    command.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    command.add_argument("--rounds", type=int, default=25)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", type=Path, default=Path("results/benchmark_frontend.json"))
    command.set_defaults(run=frontend)
