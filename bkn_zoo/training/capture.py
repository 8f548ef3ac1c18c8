"""A training step in a CUDA graph: what Python launches once is replayed, without Python in between."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EAGER_STEPS = 3
EAGER_STEPS_TOGETHER = 12  # of several processes: DistributedDataParallel settles its buckets in the first eleven


def captured(step: Callable[..., Tensor], eager_steps: int | None = None) -> Callable[..., Tensor]:
    """The same step, which after a few that are launched one kernel at a time replays from a CUDA graph.

    All that the step does is replayed as it was captured, on the same memory: its tensors are copied there, and what it
    returns is a copy. So a learning rate that changes has to be a tensor on the GPU (`optimizer.param_groups[0]["lr"]`,
    filled anew), gradients are accumulated by a loop within the step, and nothing in it may depend on a value of a
    tensor. It may average gradients over processes: DistributedDataParallel, made and warmed up on the same side stream
    as here (`side_stream`), is captured with its NCCL calls.

    Args:
        step: takes tensors on the GPU and returns one. Tensors of other shapes or types than the first ones' are not
            replayed, but launched. On a CPU, everything is.
        eager_steps: launched before the capture; by default 3, or 12 where there are several processes.
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
        # "thread_local": threads that pin memory for a DataLoader or watch over NCCL may go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self.step(*buffers)

        def replay(*batch: Tensor) -> Tensor:
            for buffer, part in zip(buffers, batch, strict=True):
                buffer.copy_(part)
            graph.replay()
            return result.clone()

        return replay


class side_stream:  # noqa: N801
    """Within it, work goes to a stream of its own, as a capture needs of what comes before it."""

    def __enter__(self) -> None:
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        self.context = torch.cuda.stream(self.side)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)
        torch.cuda.current_stream().wait_stream(self.side)
