"""Step and inference time of a converted ResNet50, relative to the conversion of an earlier commit, in one run.

mkdir before && git archive ae70858 bkn_zoo | tar -x -C before
python scripts/benchmark_conversion.py --before before                  # eager and compiled, on a CPU
python scripts/benchmark_conversion.py --before before --device cuda    # eager, compiled and captured, on a GPU

Each version runs in a process of its own; the two take turns, and a ratio is that of two turns next to each other.
Writes results/benchmark_conversion.<device>.json, where rows of other ways and tasks stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"cpu": ("eager", "compiled"), "cuda": ("eager", "compiled", "captured")}
SIZES = {"cpu": (2, 64, 2), "cuda": (32, 224, 30)}
"""Images in a batch, their side, and runs in a turn."""
TASKS = ("step", "population", "sample")


def work(device: str) -> None:
    """What a process does: it reads "way task" from its input, runs that for a turn, and writes the seconds."""
    import torch
    import torchvision

    import bkn_zoo

    torch.manual_seed(0)
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    count, side, runs = SIZES[device]
    images = torch.randn(count, 3, side, side, device=device)
    network: Any = bkn_zoo.convert(torchvision.models.resnet50(num_classes=10), statistics_batch_size=1).to(device)
    ready: dict[tuple[str, str], Callable[[], Any]] = {}

    def prepare(way: str, task: str) -> Callable[[], Any]:
        network.train(task == "step")
        options = {} if task == "step" else {"statistics": task}
        called = torch.compile(network) if way == "compiled" else network

        def run() -> None:
            with torch.set_grad_enabled(task == "step"):
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    output = called(images, **options)
                if task == "step":
                    network.zero_grad(set_to_none=False)
                    output.float().square().mean().backward()

        for _ in range(3):
            run()
        if way != "captured":
            return run
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for line in sys.stdin:
        way, task = line.split()
        run = ready.get((way, task)) or ready.setdefault((way, task), prepare(way, task))
        network.train(task == "step")
        run()
        wait()
        # On a CPU, in one thread, the time of the process: what else runs there does not count.
        clock = time.process_time if device == "cpu" else time.perf_counter
        began = clock()
        for _ in range(runs):
            run()
        wait()
        print((clock() - began) / runs, flush=True)


def main(before: Path, device: str, rounds: int, ways: list[str], tasks: list[str]) -> None:
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--work", "--device", device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(folder)},
        )
        for name, folder in (("before", before.resolve()), ("now", ROOT))
    }  # fmt: skip

    def turn(name: str, way: str, task: str) -> float:
        process = processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        print(way, task, file=process.stdin, flush=True)
        return float(process.stdout.readline())

    rows = []
    for way in ways:
        for task in tasks:
            pairs = [(turn("before", way, task), turn("now", way, task)) for _ in range(rounds + 1)][1:]
            ratios = [now / then for then, now in pairs]
            rows.append({
                "way": way, "task": task, "before_ms": 1000 * statistics.median(then for then, _ in pairs),
                "now_ms": 1000 * statistics.median(now for _, now in pairs), "ratio": statistics.median(ratios),
                "lowest": min(ratios), "highest": max(ratios),
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    from bkn_zoo.publishing.results import write_results

    count, side, runs = SIZES[device]
    output = ROOT / "results" / f"benchmark_conversion.{device}.json"
    new = {(row["way"], row["task"]) for row in rows}
    earlier = json.loads(output.read_text())["rows"] if output.exists() else []
    rows = [row for row in earlier if (row["way"], row["task"]) not in new] + rows
    write_results(output, rows, seed=0, images=count, side=side, runs=runs, rounds=rounds, before="ae70858")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with the earlier package in it")
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS["cuda"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.device)
    else:
        main(given.before, given.device, given.rounds, given.ways or list(WAYS[given.device]), given.tasks)
