"""Conditions for using the kernels: offsets, memory layouts, and what has to see operators. Does not need Triton."""

import torch
from torch import Tensor

from bkn_zoo.torch_internals import dispatch_modes_are_active, transforms_are_active

LIMIT = 2**31  # of offsets, which the kernels count in 32 bits
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def observed_by_pytorch(x: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a transform or a tensor subclass has to see the operators."""
    return (
        torch.compiler.is_compiling() or type(x) is not Tensor or dispatch_modes_are_active() or transforms_are_active()
    )


def channels_last(x: Tensor) -> bool:
    layout = CHANNELS_LAST.get(x.ndim)
    return layout is not None and x.is_contiguous(memory_format=layout)


def dense(x: Tensor) -> Tensor:
    """`x` itself if it is contiguous in one of the two layouts, else a contiguous copy."""
    # The first question is the only one that `torch.vmap` answers.
    return x if x.is_contiguous() or channels_last(x) else x.contiguous()
