"""Converted networks of an earlier commit and of this one, in turns: `benchmark.py conversion`.

mkdir -p runs/before && git archive COMMIT bkn_zoo | tar -x -C runs/before
python scripts/benchmark.py conversion --before runs/before --device cuda

Each way and task has two processes, which get ready at the same time and then take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import MACHINE, ROOT, add_command, interleaved, ratio, record, save, show

WORKER = Path(__file__).with_name("conversion_worker.py")
WAYS = {"cpu": ("eager", "compiled"), "cuda": ("eager", "captured", "compiled")}
SIZES = {"cpu": {"images": 2, "size": 64, "runs": 2}, "cuda": {"images": 32, "size": 224, "runs": 5}}
TASKS = ("population", "sample", "step")


class Worker:
    """A process with one version of the package."""

    def __init__(self, setting: dict[str, Any], package: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(setting)], env=os.environ | {"PYTHONPATH": str(package)},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def read(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline().strip()):
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}.")
        return line

    def turn(self) -> float:
        """Milliseconds per run."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self.read())


def measure(before: Path, setting: dict[str, Any], rounds: int) -> dict[str, Any]:
    workers = {"before": Worker(setting, before.resolve()), "now": Worker(setting, ROOT)}
    try:
        for worker in workers.values():
            worker.read()
        times = interleaved({name: worker.turn for name, worker in workers.items()}, rounds, warmup=1)
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.wait()
    medians = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    return {**setting, **medians, "ratio": ratio(times["now"], times["before"])}


def conversion(args: argparse.Namespace) -> None:
    if args.device == "cuda" and args.output == record("conversion", MACHINE):
        args.output = record("conversion", "cuda")
    rows: list[dict[str, Any]] = []
    for way in args.ways or WAYS[args.device]:
        for task in args.tasks:
            setting = {"way": way, "task": task, "device": args.device, "network": args.network, **SIZES[args.device]}
            rows.append(measure(args.before, setting, args.rounds))
            save(args, rows, before=str(args.before))
            show(rows[-1:])


def add(commands: Any) -> None:
    about = "converted networks, relative to an earlier commit"
    command = add_command(commands, conversion, "conversion", about, 9, MACHINE)
    command.add_argument("--before", type=Path, required=True, help="a folder with the earlier package in it")
    command.add_argument("--device", choices=WAYS, default="cpu")
    command.add_argument("--network", default="resnet50", help="one of torchvision's classifiers (default: resnet50)")
    command.add_argument("--ways", nargs="+", choices=WAYS["cuda"])
    command.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
