"""A training step in a CUDA graph, which is captured once and replayed without Python."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EAGER_STEPS = 3
EAGER_STEPS_TOGETHER = 12  # with several processes; DistributedDataParallel rebuilds its buckets in the first eleven


def captured(step: Callable[..., Tensor], eager_steps: int | None = None) -> Callable[..., Tensor]:
    """A step that runs normally for a few calls, then replays from a CUDA graph.

    The whole step is replayed as it was captured, on the same memory. Its input tensors are copied there, and the
    result is a copy. So a learning rate that changes must be a tensor on the GPU (fill
    `optimizer.param_groups[0]["lr"]` with new values), gradients are accumulated by a loop within the step, and nothing
    may depend on the value of a tensor. The step may average gradients over processes: DistributedDataParallel is
    captured with its NCCL calls, if it was created and warmed up on the same side stream (`side_stream`).

    Args:
        step: a function of tensors on the GPU that returns a tensor. Tensors with other shapes or types than the first
            ones, and tensors on a CPU, run normally.
        eager_steps: number of calls before the capture; by default 3, or 12 with several processes.
    """
    if eager_steps is None:
        eager_steps = EAGER_STEPS_TOGETHER if dist.is_initialized() else EAGER_STEPS
    return _Captured(step, eager_steps)


class _Captured:
    def __init__(self, step: Callable[..., Tensor], eager_steps: int) -> None:
        self.step, self.left = step, eager_steps
        self.kind: list[Any] = []  # shapes and types of the first batch
        self.replay: Callable[..., Tensor] | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        kind = [(part.shape, part.dtype) for part in batch]
        self.kind = self.kind or kind
        if not batch[0].is_cuda or kind != self.kind:
            return self.step(*batch)
        if self.left > 0:
            self.left -= 1
            with side_stream():
                return self.step(*batch)
        if self.replay is None:
            self.replay = self._capture(batch)
        return self.replay(*batch)

    def _capture(self, batch: Sequence[Tensor]) -> Callable[..., Tensor]:
        buffers = [part.clone() for part in batch]
        graph = torch.cuda.CUDAGraph()
        # "thread_local": threads that pin memory for a DataLoader or monitor NCCL may continue meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self.step(*buffers)

        def replay(*batch: Tensor) -> Tensor:
            for buffer, part in zip(buffers, batch, strict=True):
                buffer.copy_(part)
            graph.replay()
            return result.clone()

        return replay


class side_stream:  # noqa: N801
    """Run work on a separate stream, which a capture needs for the steps before it."""

    def __enter__(self) -> None:
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        self.context = torch.cuda.stream(self.side)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        torch.cuda.current_stream().wait_stream(self.side)
