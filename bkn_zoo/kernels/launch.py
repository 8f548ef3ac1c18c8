"""Launches Triton kernels again and again without working out again what stays the same.

Triton's own launch binds the arguments, hashes their types and looks for the code that was compiled for those: ten
times what the launch itself takes. A network of a hundred norms has six hundred launches in a training step.
"""

import threading
from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are less aligned
WORK = "work"  # the parameter by which kernels take the memory for what they hand to one another

_dtype = attrgetter("dtype")


class Kernel(NamedTuple):
    """A function by `triton.jit`, whose parameters are first tensors, then numbers and constants; and its launch."""

    function: Any
    programs: int
    warps: int = 4
    stages: int = 3


class _Scratch(threading.local):
    """Memory for work, by device and stream, where one layer's follows another's.

    A thread has its own, since those of another could come between two of its launches.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Tensor] = {}

    def take(self, size: int, device: int, stream: int) -> Tensor:
        kept = self.kept.get((device, stream))
        if kept is None or kept.numel() < size:
            kept = self.kept[device, stream] = torch.empty(size, dtype=torch.float32, device=f"cuda:{device}")
        return kept


_scratch = _Scratch()


class Launches:
    """Kernels to be launched one after another on the same tensors.

    Args:
        kernels: each takes of the tensors and the values those that its parameters name.
        tensors: the names of the tensors that every call will bring, in their order.
        values: all other arguments, by name.
        work: float32 numbers that the kernels hand to one another.
    """

    def __init__(self, kernels: Sequence[Kernel], tensors: Sequence[str], values: dict[str, Any], work: int) -> None:
        self.kernels, self.work = kernels, work
        known, names = (WORK, *tensors), [kernel.function.arg_names for kernel in kernels]
        self.takes = [itemgetter(*(known.index(name) for name in wanted if name in known)) for wanted in names]
        self.rests = [tuple(values[name] for name in wanted if name not in known) for wanted in names]
        self.ready: dict[Any, list[tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor, alone: bool) -> None:
        """Launch them on the current stream of the tensors' device, which is the first one's.

        Args:
            alone: whether nobody looks at what memory is taken, so that what is kept for work can be used. A graph
                that is being captured, for one, will run at times and on streams that nobody knows.
        """
        device = tensors[0].device
        if device.type != "cuda":
            self._launch((torch.empty(self.work), *tensors))  # on Triton's interpreter
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*tensors, alone=alone)
        else:
            self._launch_again(device.index, tensors, alone and not torch.cuda.is_current_stream_capturing())

    def _launch_again(self, device: int, tensors: tuple[Tensor, ...], alone: bool) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        if alone:
            work = _scratch.take(self.work, device, stream)
        else:
            work = torch.empty(self.work, dtype=torch.float32, device=f"cuda:{device}")
        pointers = [work.data_ptr(), *[tensor.data_ptr() for tensor in tensors]]
        if reduce(or_, pointers) % ALIGNMENT:
            self._launch((work, *tensors))
            return
        key = device, *map(_dtype, tensors)
        ready = self.ready.get(key)
        if ready is None:
            self.ready[key] = [
                (code.run, (kernel.programs, 1, 1), (code.function, code.packed_metadata, None, None, None), take, rest)
                for kernel, code, take, rest in zip(
                    self.kernels, self._launch((work, *tensors)), self.takes, self.rests, strict=True
                )
            ]
            return
        for run, grid, code, take, rest in ready:
            run(*grid, stream, *code, *take(pointers), *rest)

    def _launch(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """In Triton's own way, which gives the compiled code."""
        return [
            kernel.function[(kernel.programs,)](*take(tensors), *rest, num_warps=kernel.warps, num_stages=kernel.stages)
            for kernel, take, rest in zip(self.kernels, self.takes, self.rests, strict=True)
        ]
