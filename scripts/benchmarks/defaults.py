"""Milliseconds from an image file to an answer, of checkpoints in each statistics mode: `benchmark.py defaults`.

The checkpoint that `serve`, `classify` and `train` use where none is named must be no slower, in its default mode, than
the one before it.
"""

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.server import ROOT, make_image
from bkn_zoo.modes import MODES
from bkn_zoo.publishing.results import table, write_results

CHECKPOINTS = ["inception_v2_bkn.tiny_imagenet", "efficientnet_lite0_bkn.imagenet", "efficientnet_lite2_bkn.imagenet"]


def defaults(args: argparse.Namespace) -> None:
    from bkn_zoo import Classifier

    image = make_image(256)
    classifiers = {
        (name, precision): Classifier.from_pretrained(name, device="cpu", precision=precision)
        for name in args.checkpoints
        for precision in args.precisions
    }
    times: dict[Any, list[float]] = {(*key, mode): [] for key in classifiers for mode in MODES}
    for number in range(args.rounds + 1):
        for key, found in times.items():
            begun = time.perf_counter()
            classifiers[key[:2]](image, statistics=key[2])
            if number:  # the first round compiles
                found.append(1000 * (time.perf_counter() - begun))
    rows = []
    for (name, precision, mode), found in times.items():
        population = times[name, precision, "population"]
        first = times[args.checkpoints[0], precision, classifiers[args.checkpoints[0], precision].choose()]
        rows.append(
            {"checkpoint": name, "precision": precision, "statistics": mode}
            | {"default": mode == classifiers[name, precision].choose(), "ms": statistics.median(found)}
            | {"ratio_to_population": _ratio(found, population)}
            | {f"relative to {args.checkpoints[0]}": _ratio(found, first)}
        )
    write_results(args.output, rows, rounds=args.rounds, date=date.today().isoformat())
    print(table(rows, list(rows[0])))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def add(commands: Any) -> None:
    parser = commands.add_parser("defaults", help="checkpoints in each mode, beside each other")
    parser.add_argument("--checkpoints", nargs="+", default=CHECKPOINTS)
    parser.add_argument("--precisions", nargs="+", default=["f32", "auto"])
    parser.add_argument("--rounds", type=int, default=30)
    path = ROOT / "results" / f"benchmark_defaults.{platform.machine()}.json"
    parser.add_argument("--output", type=Path, default=path)
    parser.set_defaults(run=defaults)
