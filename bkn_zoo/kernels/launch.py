"""Launches Triton kernels again and again without working out again what stays the same.

Triton's own launch binds the arguments, hashes their types and looks for the code that was compiled for those: ten
times what the launch itself takes. A network of a hundred norms has six hundred launches in a training step.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are less aligned
WORK = "work"  # the parameter by which kernels take the memory for what they hand to one another
ARRIVED = "arrived"  # and that for counters, which they find at 0 and leave so
DEFAULT_STREAM = 0

_dtype = attrgetter("dtype")


class Kernel(NamedTuple):
    """A function by `triton.jit`, whose parameters are first tensors, then numbers and constants; and its launch.

    `across` are the programs in the second and third dimension of its grid.
    """

    function: Any
    programs: int
    warps: int = 4
    stages: int = 3
    across: tuple[int, int] = (1, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.programs, *self.across


def launcher(code: Any, version: str = triton.__version__) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches compiled code, and what that takes between the stream and the kernel's own arguments.

    Triton's launcher is a class around a function in C, and more than half of what it takes goes into the class, which
    looks for memory that a kernel may want of its host. Ours want none. The function's arguments are those of the
    versions that are known here; others are launched by the class.
    """
    run, known = code.run, tuple(version.split(".")[:2])
    metadata, hooks = code.packed_metadata, (None, None, None)
    wants = [getattr(run, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
    if any(wants) or getattr(run, "gsan_enabled", False) or known not in KNOWN:
        return run, (code.function, metadata, *hooks)
    first = code.function, run.launch_cooperative_grid, run.launch_pdl
    if known == KNOWN[0]:
        return run.launch, (*first, None, None, metadata, *hooks)
    before = *first, metadata, *hooks, None, None, run.arg_annotations, run.kernel_signature
    return partial(_launch_packed, run.launch, 4 + len(before)), before


KNOWN = ("3", "6"), ("3", "7"), ("3", "8"), ("3", "9")


def _launch_packed(launch: Callable[..., None], own: int, *arguments: Any) -> None:
    """With the kernel's arguments, those behind the first `own`, in one tuple."""
    launch(*arguments[:own], arguments[own:])


class _Scratch(threading.local):
    """Memory for work, by device and stream, where one layer's follows another's.

    A thread has its own, since those of another could come between two of its launches.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], tuple[int, int, tuple[Tensor, Tensor]]] = {}

    def take(self, size: int, counters: int, device: int, stream: int) -> tuple[Tensor, Tensor]:
        largest, most, kept = self.kept.get((device, stream), NOTHING)
        if kept is None or largest < size or most < counters:
            largest, most = max(largest, size), max(most, counters)
            kept = memory(largest, most, f"cuda:{device}")
            self.kept[device, stream] = largest, most, kept
        return kept


NOTHING = -1, 0, None


def memory(size: int, counters: int, device: str) -> tuple[Tensor, Tensor]:
    """For work, and for counters, which are 0; where there are none, others stand for them: dtypes are compiled."""
    work = torch.empty(size, dtype=torch.float32, device=device)
    return work, torch.zeros(counters, dtype=torch.int32, device=device) if counters else work.view(torch.int32)


_scratch = _Scratch()


class Launches:
    """Kernels to be launched one after another on the same tensors.

    Args:
        kernels: each takes of the tensors and the values those that its parameters name.
        tensors: the names of the tensors that every call will bring, in their order.
        values: all other arguments, by name.
        work: float32 numbers that the kernels hand to one another.
        counters: of how many programs have arrived.
    """

    def __init__(
        self, kernels: Sequence[Kernel], tensors: Sequence[str], values: dict[str, Any], work: int, counters: int = 0
    ) -> None:
        self.kernels, self.memory = kernels, (work, counters)
        known, names = (WORK, ARRIVED, *tensors), [kernel.function.arg_names for kernel in kernels]
        self.takes = [itemgetter(*(known.index(name) for name in wanted if name in known)) for wanted in names]
        self.rests = [tuple(values[name] for name in wanted if name not in known) for wanted in names]
        self.ready: dict[Any, list[tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Tensor, alone: bool) -> None:
        """Launch them on the current stream of the tensors' device, which is the first one's.

        Args:
            alone: whether nobody looks at what memory is taken, so that what is kept for work can be used. A graph
                that is being captured, for one, will run at times and on streams that nobody knows. But on the
                default stream nothing is ever captured, nor prepared for it.
        """
        device = tensors[0].get_device()
        if device < 0:
            self._launch((*memory(*self.memory, "cpu"), *tensors))  # on Triton's interpreter
        elif device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(*tensors, alone=alone)
        else:
            self._launch_again(device, tensors, alone)

    def _launch_again(self, device: int, tensors: tuple[Tensor, ...], alone: bool) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        kept = stream == DEFAULT_STREAM or (alone and not torch.cuda.is_current_stream_capturing())
        own = _scratch.take(*self.memory, device, stream) if kept else memory(*self.memory, f"cuda:{device}")
        key = device, *map(_dtype, tensors)
        tensors = *own, *tensors
        pointers = list(map(Tensor.data_ptr, tensors))
        if reduce(or_, pointers) % ALIGNMENT:
            self._launch(tensors)
            return
        ready = self.ready.get(key)
        if ready is None:
            self.ready[key] = [
                (run, kernel.grid, before, take, rest)
                for kernel, (run, before), take, rest in zip(
                    self.kernels, map(launcher, self._launch(tensors)), self.takes, self.rests, strict=True
                )
            ]
            return
        for run, grid, before, take, rest in ready:
            run(*grid, stream, *before, *take(pointers), *rest)

    def _launch(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """In Triton's own way, which gives the compiled code."""
        return [
            kernel.function[kernel.grid](*take(tensors), *rest, num_warps=kernel.warps, num_stages=kernel.stages)
            for kernel, take, rest in zip(self.kernels, self.takes, self.rests, strict=True)
        ]
