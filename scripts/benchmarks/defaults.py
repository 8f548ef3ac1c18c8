"""Milliseconds from an image file to an answer, of checkpoints in their default mode: `benchmark.py defaults`.

The checkpoint that `serve`, `classify` and `train` use where none is named must be no slower than the one before it.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.server import ROOT, make_image
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
    for classify in classifiers.values():
        classify(image)
    times: dict[Any, list[float]] = {key: [] for key in classifiers}
    for _ in range(args.rounds):
        for key, classify in classifiers.items():
            begun = time.perf_counter()
            classify(image)
            times[key].append(1000 * (time.perf_counter() - begun))
    rows = []
    for (name, precision), found in times.items():
        first = times[args.checkpoints[0], precision]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(found, first, strict=True))
        mode = classifiers[name, precision].choose()
        rows.append(
            {"checkpoint": name, "precision": precision, "statistics": mode, "ms": statistics.median(found)}
            | {f"relative to {args.checkpoints[0]}": ratio}
        )
    write_results(args.output, rows, rounds=args.rounds)
    print(table(rows, list(rows[0])))


def add(commands: Any) -> None:
    parser = commands.add_parser("defaults", help="checkpoints in their default mode, beside each other")
    parser.add_argument("--checkpoints", nargs="+", default=CHECKPOINTS)
    parser.add_argument("--precisions", nargs="+", default=["f32", "auto"])
    parser.add_argument("--rounds", type=int, default=30)
    path = ROOT / "results" / f"benchmark_defaults.{platform.machine()}.json"
    parser.add_argument("--output", type=Path, default=path)
    parser.set_defaults(run=defaults)
