"""Images through the engines, with all statistics: `benchmark.py infer`."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch

from benchmarks.common import (
    MACHINE,
    Contestant,
    add_command,
    calibrated,
    interleaved,
    photographs,
    ratio,
    save,
    show,
    timed,
)
from bkn_zoo.inference import engines
from bkn_zoo.norms import MODES

COLUMNS = [
    "model", "size", "norm", "engine", "precision", "statistics", "batch", "ms_per_image", "spread_ms", "first_call_s",
    "later_call_s", "ratio_to_population", "ratio_to_bn_folded", "ratio_to_torch",
]  # fmt: skip


def enter_engines(
    network: str, images: torch.Tensor, samples: torch.Tensor, names: list[str], options: dict[str, Any]
) -> list[Contestant]:
    """BKN at all statistics, and BN at the population's, prepared by each engine; with PyTorch, eager as they are, too.

    BKN has these options of `create_model`. A converted network has no twin with BN: it is that with the population's
    statistics.
    """
    device = images.device.type
    contestants = []
    converted = ":" in network
    for norm, modes in [("bkn", MODES)] if converted else [("bkn", MODES), ("bn", MODES[:1])]:
        own = options if norm == "bkn" else {}
        model = calibrated(network if converted else f"{network}_{norm}", samples, **own)
        eager = torch.inference_mode()(model)
        plain = "torch" in names and not converted
        runs: dict[tuple[str, str], Callable[..., torch.Tensor]] = {("eager", "f32"): eager} if plain else {}
        for name in names:
            for precision in ("f32", "auto"):  # one and the same where the hardware has nothing faster
                engine = engines.create_engine(model, name, device, precision)
                runs[name, engine.precision] = engine
        for (name, precision), run in runs.items():
            for mode in modes:
                start = time.perf_counter()
                logits = run(images, mode).cpu()
                row = {
                    "model": network, "norm": norm, "engine": name, "precision": precision, "statistics": mode,
                    "batch": len(images), "size": images.shape[-1], "date": date.today().isoformat(),
                    "first_call_s": time.perf_counter() - start,
                    "max_difference": (logits - eager(images, mode).cpu()).abs().max().item(), **own,
                }  # fmt: skip
                if converted and name == "openvino" and mode != "expected":  # whose graph is that of `sample`
                    row["later_call_s"] = later_call(model, precision, images, mode)
                contestants.append(Contestant(row, partial(run, images, mode)))
    return contestants


def later_call(model: Any, precision: str, images: torch.Tensor, mode: str) -> float:
    """Seconds to the first answer at a start that finds the graph where an earlier start has kept it."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["BKN_ZOO_CACHE"] = cache
        for _ in range(2):
            engine = engines.create_engine(model, "openvino", precision=precision)
            start = time.perf_counter()
            engine(images, mode)
            taken = time.perf_counter() - start
    os.environ["BKN_ZOO_CACHE"] = "off"
    return taken


def race_engines(contestants: list[Contestant], rounds: int) -> None:
    """Time all in turns of about a tenth of a second and write times and ratios into their rows."""
    fields = ("norm", "engine", "precision", "statistics")
    entered = {tuple(contestant.row[field] for field in fields): contestant for contestant in contestants}
    steps = {key: max(1, round(100 / timed(contestant.step))) for key, contestant in entered.items()}
    found = interleaved({key: partial(timed, entered[key].step, count) for key, count in steps.items()}, rounds)
    for (norm, engine, precision, mode), taken in found.items():
        contestant = entered[norm, engine, precision, mode]
        folded, torchs = ("bn", engine, precision, "population"), (norm, "torch", "f32", mode)
        contestant.row.update(
            ms_per_image=statistics.median(taken) / contestant.row["batch"],
            spread_ms=(max(taken) - min(taken)) / contestant.row["batch"],
            ratio_to_population=ratio(taken, found[norm, engine, precision, "population"]),
            ratio_to_bn_folded=None if engine == "eager" or folded not in found else ratio(taken, found[folded]),
            ratio_to_torch=ratio(taken, found[torchs]) if torchs in found else None,
        )


def infer(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rows: list[dict[str, Any]] = []
    given = {"transition_rank": args.transition_rank, "standardized_weights": args.standardized_weights}
    options = {name: value for name, value in given.items() if value}
    names = args.engines or (["torch"] if args.device == "cuda" else ["torch", "openvino"])
    if engines.ov is None and "openvino" in names:
        print("openvino is not installed, and left out")
        names.remove("openvino")
    if args.keep:
        entered = [case.rpartition(":")[::2] for case in args.cases]
        measured = [*names, "eager"] if "torch" in names else names
        earlier = json.loads(args.output.read_text())["rows"]
        rows = [r for r in earlier if (r["model"], str(r["size"])) not in entered or r["engine"] not in measured]
    for case in args.cases:
        network, _, side = case.rpartition(":")
        samples = photographs(int(side)).to(args.device)
        for batch in args.batches:
            contestants = enter_engines(network, samples[:1].repeat(batch, 1, 1, 1), samples, names, options)
            race_engines(contestants, args.rounds)
            rows += [contestant.row for contestant in contestants]
            save(args, rows, device=args.device)
    show(rows, COLUMNS)


def add(commands: Any) -> None:
    about = "images through the engines: BKN at all statistics, BN folded"
    command = add_command(commands, infer, "infer", about, 25, MACHINE)
    command.add_argument(
        "--cases", nargs="+",
        default=["resnet101:224", "resnet101:128", "inception_v2:224", "inception_v2:128", "inception_cifar:32"],
        help="network and size of its input; converted networks as in torchvision:resnet50:224",
    )  # fmt: skip
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    command.add_argument("--batches", nargs="+", type=int, default=[1])
    command.add_argument("--engines", nargs="+", choices=["torch", "openvino"], help="default: all that are installed")
    command.add_argument("--transition_rank", type=int, help="of the networks with BKN, as in create_model")
    command.add_argument("--standardized_weights", action="store_true", help="of the networks with BKN")
    command.add_argument("--keep", action="store_true", help="keep the rows of other cases and engines in the output")
