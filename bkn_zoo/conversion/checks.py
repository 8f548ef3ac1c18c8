"""Refuses networks that cannot be converted, and finds norms that stay unchanged."""

import copy
import inspect

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from bkn_zoo.conversion.example import reason_of
from bkn_zoo.errors import ConversionError, UnknownNameError
from bkn_zoo.models.network import Network
from bkn_zoo.norms.batch_kalman import BatchKalmanNorm
from bkn_zoo.torch_internals import AnyBatchNorm

WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrappers of PyTorch, and the attribute with the network inside. The last one is that of torch.compile."""

OWN_NAMES = ("report", "foldable", "statistics_batch_size", "default_statistics")
"""Attributes of a converted network, whose names the original must not use."""


def check_convertible(model: nn.Module, name: str) -> None:
    """Refuse a network, or its part with this name, if it cannot be converted."""
    kind = type(model).__name__
    if any(isinstance(module, LazyModuleMixin) for module in model.modules()):
        raise ConversionError(f"{kind} contains lazy modules with unknown sizes: run it once first.")
    try:
        part = model.get_submodule(name)
    except AttributeError:
        names = ", ".join(child for child, _ in model.named_children())
        raise UnknownNameError(f"{kind} has no part {name!r}: choose from {names}.") from None
    if part is model and kind in WRAPPERS and type(model).__module__.startswith("torch."):
        raise ConversionError(
            f"the network is wrapped in a {kind}: convert its .{WRAPPERS[kind]}, then wrap the result."
        )
    what = kind if part is model else f"the part {name!r}"
    atoms = name.split(".")
    around = [model.get_submodule(".".join(atoms[:count])) for count in range(len(atoms))]
    if any(isinstance(m, BatchKalmanNorm) or hasattr(type(m), "_original") for m in (*around, *part.modules())):
        raise ConversionError(
            f"{what} already contains, or is part of, a converted network: pass the original network, or "
            "choose another part with only=."
        )
    if isinstance(part, Network):
        twin = f"{part.name.rpartition('_')[0]}_bkn"
        raise ConversionError(f"{part.name} is a network of the zoo: use create_model({twin!r}) instead.")
    if isinstance(part, AnyBatchNorm):
        raise ConversionError(f"{type(part).__name__} is itself a batch norm: convert the network that contains it.")
    if not holds_batchnorm(part):
        raise ConversionError(
            f"{what} contains no batch norm, so there is nothing to convert: pass a network with batch norms."
        )
    taken = set(OWN_NAMES) & {*dir(type(part)), *vars(part), *part._modules, *part._parameters, *part._buffers}
    taken |= {"statistics"} & inspect.signature(type(part).forward).parameters.keys()
    if taken:
        names = " and ".join(sorted(taken))
        raise ConversionError(f"{what} has an attribute or input {names}, which converted networks add: rename it.")
    if "forward" in vars(part):
        raise ConversionError(f"the forward of this {type(part).__name__} was replaced: define it in a class.")


def copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may contain anything
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({reason_of(error)}): remove what cannot be copied or, if the "
            "first pass created it, convert the network before that pass."
        ) from error


def holds_batchnorm(module: nn.Module) -> bool:
    return any(isinstance(part, AnyBatchNorm) for part in module.modules())


def frozen_norms(whole: nn.Module, part: nn.Module) -> dict[str, str]:
    """The batch norms of a part that stay unchanged, and why."""
    trains = any(parameter.requires_grad for parameter in whole.parameters())
    left = {}
    for name, norm in part.named_modules():
        if not isinstance(norm, AnyBatchNorm):
            continue
        hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
        known = type(norm).forward in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)
        own_forward = "forward" in vars(norm) or not (known or type(norm).__module__ == "timm.layers.norm_act")
        if norm.running_mean is None:
            left[name] = "keeps no running statistics"
        elif any(hooks):
            left[name] = "has hooks, which expect the inputs and outputs of a batch norm"
        elif own_forward or is_parametrized(norm):
            left[name] = f"a {type(norm).__name__} that does more than normalize"
        elif whole.training and not norm.training:
            left[name] = "frozen: in evaluation mode"
        elif trains and norm.weight is not None and not norm.weight.requires_grad:
            left[name] = "frozen: its weight has no gradient"
    return left
