"""How long the service takes to its first answer, and what it then holds in memory: `benchmark.py start`."""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import MACHINE, ROOT, add_command, make_image, save, show
from benchmarks.server import cpu_seconds, free_port, load, resident_mb, serving, wait_for_answer
from bkn_zoo.modes import MODES

CHECKPOINTS = ("efficientnet_lite0_bkn.imagenet", "inception_v2_bkn.tiny_imagenet", "resnet101_bkn.tiny_imagenet")


def start(args: argparse.Namespace) -> None:
    rows = []
    for checkpoint in args.checkpoints:
        for precision in args.precisions:
            rounds = [measure_both(checkpoint, precision) for _ in range(args.rounds)]
            for which, found in zip(("first", "later"), zip(*rounds, strict=True), strict=True):
                medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
                rows.append({"checkpoint": checkpoint, "precision": precision, "start": which, **medians})
    save(args, rows)
    show(rows)


def measure_both(checkpoint: str, precision: str) -> list[dict[str, Any]]:
    """A start that has to compile its graph, and one that finds it where the first has kept it."""
    with tempfile.TemporaryDirectory() as cache:
        return [measure(checkpoint, precision, cache) for _ in range(2)]


def measure(checkpoint: str, precision: str, cache: str) -> dict[str, Any]:
    """One start: seconds to the first answer, by the clock and of the processor; MiB then and after all modes."""
    image, port = make_image(128), free_port()
    command = [sys.executable, "-m", "service", "--port", str(port), "--models", checkpoint, "--precision", precision]
    command += ["--drain-seconds", "0"]
    os.environ["BKN_ZOO_CACHE"] = cache
    with tempfile.TemporaryDirectory() as scratch:
        begun = time.perf_counter()
        with serving(command, Path(scratch) / "log", ROOT) as process:
            wait_for_answer(process, port, _request(image))
            found = {"first_answer_s": time.perf_counter() - begun, "cpu_s": cpu_seconds(process.pid)}
            found["resident_mb"] = resident_mb(process.pid)
            for mode in MODES:
                load(port, _request(image, f"?statistics={mode}"), 1, 0.001)
            found["all_modes_resident_mb"] = resident_mb(process.pid)
            process.terminate()
            process.wait(60)  # for its graphs to be kept
            return found


def _request(image: bytes, query: str = "") -> bytes:
    return f"POST /v1/classify{query} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(image)}\r\n\r\n".encode() + image


def add(commands: Any) -> None:
    command = add_command(commands, start, "start", "the service's first answer and its memory", 3, MACHINE)
    command.add_argument("--checkpoints", nargs="+", default=list(CHECKPOINTS))
    command.add_argument("--precisions", nargs="+", default=["auto", "f32"])
