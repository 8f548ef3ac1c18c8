"""Step and inference time of a converted network, relative to the conversion of an earlier commit, in one run.

mkdir -p runs/before && git archive ae70858 bkn_zoo | tar -x -C runs/before
python scripts/benchmark_conversion.py --before runs/before                                    # on a CPU
python scripts/benchmark_conversion.py --before runs/before --device cuda                      # on a GPU
python scripts/benchmark_conversion.py --before runs/before --ways compiled --tasks sample     # a piece of it

The ways follow each other. Every task of a way has two processes, one per version. They get ready at the same time, and
say how long each phase took. When all are ready, have failed or are out of time, the pairs that are ready take turns,
one pair after the other, with nothing beside them. A ratio is that of two turns next to each other. Writes
results/benchmark_conversion.<device>.json after every pair; other rows stay. Compiled kernels stay in runs/cache, where
later processes and runs find them.
"""

import argparse
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WAYS = {"cpu": ("eager", "compiled"), "cuda": ("eager", "captured", "compiled")}
SIZES = {"cpu": (2, 64, 2), "cuda": (32, 224, 5)}
"""Images in a batch, their side, and runs in a turn."""
TASKS = ("population", "sample", "step")
VERSIONS = ("before", "now")
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


class Setting(NamedTuple):
    """What a row is about."""

    way: str
    task: str
    device: str
    network: str
    images: int
    side: int
    runs: int


class Phases:
    """Tells the parent process what has been done, and how many seconds it took."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def done(self, phase: str) -> None:
        now = time.perf_counter()
        print(f"{phase} in {now - self.began:.1f} s", flush=True)
        self.began = now


def work(setting: Setting) -> None:
    """What a process does: it gets ready, and for each line that it reads it runs for a turn and writes the seconds."""
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # says where the process is
    phases = Phases()
    import torch

    torch.set_num_threads(1 if setting.device == "cpu" else torch.get_num_threads())
    run = prepare(setting, phases)
    # On a CPU, in one thread, the time of the process: what else runs there does not count.
    clock = time.process_time if setting.device == "cpu" else time.perf_counter
    print("ready", flush=True)
    for _ in sys.stdin:
        began = clock()
        for _ in range(setting.runs):
            run()
        if setting.device == "cuda":
            torch.cuda.synchronize()
        print((clock() - began) / setting.runs, flush=True)


def prepare(setting: Setting, phases: Phases) -> Callable[[], Any]:
    """A training step, or inference, of a converted network, that has run already."""
    import torch
    import torchvision

    import bkn_zoo

    phases.done("imported")
    way, task, device = setting[:3]
    torch.manual_seed(0)
    images = torch.randn(setting.images, 3, setting.side, setting.side, device=device)
    original = torchvision.models.get_model(setting.network, num_classes=10)
    network: Any = bkn_zoo.convert(original, statistics_batch_size=1).to(device)
    network.train(task == "step")
    options = {} if task == "step" else {"statistics": task}
    called = torch.compile(network) if way == "compiled" else network
    phases.done("converted")

    def run() -> None:
        with torch.set_grad_enabled(task == "step"):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                output = called(images, **options)
            if task == "step":
                network.zero_grad(set_to_none=False)
                output.float().square().mean().backward()

    for phase in ("first call", "second call"):
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        phases.done(phase)
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
    torch.cuda.synchronize()
    phases.done("captured")
    return graph.replay


class Worker:
    """A process that runs one version of the package, and what it has said so far."""

    def __init__(self, setting: Setting, version: str, folder: Path) -> None:
        self.name = f"{setting.way} {setting.task}, {version}"
        self.state = "starts"
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process runs)
        caches = {name: str(ROOT / "runs" / "cache" / kind) for name, kind in CACHES.items()}
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "4" if setting.device == "cuda" else "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", json.dumps(setting)],
            env=caches | threads | os.environ | {"PYTHONPATH": str(folder.resolve())}, text=True,
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()  # empty if it has ended

    def turn(self) -> float:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return float(self.read())

    @property
    def settled(self) -> bool:
        return self.state == "ready" or self.state.startswith("failed")

    def get_ready(self, since: float) -> None:
        """Read and print what it says until it is ready; of a process that fails, its errors."""
        while not self.settled:
            said = self.read()
            if self.state == "slow":  # it was ended
                return
            self.state = said or f"failed with status {self.process.wait()}"
            say(since, f"{self.name}: {self.state}" + ("" if said else f"\n{self.last_errors(40)}"))

    def where(self) -> str:
        """Where a process is that is not ready in time, most recent call first."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.last_errors(12, after="(most recent call first):\n")

    def last_errors(self, lines: int, after: str = "") -> str:
        self.errors.seek(0)
        text = self.errors.read()
        found = text.rpartition(after)[2].splitlines()[:lines] if after else text.splitlines()[-lines:]
        return "\n".join(f"    {line}" for line in found)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.errors.close()


def say(since: float, text: str) -> None:
    print(f"{time.monotonic() - since:6.1f} s  {text}", flush=True)


def wait_for(workers: list[Worker], seconds: float, since: float) -> None:
    """Wait until all are ready, have failed or are out of time."""
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=worker.get_ready, args=(since,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    for worker in workers:
        if not worker.settled:
            say(since, f"{worker.name}: slow, not ready in {seconds:g} s; the last it said: {worker.state}; it is at")
            print(worker.where(), flush=True)
            worker.state = "slow"


def measure(before: Worker, now: Worker, setting: Setting, rounds: int) -> dict[str, Any]:
    times = [(before.turn(), now.turn()) for _ in range(rounds + 1)][1:]
    ratios = [new / old for old, new in times]
    return {
        **setting._asdict(), "before_ms": 1000 * statistics.median(old for old, _ in times),
        "now_ms": 1000 * statistics.median(new for _, new in times), "ratio": statistics.median(ratios),
        "lowest": min(ratios), "highest": max(ratios), "rounds": rounds,
    }  # fmt: skip


def save(device: str, row: dict[str, Any]) -> None:
    from bkn_zoo.publishing.results import write_results

    output = ROOT / "results" / f"benchmark_conversion.{device}.json"
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    found = {tuple(each[name] for name in Setting._fields): each for each in [*rows, row]}
    order = [(way, task) for way in WAYS[device] for task in TASKS]
    rows = sorted(found.values(), key=lambda each: (each["network"], order.index((each["way"], each["task"]))))
    write_results(output, rows, seed=0, before="ae70858")


def run_way(before: Path, settings: list[Setting], rounds: int, seconds: float, since: float) -> int:
    """Measure the tasks of one way; returns how many could not be measured."""
    missing, pairs = 0, {}
    for setting in settings:
        pairs[setting] = [Worker(setting, *place) for place in zip(VERSIONS, (before, ROOT), strict=True)]
    workers = [worker for pair in pairs.values() for worker in pair]
    try:
        wait_for(workers, seconds, since)
        for worker in workers:
            if worker.state != "ready":
                worker.end()
        for setting, (old, new) in pairs.items():
            if {old.state, new.state} != {"ready"}:
                missing += 1
                continue
            row = measure(old, new, setting, rounds)
            say(since, json.dumps(row))
            save(setting.device, row)
    finally:
        for worker in workers:
            worker.end()
    return missing


def main(given: argparse.Namespace) -> None:
    images, side, runs = SIZES[given.device]
    size = given.network, given.images or images, given.size or side, runs
    since = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # which ends the other processes, too
    missing = 0
    for way in given.ways or WAYS[given.device]:
        settings = [Setting(way, task, given.device, *size) for task in given.tasks]
        missing += run_way(given.before, settings, given.rounds, given.seconds, since)
    if missing:
        sys.exit(f"{missing} rows could not be measured")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder with the earlier package in it")
    parser.add_argument("--device", choices=WAYS, default="cpu")
    parser.add_argument("--network", default="resnet50", help="one of torchvision's classifiers (default: resnet50)")
    parser.add_argument("--size", type=int, help="side of the images (default: 64 on a CPU, 224 on a GPU)")
    parser.add_argument("--images", type=int, help="in a batch (default: 2 on a CPU, 32 on a GPU)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS["cuda"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seconds", type=float, default=3600, help="for all processes of a way to get ready")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Setting(*given.work))
    else:
        main(given)
