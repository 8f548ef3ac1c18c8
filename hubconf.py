"""Entry points for torch.hub: every registered model, as in torch.hub.load(repository, "inception_v2_bkn").

pretrained=True loads the default checkpoint of that network, and pretrained="inception_cifar_bkn.cifar100" another one.
Other options are those of bkn_zoo.create_model.
"""

import functools
import typing

import bkn_zoo
from bkn_zoo import errors

dependencies = ["torch", "safetensors", "huggingface_hub"]


def _load(architecture: str, pretrained: bool | str = False, **options: typing.Any) -> bkn_zoo.Network:
    """A new network or, with `pretrained`, the network of a checkpoint in evaluation mode."""
    if not isinstance(pretrained, str):
        return bkn_zoo.create_model(architecture, pretrained=pretrained, **options)
    model = bkn_zoo.create_model(pretrained, pretrained=True, **options)
    if model.name != architecture:
        raise errors.InputError(f"{pretrained} is a checkpoint of {model.name}: load it under that name.")
    return model


for _name in bkn_zoo.list_models():
    globals()[_name] = functools.partial(_load, _name)
    globals()[_name].__doc__ = f"The network {_name}; see bkn_zoo.create_model, or pretrained=True for a checkpoint."
