"""Seconds that `bkn-zoo classify` takes on a terminal, and to refuse a missing file: `benchmark.py classify`."""

import argparse
import os
import platform
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.server import ROOT, make_image
from bkn_zoo.publishing.results import table, write_results


def on_a_terminal(*arguments: str, cache: str) -> tuple[float, float, int]:
    """Seconds to the first characters and to the end of a command, and its exit code."""
    command = [sys.executable, "-m", "bkn_zoo", *arguments]
    reader, writer = pty.openpty()
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=writer, stdout=writer, stderr=writer, env=os.environ | {"BKN_ZOO_CACHE": cache}
    )
    os.close(writer)
    first = None
    while True:
        try:
            got = os.read(reader, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not got:
            break
        first = first or time.perf_counter() - begun
    code = process.wait()
    os.close(reader)
    return first or float("nan"), time.perf_counter() - begun, code


def classify(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        image = Path(cache) / "image.jpg"
        image.write_bytes(make_image(256))
        graphs = str(Path(cache) / "graphs")
        cases = {"an image": ("classify", str(image)), "a missing file": ("classify", str(image) + ".missing")}
        for name, arguments in cases.items():
            runs = [on_a_terminal(*arguments, cache=graphs) for _ in range(args.rounds + 1)]
            first, end, codes = zip(*runs[1:], strict=True)  # of which the one before has filled the caches
            wanted = 0 if name == "an image" else 2
            if set(codes) - {wanted, 1} or (wanted == 0 and any(codes)):
                raise SystemExit(f"{arguments} ended with {codes}")
            rows.append(
                {"command": name, "first_start_s": runs[0][1]}
                | {"first_line_s": statistics.median(first), "end_s": statistics.median(end)}
            )
    write_results(args.output, rows, rounds=args.rounds, date=date.today().isoformat())
    print(table(rows, list(rows[0])))


def add(commands: Any) -> None:
    """The subcommand."""
    command = commands.add_parser("classify", help="the command: its first line, its answer, and a missing file")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--output", type=Path, default=Path(f"results/benchmark_classify.{platform.machine()}.json"))
    command.set_defaults(run=classify)
