"""What tests of kernels and CUDA graphs share: the device that they run on, and a step in a CUDA graph."""

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU: no CUDA graphs elsewhere, and Triton's interpreter is slow")


def capture(step):
    """A graph of `step`, which has run once before on a stream of its own, and where a replay writes the result."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result
