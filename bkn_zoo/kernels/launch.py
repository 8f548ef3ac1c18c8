"""Launches Triton kernels repeatedly, without repeating the preparation.

Triton's own launch binds the arguments, hashes their types and looks up the compiled code, which takes ten times as
long as the launch itself. A network with a hundred norms has six hundred launches in a training step.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bkn_zoo.torch_internals import cuda_device, cuda_stream

ALIGNMENT = 16  # bytes; Triton compiles other code for less aligned pointers
WORK = "work"  # the parameter for memory that kernels use to pass results to each other
ARRIVED = "arrived"  # the parameter for counters, which are 0 before and after a launch
DEFAULT_STREAM = 0

_dtype = attrgetter("dtype")


class Kernel(NamedTuple):
    """A function of `triton.jit`, whose parameters are first tensors, then numbers and constants, and its launch.

    `across` is the number of programs in the second and third dimension of its grid.
    """

    function: Any
    programs: int
    warps: int = 4
    stages: int = 3
    across: tuple[int, int] = (1, 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.programs, *self.across


def launcher(code: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that launches compiled code, and its arguments between the stream and the kernel's own arguments.

    Triton's launcher is a class around a C function. More than half of its time is spent in the class, which looks for
    memory that a kernel may request. Our kernels request none. The arguments of the function are those of known
    versions of Triton; other versions use the class.
    """
    run, known = code.run, tuple(triton.__version__.split(".")[:2])
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
    """Launch with the kernel's arguments, which follow the first `own` arguments, in one tuple."""
    launch(*arguments[:own], arguments[own:])


class _Scratch(threading.local):
    """Working memory by device and stream. Layers on one stream share it, because they run in sequence.

    Each thread has its own, because another thread could launch between two of its launches.
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
    """Working memory and zero counters. Without counters, a view of the memory replaces them."""
    work = torch.empty(size, dtype=torch.float32, device=device)
    return work, torch.zeros(counters, dtype=torch.int32, device=device) if counters else work.view(torch.int32)


_scratch = _Scratch()


class Launches:
    """Kernels that are launched in sequence on the same tensors.

    Args:
        kernels: the kernels; each gets the tensors and values that its parameters name.
        tensors: the names of the tensors of every call, in order.
        values: all other arguments, by name.
        work: number of float32 values that the kernels pass to each other.
        counters: number of counters of arrived programs.
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
        """Launch the kernels on the current stream of the first tensor's device.

        Args:
            alone: whether cached working memory may be used. A captured graph must not use it, because it can run at
                any time on any stream. Nothing is ever captured on the default stream.
        """
        device = tensors[0].get_device()
        if device < 0:
            self._launch((*memory(*self.memory, "cpu"), *tensors))  # on Triton's interpreter
        elif device != cuda_device():
            with torch.cuda.device(device):
                self(*tensors, alone=alone)
        else:
            self._launch_again(device, tensors, alone)

    def _launch_again(self, device: int, tensors: tuple[Tensor, ...], alone: bool) -> None:
        stream = cuda_stream(device)
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
        """Launch with Triton's own launcher, which also returns the compiled code."""
        return [
            kernel.function[kernel.grid](*take(tensors), *rest, num_warps=kernel.warps, num_stages=kernel.stages)
            for kernel, take, rest in zip(self.kernels, self.takes, self.rests, strict=True)
        ]
