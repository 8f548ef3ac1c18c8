"""`bkn_zoo.create_model`: a network by its name, fresh or pretrained."""

from dataclasses import replace
from typing import Any

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.conversion.libraries import build, from_library, of_library
from bkn_zoo.errors import InputError, UnknownNameError
from bkn_zoo.models import Network, list_models


def create_model(name: str, num_classes: int | None = None, *, pretrained: bool = False, **options: Any) -> Network:
    """A network: the zoo's own, or one of torchvision's or timm's with BKN for batch normalization.

    A fresh network is in training mode, a pretrained one in evaluation mode.

    Args:
        name: one of `list_models()`, or "torchvision:NAME" or "timm:NAME". With `pretrained`, also the name of a
            checkpoint, as `from_pretrained` takes it.
        num_classes: outputs of the classifier. By default those of the data set that the network was designed for, or
            of the checkpoint; with another number than a checkpoint's, the classifier is initialized anew.
        pretrained: load weights: those of the checkpoint of this name, of the one local checkpoint of this network, or
            the library's own, which are downloaded.
        options: of a fresh network. For `_bkn`, `shared_process_noise`, `initial_gain`, `initial_belief`, `centered`
            and, for ablations, `link`; for `_brn`, `warmup`, `r_steps` and `d_steps`; for `_gn`, `channels_per_group`;
            for a library's network, numbers and lists of numbers that its builder takes.
    """
    if not pretrained:
        network, dot, _ = name.partition(".")
        if dot and network in list_models():
            raise UnknownNameError(f"{name!r} is the name of a checkpoint: pass pretrained=True, or take {network!r}.")
        return build(name, num_classes, **options)
    if of_library(name):
        return from_library(name, num_classes, options, pretrained=True).eval()
    if options:
        raise InputError(f"a pretrained network is as it was trained: leave out {', '.join(options)}.")
    model = from_pretrained(checkpoint_of(name) if name in list_models() else name)
    return model if num_classes in (None, model.num_classes) else _with_classes(model, num_classes)


def checkpoint_of(architecture: str) -> str:
    """The name of the one checkpoint of a network on this machine."""

    def trained(name: str) -> str:
        return Config.read(find(name) / CONFIG).architecture

    names = [name for name in list_checkpoints() if trained(name) == architecture]
    if not names:
        available = ", ".join(list_checkpoints()) or "(none)"
        raise UnknownNameError(
            f"there is no checkpoint of {architecture} on this machine: choose from {available}, or name one on the "
            'Hub ("owner/repo").'
        )
    if len(names) > 1:
        raise UnknownNameError(f"there are several checkpoints of {architecture}: name one of {', '.join(names)}.")
    return names[0]


def _with_classes(model: Network, num_classes: int | None) -> Network:
    """The network with a fresh classifier of so many classes, and what its config says apart from the classes."""
    changed = build(model.name, num_classes, **model.norm_options)
    own, fresh = model.state_dict(), changed.state_dict()  # layers make what they lack, such as centers, as they load
    kept = {name: tensor for name, tensor in own.items() if tensor.shape == fresh.get(name, tensor).shape}
    changed.load_state_dict(kept, strict=False)
    changed.statistics_batch_size = model.statistics_batch_size
    changed.default_statistics = model.default_statistics
    changed.revision = model.revision
    about_weights: dict[str, Any] = {"label_names": None, "training": {}, "accuracy": {}, "sha256": {}}
    changed.config = replace(model.config, num_classes=changed.num_classes, **about_weights)
    return changed.eval()
