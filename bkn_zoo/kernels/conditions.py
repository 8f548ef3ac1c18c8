"""What the kernels are bound by: how far they count, and who has to see operators. Needs no Triton."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

LIMIT = 2**31  # of offsets that the kernels count in 32 bits


def observed_by_pytorch(x: Tensor) -> bool:
    """Whether a compiler, a mode, a transform or a stand-in for a tensor has to see the operators."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def transformed() -> bool:
    """Whether there may be tangents, or transforms of `torch.func`: PyTorch's own operators alone carry them on."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
