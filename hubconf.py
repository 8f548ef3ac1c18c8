"""Entry points for torch.hub: every registered model, as in torch.hub.load(repository, "inception_v2_bkn").

With pretrained=True comes the checkpoint of that network; where there are several, name one, as in
pretrained="inception_cifar_bkn.cifar10". Other options are those of bkn_zoo.create_model.
"""

import functools
import typing

import bkn_zoo
from bkn_zoo import errors
from bkn_zoo.checkpoints import config, files, locate

dependencies = ["torch", "safetensors", "huggingface_hub"]


def _load(architecture: str, pretrained: bool | str = False, **options: typing.Any) -> bkn_zoo.Network:
    """A fresh network or, with `pretrained`, that of a checkpoint, in evaluation mode."""
    if not pretrained:
        return bkn_zoo.create_model(architecture, **options)
    if options:
        raise errors.InputError(f"a pretrained network is as it was trained: leave out {', '.join(options)}.")
    model = bkn_zoo.from_pretrained(_checkpoint_of(architecture) if pretrained is True else pretrained)
    if model.name != architecture:
        raise errors.InputError(f"{pretrained} is a {model.name}: load it by that name.")
    return model


def _checkpoint_of(architecture: str) -> str:
    def trained(name: str) -> str:
        return config.Config.read(locate.find(name) / files.CONFIG).architecture

    names = [name for name in locate.list_checkpoints() if trained(name) == architecture]
    if not names:
        available = ", ".join(locate.list_checkpoints()) or "(none)"
        raise errors.UnknownNameError(
            f"there is no checkpoint of {architecture} on this machine: choose from {available}, or pass "
            'pretrained="owner/repo" for one on the Hub.'
        )
    if len(names) > 1:
        raise errors.UnknownNameError(
            f"there are several checkpoints of {architecture}: pass pretrained= one of {', '.join(names)}."
        )
    return names[0]


for _name in bkn_zoo.list_models():
    globals()[_name] = functools.partial(_load, _name)
    globals()[_name].__doc__ = f"The network {_name}; see bkn_zoo.create_model, or pretrained=True for a checkpoint."
