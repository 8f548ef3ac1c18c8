"""Fused kernels for the norm layers, and the one place where it is decided whether they run.

They run on CUDA tensors where Triton is installed; everything else takes the PyTorch code of `norms/running.py`, which
is the reference for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bkn_zoo.errors import UnknownNameError

try:
    from bkn_zoo.kernels.norm import Norm
    from bkn_zoo.kernels.norm_launch import dense, like

    fused_norm = Norm.apply
except ImportError:  # no Triton for this platform
    fused_norm = None

__all__ = ["chosen", "use", "fused_norm", "dense", "like"]

_forced: str | None = None


def chosen(x: Tensor) -> bool:
    """Whether the kernels normalize `x`."""
    if fused_norm is None or _forced == "pytorch" or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return x.is_cuda or _forced == "triton"


@contextmanager
def use(implementation: str) -> Iterator[None]:
    """Force "pytorch" or "triton" for all layers, in tests and benchmarks.

    Triton on CPU tensors needs its interpreter: TRITON_INTERPRET=1 in the environment.
    """
    if implementation not in ("pytorch", "triton"):
        raise UnknownNameError(f"unknown implementation {implementation!r}: choose pytorch or triton.")
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before
