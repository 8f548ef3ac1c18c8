"""`bkn_zoo.create_model`: a network by its name, new or pretrained."""

from typing import Any

from bkn_zoo.checkpoints.builders import build_network, of_library
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.conversion.libraries import from_library
from bkn_zoo.defaults import DEFAULT_CHECKPOINTS
from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.models import Network, list_models


def create_model(name: str, num_classes: int | None = None, *, pretrained: bool = False, **options: Any) -> Network:
    """Create a network: one of the zoo, or one of torchvision or timm with BKN instead of batch normalization.

    A new network is in training mode, a pretrained one in evaluation mode.

    Args:
        name: one of `list_models()`, or "torchvision:NAME" or "timm:NAME". With `pretrained`, also the name of a
            checkpoint, as in `from_pretrained`.
        num_classes: outputs of the classifier; by default those of the network's usual data set, or of the checkpoint.
            If it differs from a checkpoint's, the classifier is initialized.
        pretrained: whether to load weights: those of the checkpoint with this name, of the network's default checkpoint
            (otherwise its only local one), or the library's own, which are downloaded.
        options: options of a new network. For all norms: `standardized_weights`. For `_bkn`: `shared_process_noise`,
            `initial_gain`, `initial_belief`, `centered`, `transition_rank` and, for ablations, `link`. For `_brn`:
            `warmup`, `r_steps` and `d_steps`. For `_gn`: `channels_per_group`. For a library's network: numbers and
            lists of numbers for its constructor.
    """
    if not isinstance(pretrained, bool):
        raise InputError(f"pretrained is {pretrained!r}: pass the checkpoint's name first, and pretrained=True.")
    if not pretrained:
        network, dot, _ = name.partition(".")
        if dot and network in list_models():
            raise UnknownNameError(f"{name!r} is the name of a checkpoint: pass pretrained=True, or use {network!r}.")
        return build_network(name, num_classes, **options)
    if of_library(name):
        return from_library(name, num_classes, options, pretrained=True).eval()
    if options:
        raise InputError(f"a pretrained network keeps the options of its training: omit {', '.join(options)}.")
    model = from_pretrained(checkpoint_of(name) if name in list_models() else name)
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    return model


def checkpoint_of(architecture: str) -> str:
    """The name of a network's default checkpoint; without one, that of its only checkpoint on this machine."""
    if architecture in DEFAULT_CHECKPOINTS:
        return DEFAULT_CHECKPOINTS[architecture]
    names = [name for name in list_checkpoints() if Config.read(find(name) / CONFIG).architecture == architecture]
    if not names:
        available = ", ".join(list_checkpoints()) or "(none)"
        raise UnknownNameError(
            f"there is no checkpoint of {architecture} on this machine: choose from {available}, or name one on the "
            'Hub ("owner/repo").'
        )
    if len(names) > 1:
        raise UnknownNameError(f"there are several checkpoints of {architecture}: name one of {', '.join(names)}.")
    return names[0]
