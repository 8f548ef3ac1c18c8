"""How long the package takes to import, and how many modules come with it: `benchmark.py imports`."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bkn_zoo.publishing.results import table, write_results

ROOT = Path(__file__).resolve().parents[2]
USES = {
    "import bkn_zoo": "import bkn_zoo",
    "from bkn_zoo import BatchKalmanNorm2d": "from bkn_zoo.norms import BatchKalmanNorm2d",  # where it always was
    "bkn-zoo list": "import bkn_zoo.cli\nbkn_zoo.cli.main(['list'])",
}


def run(code: str, tree: Path) -> tuple[float, float, int]:
    """Seconds by the clock and of the processor that a process takes for nothing else, and the modules it ends with."""
    code += "\nimport sys\nprint(len(sys.modules))"
    start, before = time.perf_counter(), sum(os.times()[2:4])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return time.perf_counter() - start, sum(os.times()[2:4]) - before, int(done.stdout.split()[-1])


def imports(args: argparse.Namespace) -> None:
    trees = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
    cases = [("-", "python", "pass", ROOT), ("-", "import torch", "import torch", ROOT)]
    cases += [(name, use, code, tree) for use, code in USES.items() for name, tree in trees.items()]
    measured: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for _ in range(args.rounds + 1):  # of which the first fills the disk's cache
        for name, use, code, tree in cases:
            measured.setdefault((name, use), []).append(run(code, tree))
    rows: list[dict[str, Any]] = []
    for (name, use), runs in measured.items():
        seconds, cpu_seconds, modules = map(statistics.median, zip(*runs[1:], strict=True))
        rows.append({"use": use, "tree": name, "seconds": seconds, "cpu_seconds": cpu_seconds, "modules": modules})
    write_results(args.output, rows, rounds=args.rounds)
    print(table(rows, list(rows[0])))


def add(commands: Any) -> None:
    """The subcommand."""
    command = commands.add_parser("imports", help="the package and its command: seconds and modules")
    command.add_argument("--before", type=Path, help="a checkout of an earlier commit, to compare with")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--output", type=Path, default=Path("results/benchmark_imports.json"))
    command.set_defaults(run=imports)
