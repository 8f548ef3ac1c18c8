"""A prepared network on a GPU, replayed from CUDA graphs: at inference, launching takes longer than the work."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.inference.tracing import in_float32

SIZES = (1, 2, 4, 8, 16, 32)
"""Images that a graph is captured for. Other numbers are filled up to the next, and larger ones divided: what an image
gives does not depend on those beside it."""

_capturing = threading.Lock()
"""Of all engines: a capture begins with a synchronization, which another one under way would not survive."""


class Captured:
    """One network for images of one size, with a graph for each of `SIZES` that was needed so far.

    The graphs share their memory, so that it is that of the largest; hence they take turns, in a stream of their own.

    Args:
        network: on the GPU, in evaluation mode.
        mode: the statistics that it was prepared for.
        images: such as it will get, of which only the kind matters.
        layout: in which it gets them.
    """

    def __init__(self, network: nn.Module, mode: str, images: Tensor, layout: torch.memory_format) -> None:
        self.network, self.mode = network, mode
        like = images[:1].contiguous(memory_format=layout)
        self.images = torch.empty_like(like.expand(SIZES[-1], *like.shape[1:]), memory_format=layout)
        self.images.copy_(like)
        self.stream, self.pool = torch.cuda.Stream(images.device), torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.lock = threading.Lock()

    def __call__(self, images: Tensor) -> Tensor:
        caller = torch.cuda.current_stream(images.device)
        with self.lock, torch.cuda.device(images.device):
            self.stream.wait_stream(caller)
            with torch.cuda.stream(self.stream):
                logits = torch.cat([self._replay(part) for part in images.split(SIZES[-1])])
            caller.wait_stream(self.stream)
        images.record_stream(self.stream)
        logits.record_stream(caller)
        return logits

    def _replay(self, images: Tensor) -> Tensor:
        count = len(images)
        size = next(size for size in SIZES if size >= count)
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        graph, logits = self.graphs[size]
        self.images[:count].copy_(images)
        graph.replay()
        return logits[:count].clone()

    def _capture(self, size: int) -> tuple[Any, Tensor]:
        images = self.images[:size]
        graph = torch.cuda.CUDAGraph()
        with _capturing:
            self.network(images, statistics=self.mode)  # compiles kernels, chooses algorithms
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                logits = in_float32(self.network(images, statistics=self.mode))
        return graph, logits
