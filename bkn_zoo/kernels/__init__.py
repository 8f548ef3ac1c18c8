"""Fused kernels for norms and pooling on GPUs. This module decides whether they run.

They run on CUDA tensors if Triton is installed. Everything else uses the PyTorch code of `norms/running.py`, which is
their reference.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.kernels.conditions import LIMIT
from bkn_zoo.torch_internals import tangents_are_possible, transforms_are_active

# Without a GPU or an interpreter, importing Triton would waste a quarter of a second and 100 MB.
HAS_TRITON = find_spec("triton") is not None and (
    torch.cuda.device_count() > 0 or os.environ.get("TRITON_INTERPRET") == "1"
)
if HAS_TRITON:  # if this import fails, something is broken, and the error should be visible
    from bkn_zoo.kernels.norm import fused_norm
    from bkn_zoo.kernels.standardize import StandardizeAll, rows_of
else:
    fused_norm = StandardizeAll = rows_of = None  # type: ignore[assignment,misc]

__all__ = ["HAS_TRITON", "StandardizeAll", "chosen", "fused_norm", "rows_of", "use"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_forced: str | None = None


def chosen(x: Tensor, inputs: int = 0) -> bool:
    """Whether the kernels support `x`, (images, channels, ...), above a layer with `inputs` channels."""
    if not (x.is_cuda or _forced == "triton") or not HAS_TRITON or _forced == "pytorch" or x.dtype not in DTYPES:
        return False
    # There may be tangents, transforms of `torch.func` or a trace, which only PyTorch's own operators support.
    if tangents_are_possible() or transforms_are_active() or torch.jit.is_tracing():
        return False
    images, channels = x.shape[:2]
    # Offsets are counted over the values of one image, over some numbers per channel of all images, and over A.
    rows = images * channels * (8 + inputs // 128)
    return x.numel() < LIMIT * max(images, 1) and rows < LIMIT and channels * inputs < LIMIT


@contextmanager
def use(implementation: str) -> Iterator[None]:
    """Force "pytorch" or "triton" for all layers, in tests and benchmarks.

    Triton on CPU tensors needs its interpreter: TRITON_INTERPRET=1 in the environment.
    """
    if implementation not in ("pytorch", "triton"):
        raise UnknownNameError(f"unknown implementation {implementation!r}: choose pytorch or triton.")
    if implementation == "triton" and not HAS_TRITON:
        raise InputError("the kernels cannot run: install Triton, and use a GPU or set TRITON_INTERPRET=1.")
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before
