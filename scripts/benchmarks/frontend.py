"""OpenVINO's own frontend beside the stand-in: `python scripts/benchmark.py frontend`.

On one thread, and in seconds of the processor rather than the clock's, which would count what else the machine does.
"""

import argparse
import statistics
import time
from collections.abc import Callable
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

OPTIONS = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1}


def frontend(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        name, _, side = case.rpartition(":")
        samples = photographs(int(side))
        model = calibrated(name, samples)
        for mode in MODES:
            contestants = enter(model, samples[0], mode)
            race(contestants, args.rounds)
            rows += [contestant.row for contestant in contestants]
            write_results(args.output, rows, args.seed)
    print(table(rows, list(rows[0])))


def enter(model: Network, image: Tensor, mode: str) -> list[Contestant]:
    """One image through PyTorch's engine and through both ways to OpenVINO; the first is for the zoo's own networks."""
    prepared = partial(prepare, model, Statistics(mode, None if mode == "population" else model.statistics_batch_size))
    own = 1 / (model.statistics_batch_size or 1) if mode == "expected" else 1.0
    ways: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "torch": lambda: partial(TorchEngine(model), statistics=mode),
        "stand-in": lambda: partial(compile_graph(prepared(), image.shape, mode == "population", OPTIONS), own=own),
        "frontend": lambda: Graph(core().compile_model(translate(prepared(), mode, image[None]), "CPU", OPTIONS)),
    }
    if ":" in model.name:
        del ways["stand-in"]
    with torch.inference_mode():
        wanted = model(image[None], mode)[0]
    contestants = []
    for way, build in ways.items():
        start = time.process_time()
        run = build()
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
    times: dict[str, list[float]] = {contestant.row["way"]: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant, count in zip(contestants, steps, strict=True):
            times[contestant.row["way"]].append(timed(contestant.step, count))
    for contestant in contestants:
        taken = times[contestant.row["way"]]
        contestant.row.update(ms_per_image=statistics.median(taken), spread_ms=max(taken) - min(taken))
        for rival in ("torch", "stand-in"):
            pairs = zip(taken, times.get(rival, []), strict=rival in times)
            contestant.row[f"ratio_to_{rival}"] = statistics.median(a / b for a, b in pairs) if rival in times else None


def add(commands: Any) -> None:
    """The subcommand."""
    command = commands.add_parser("frontend", help="OpenVINO by its own frontend, beside the stand-in and PyTorch")
    command.add_argument(
        "--cases", nargs="+",
        default=["inception_cifar_bkn:32", "inception_v2_bkn:128", "resnet101_bkn:128", "torchvision:mobilenet_v2:224"],
        help="network and size of its input",
    )  # fmt: skip
    command.add_argument("--rounds", type=int, default=25)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output", type=Path, default=Path("results/benchmark_frontend.json"))
    command.set_defaults(run=frontend)
