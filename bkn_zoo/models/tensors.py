"""The tensors of a network, and checks that stored tensors fit it."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from bkn_zoo.errors import CheckpointError
from bkn_zoo.models.network import Network


def tensors_of(model: Network) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores; a parameter that layers share occurs once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def check_tensors(where: str, model: Network, wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    network = f"{model.name} with {model.num_classes} classes"
    missing = [name for name in wanted if name not in given]
    if missing:
        raise CheckpointError(f"{where} lacks {few(missing)}: use the weights of {network}.")
    extra = [name for name in given if name not in wanted]
    if extra:
        raise CheckpointError(
            f"{where} contains {few(extra)}, which the network does not have: use the weights of {network}."
        )
    for name, tensor in wanted.items():
        shape = tuple(given[name].shape) if isinstance(given[name], Tensor) else "no tensor"
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {name} is {shape}, but {network} needs {tuple(tensor.shape)}: use the weights of that "
                "network, or correct its number of classes."
            )


def few(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
