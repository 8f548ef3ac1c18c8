"""Runs a prepared network on a GPU from CUDA graphs, because launching kernels takes longer than running them."""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.inference.folding import in_float32
from bkn_zoo.modes import Statistics

SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes of captured graphs. Other batches are padded to the next size, and larger ones are split. The result of
an image does not depend on the others."""

_capturing = threading.Lock()
"""A lock for all engines: a capture begins with a synchronization, which would break another capture."""


class Captured:
    """One network for images of one size, with a graph for each of `SIZES` that was used so far.

    The graphs share the memory of the largest one, so they run one at a time, in a separate stream. Only shape and type
    of `images` matter.
    """

    def __init__(self, network: nn.Module, statistics: Statistics, images: Tensor, layout: torch.memory_format) -> None:
        self.network, self.statistics = network, statistics
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
            self.network(images, statistics=self.statistics)  # compiles kernels, chooses algorithms
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                logits = in_float32(self.network(images, statistics=self.statistics))
        return graph, logits
