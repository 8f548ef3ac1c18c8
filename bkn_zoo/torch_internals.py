"""All names that this package uses of PyTorch and that PyTorch does not document. Tried on torch 2.11 and 2.15."""

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["AnyBatchNorm", "TorchDispatchMode", "tree_leaves", "tree_map", "without_dispatch_modes"]

without_torch_function: Any = torch._C.DisableTorchFunction
saving_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that pack and unpack saved tensors, such as those of activation checkpointing; None if there are none."""

# Builds without CUDA lack these. They take a tenth of the time of the documented functions.
cuda_device: Any = getattr(torch._C, "_cuda_getDevice", None)
cuda_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def recomputing() -> bool:
    """Whether a backward pass is running. Activation checkpointing runs a layer there again, for the same step."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func` is running."""
    return torch._C._are_functorch_transforms_active()


def tangents_are_possible() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


def dispatch_modes_are_active() -> bool:
    """Whether a `TorchDispatchMode` sees operators."""
    return torch._C._len_torch_dispatch_stack() > 0


def memory_of(x: Tensor) -> int:
    """A number that tensors share if they share their memory, on the meta device, too."""
    return x.untyped_storage()._cdata


def saved_tensors_are_hooked() -> bool:
    """Whether activation checkpointing, or another hook, decides which tensors a backward pass keeps."""
    return not torch.compiler.is_compiling() and saving_hooks(True) is not None


def checkpoint_frame() -> tuple[Any, Any, bool]:
    """The innermost checkpointed region, an object of its current run, and whether the backward pass recomputes it."""
    # The hooks of torch.utils.checkpoint have the region's frame in their closures: in the first pass the frame itself,
    # in a recomputation a weak reference. If PyTorch changes this, converted norms refuse to be recomputed.
    hooks: Any = saving_hooks(True)
    for hook in hooks or ():
        for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
            held = cell.cell_contents
            if type(held).__name__ == "_CheckpointFrame":
                return held, hooks[0], False
            if isinstance(held, weakref.ref) and type(held()).__name__ == "_CheckpointFrame":
                return held(), hooks[0], True
    return None, None, False
