"""One process of `benchmark.py conversion`: prints "ready", then milliseconds per run for each line that it reads.

It imports the package that is first on PYTHONPATH, which may be that of an earlier commit.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision

import bkn_zoo


def prepare(way: str, task: str, device: str, network: str, images: int, size: int) -> Callable[[], Any]:
    """A training step, or inference in a statistics mode, of a converted network, that has run already."""
    torch.manual_seed(0)
    x = torch.randn(images, 3, size, size, device=device)
    original = torchvision.models.get_model(network, num_classes=10)
    model: Any = bkn_zoo.convert(original, statistics_batch_size=1).to(device).train(task == "step")
    options = {} if task == "step" else {"statistics": task}
    called = torch.compile(model) if way == "compiled" else model

    def run() -> None:
        with torch.set_grad_enabled(task == "step"):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                output = called(x, **options)
            if task == "step":
                model.zero_grad(set_to_none=False)
                output.float().square().mean().backward()

    for _ in range(2):
        run()
    return captured(run) if way == "captured" else run


def captured(run: Callable[[], None]) -> Callable[[], Any]:
    """The same in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def main(setting: dict[str, Any]) -> None:
    runs, on_cpu = setting.pop("runs"), setting["device"] == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    run = prepare(**setting)
    # On a CPU, in one thread, the time of the process: what else runs there does not count.
    clock = time.process_time if on_cpu else time.perf_counter
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = clock()
        for _ in range(runs):
            run()
        if not on_cpu:
            torch.cuda.synchronize()
        print(1e3 * (clock() - begun) / runs, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
