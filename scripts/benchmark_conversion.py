"""Step and inference time of a converted ResNet50, relative to the conversion of an earlier commit, in one run.

mkdir -p runs/before && git archive ae70858 bkn_zoo | tar -x -C runs/before
python scripts/benchmark_conversion.py --before runs/before                                    # on a CPU
python scripts/benchmark_conversion.py --before runs/before --device cuda                      # on a GPU
python scripts/benchmark_conversion.py --before runs/before --ways compiled --tasks sample     # a piece of it

Each way and task has two processes, one per version. All of them get ready at the same time, which is what takes long.
A pair that is ready takes turns while the others are stopped; a ratio is that of two turns next to each other. Writes
results/benchmark_conversion.<device>.json after every pair; rows of other ways and tasks stay.
"""

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"cpu": ("eager", "compiled"), "cuda": ("eager", "captured", "compiled")}
SIZES = {"cpu": (2, 64, 2), "cuda": (32, 224, 5)}
"""Images in a batch, their side, and runs in a turn."""
TASKS = ("population", "sample", "step")
Pair = dict[str, "subprocess.Popen[str]"]


def work(device: str, way: str, task: str) -> None:
    """What a process does: it gets ready, and for each line that it reads it runs for a turn and writes the seconds."""
    import torch

    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    run = prepare(device, way, task)
    # On a CPU, in one thread, the time of the process: what else runs there does not count.
    clock = time.process_time if device == "cpu" else time.perf_counter
    print("ready", flush=True)
    for _ in sys.stdin:
        began = clock()
        for _ in range(SIZES[device][2]):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        print((clock() - began) / SIZES[device][2], flush=True)


def prepare(device: str, way: str, task: str) -> Callable[[], Any]:
    """A training step, or inference, of a converted network, that has run already."""
    import torch
    import torchvision

    import bkn_zoo

    torch.manual_seed(0)
    count, side, _ = SIZES[device]
    images = torch.randn(count, 3, side, side, device=device)
    network: Any = bkn_zoo.convert(torchvision.models.resnet50(num_classes=10), statistics_batch_size=1).to(device)
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

    for _ in range(2):
        run()
    if way != "captured":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def start(before: Path, device: str, way: str, task: str) -> Pair:
    command = [sys.executable, __file__, "--work", way, task, "--device", device]
    shared = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4" if device == "cuda" else "1"}
    return {
        name: subprocess.Popen(
            command, env=shared | {"PYTHONPATH": str(folder)}, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name, folder in (("before", before.resolve()), ("now", ROOT))
    }  # fmt: skip


def read(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()  # empty if it has ended


def turn(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)
    return float(read(process))


def signal_all(pairs: Iterable[Pair], number: int) -> None:
    for process in (process for pair in pairs for process in pair.values()):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def measure(pair: Pair, way: str, task: str, rounds: int) -> dict[str, Any]:
    times = [(turn(pair["before"]), turn(pair["now"])) for _ in range(rounds + 1)][1:]
    ratios = [now / then for then, now in times]
    return {
        "way": way, "task": task, "before_ms": 1000 * statistics.median(then for then, _ in times),
        "now_ms": 1000 * statistics.median(now for _, now in times), "ratio": statistics.median(ratios),
        "lowest": min(ratios), "highest": max(ratios), "rounds": rounds,
    }  # fmt: skip


def save(device: str, row: dict[str, Any]) -> None:
    from bkn_zoo.publishing.results import write_results

    count, side, runs = SIZES[device]
    output = ROOT / "results" / f"benchmark_conversion.{device}.json"
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    found = {(each["way"], each["task"]): each for each in [*rows, row]}
    rows = [found[way, task] for way in WAYS[device] for task in TASKS if (way, task) in found]
    write_results(output, rows, seed=0, images=count, side=side, runs=runs, before="ae70858")


def main(before: Path, device: str, rounds: int, ways: list[str], tasks: list[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    pieces = {(way, task): start(before, device, way, task) for way in ways for task in tasks}
    waiting = {process.stdout: process for pair in pieces.values() for process in pair.values()}
    ready = set()
    try:
        while waiting and (pipes := select.select(list(waiting), [], [], max(0, end - time.monotonic()))[0]):
            ready |= {process for process in map(waiting.pop, pipes) if read(process)}  # nothing to read: it has failed
            for piece in [piece for piece, pair in pieces.items() if ready.issuperset(pair.values())]:
                pair = pieces.pop(piece)
                signal_all(pieces.values(), signal.SIGSTOP)
                row = measure(pair, *piece, rounds)
                signal_all([pair], signal.SIGKILL)
                signal_all(pieces.values(), signal.SIGCONT)
                print(json.dumps(row), flush=True)
                save(device, row)
        if pieces:
            sys.exit(f"failed, or not ready in {seconds:g} seconds: {', '.join(' '.join(piece) for piece in pieces)}")
    finally:
        signal_all(pieces.values(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with the earlier package in it")
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS["cuda"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seconds", type=float, default=3600, help="measure nothing that is not ready by then")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.device, *given.work)
    else:
        ways = given.ways or list(WAYS[given.device])
        main(given.before, given.device, given.rounds, ways, given.tasks, given.seconds)
