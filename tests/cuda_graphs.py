"""What the tests of kernels share: a step in a CUDA graph."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `step`, which has run once before on a stream of its own, and where a replay writes the result."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
