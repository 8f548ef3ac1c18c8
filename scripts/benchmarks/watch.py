"""What it costs an engine to look for changes of its model at each call: `benchmark.py watch`."""

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.common import MACHINE, add_command, calibrated, interleaved, photographs, save, show, timed
from bkn_zoo.inference.engines import Engine, create_engine


def call(engine: Engine, image: torch.Tensor, mode: str, watched: bool) -> None:
    engine.watched = watched
    engine(image, mode)


def watch(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        network, side = case.split(":")
        samples = photographs(int(side))
        model = calibrated(f"{network}_bkn", samples)
        for name in args.engines:
            engine = create_engine(model, name)
            for mode in ("population", "sample"):
                calls = {flag: partial(timed, partial(call, engine, samples[:1], mode, flag)) for flag in (False, True)}
                plain, watched = interleaved(calls, args.rounds, warmup=3).values()
                added = [one - other for one, other in zip(watched, plain, strict=True)]
                row = {"model": network, "size": int(side), "engine": name, "statistics": mode}
                rows.append(row | {"ms": statistics.median(plain), "added_ms": statistics.median(added)})
                save(args, rows, device="cpu")
    show(rows)


def add(commands: Any) -> None:
    command = add_command(commands, watch, "watch", "what it costs an engine to look for changes", 50, MACHINE)
    command.add_argument("--cases", nargs="+", default=["resnet101:32", "resnet101:128"], help="network and size")
    command.add_argument("--engines", nargs="+", default=["openvino", "torch"])
