"""Conditions for using the kernels: largest offsets, and whether PyTorch has to see operators. Does not need Triton."""

import torch
from torch import Tensor

from bkn_zoo.torch_internals import (
    dispatch_modes_are_active,
    saving_hooks,
    tangents_are_possible,
    transforms_are_active,
)

LIMIT = 2**31  # of offsets, which the kernels count in 32 bits


def observed_by_pytorch(x: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a transform or a tensor subclass has to see the operators."""
    return (
        torch.compiler.is_compiling() or type(x) is not Tensor or dispatch_modes_are_active() or transforms_are_active()
    )


def saved_tensors_are_hooked() -> bool:
    """Whether activation checkpointing, or another hook, decides which tensors a backward pass keeps."""
    return not torch.compiler.is_compiling() and saving_hooks(True) is not None


def transformed() -> bool:
    """Whether there may be tangents or transforms of `torch.func`, which only PyTorch's own operators support."""
    return tangents_are_possible() or transforms_are_active()
