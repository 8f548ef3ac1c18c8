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

ROOT = Path(__file__).resolve().parent.parent
USES = {
    "import bkn_zoo": "import bkn_zoo",
    "from bkn_zoo import BatchKalmanNorm2d": "from bkn_zoo.norms import BatchKalmanNorm2d",  # where it always was
    "bkn-zoo list": "import bkn_zoo.cli\nbkn_zoo.cli.main(['list'])",
}


def run(code: str, tree: Path) -> tuple[float, int]:
    """Seconds of a process that does nothing else, and the modules that it ends with."""
    code += "\nimport sys\nprint(len(sys.modules))"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return time.perf_counter() - start, int(done.stdout.split()[-1])


def imports(args: argparse.Namespace) -> None:
    trees = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
    cases = [("-", "python", "pass", ROOT), ("-", "import torch", "import torch", ROOT)]
    cases += [(name, use, code, tree) for use, code in USES.items() for name, tree in trees.items()]
    seconds: dict[tuple[str, str], list[float]] = {}
    modules: dict[tuple[str, str], int] = {}
    for _ in range(args.rounds + 1):  # of which the first fills the disk's cache
        for name, use, code, tree in cases:
            took, modules[use, name] = run(code, tree)
            seconds.setdefault((use, name), []).append(took)
    rows: list[dict[str, Any]] = [
        {"use": use, "tree": name, "seconds": statistics.median(seconds[use, name][1:]), "modules": modules[use, name]}
        for name, use, _, _ in cases
    ]
    write_results(args.output, rows, rounds=args.rounds)
    print(table(rows, list(rows[0])))
