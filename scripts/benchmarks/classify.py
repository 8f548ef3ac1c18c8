"""Seconds that `bkn-zoo classify` takes on a terminal, and to refuse a missing file: `benchmark.py classify`."""

import argparse
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import MACHINE, ROOT, add_command, interleaved, make_image, save, show


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
        except OSError:  # Linux: the other end is closed
            break
        if not got:
            break
        first = first or time.perf_counter() - begun
    code = process.wait()
    os.close(reader)
    return first or float("nan"), time.perf_counter() - begun, code


def classify(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.jpg"
        image.write_bytes(make_image(256))
        paths = {"an image": str(image), "a missing file": f"{image}.missing"}
        runs = {
            name: partial(on_a_terminal, "classify", path, cache=str(Path(folder) / "graphs"))
            for name, path in paths.items()
        }
        times = interleaved(runs, args.rounds + 1)
    rows = []
    for name, found in times.items():
        first, end, codes = zip(*found[1:], strict=True)  # the run before has filled the caches
        if any(codes) != (name == "a missing file"):
            raise SystemExit(f"classify of {name} ended with {codes}")
        medians = {"first_line_s": statistics.median(first), "end_s": statistics.median(end)}
        rows.append({"command": name, "first_start_s": found[0][1], **medians})
    save(args, rows)
    show(rows)


def add(commands: Any) -> None:
    add_command(commands, classify, "classify", "the command: its first line and its answer", 5, MACHINE)
