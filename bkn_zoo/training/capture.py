"""A training step in a CUDA graph, which is captured once and replayed without Python."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EAGER_STEPS = 3
EAGER_STEPS_TOGETHER = 12  # with several processes; DistributedDataParallel rebuilds its buckets in the first eleven


def captured(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A step that runs normally for 3 calls (12 with several processes), then replays from a CUDA graph.

    The whole step is replayed on the same memory: its inputs are copied there, and the result is a copy. So a learning
    rate that changes must be a tensor on the GPU, gradients are accumulated by a loop within the step, and nothing may
    depend on the value of a tensor. DistributedDataParallel is captured with its NCCL calls if it was created on the
    same side stream (`side_stream`). Batches of other shapes or types than the first, and on a CPU, run normally.
    """
    left = EAGER_STEPS_TOGETHER if dist.is_initialized() else EAGER_STEPS
    # Shapes and types of the first batch.
    kind: list[Any] = []
    buffers, graph, result = list[Tensor](), None, torch.empty(0)

    def call(*batch: Tensor) -> Tensor:
        nonlocal left, kind, buffers, graph, result
        own = [(part.shape, part.dtype) for part in batch]
        kind = kind or own
        if not batch[0].is_cuda or own != kind:
            return step(*batch)
        if left > 0:
            left -= 1
            with side_stream():
                return step(*batch)
        if graph is None:
            buffers, recording = [part.clone() for part in batch], torch.cuda.CUDAGraph()
            # "thread_local": threads that pin memory for a DataLoader or monitor NCCL may continue meanwhile.
            with torch.cuda.graph(recording, capture_error_mode="thread_local"):
                result = step(*buffers)
            graph = recording
        for buffer, part in zip(buffers, batch, strict=True):
            buffer.copy_(part)
        graph.replay()
        return result.clone()

    return call


@contextmanager
def side_stream() -> Iterator[None]:
    """Run work on a separate stream, which a capture needs for the steps before it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(side)
