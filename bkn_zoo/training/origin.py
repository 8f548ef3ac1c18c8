"""What a training starts from: a checkpoint, a library's pretrained network, or new weights."""

from pathlib import Path
from typing import NamedTuple

import torch

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.checkpoints.locate import is_folder, locate
from bkn_zoo.conversion.libraries import build as build_model
from bkn_zoo.conversion.libraries import from_library, of_library, preprocessing_of
from bkn_zoo.errors import InputError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.models import Network
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import classifier

LIBRARY_SIZE = 224
"""Side of the images for a library's network, unless the recipe says otherwise."""


class Origin(NamedTuple):
    """A checkpoint or a library's network to start from.

    Attributes:
        init: as the caller named it.
        name: as others may know it: not a path on this machine.
        config: of the checkpoint; None for a library's network.
        preprocessing: that its weights were trained with, if known.
    """

    init: str
    name: str
    config: Config | None
    preprocessing: Preprocessing | None

    @property
    def key(self) -> str:
        """Identifies it from any working directory: a folder by its whole path."""
        return str(Path(self.init).resolve()) if Path(self.init).exists() else self.init


def find_origin(init: str) -> Origin:
    """Describe what `init` names: a folder, a checkpoint's name, "owner/repo", "torchvision:NAME" or "timm:NAME"."""
    if of_library(init):
        return Origin(init, init, None, preprocessing_of(init, LIBRARY_SIZE))
    location = locate(init)
    config = Config.read(location.folder / CONFIG)
    name = location.folder.resolve().name if is_folder(init) else init
    if location.revision is not None:
        name = f"{init.partition('@')[0]}@{location.revision}"
    return Origin(init, name, config, config.preprocessing)


def build(recipe: Recipe, init: str | None, label_names: list[str]) -> Network:
    """The recipe's network for these classes, with the weights of `init` if there is one.

    The classifier of `init` is kept if its classes have the same names. Otherwise it starts at zero.
    """
    model = build_model(recipe.model, len(label_names), **recipe.norm_options)
    if init is None:
        return model
    source = from_library(init, pretrained=True) if of_library(init) else from_pretrained(init)
    weights = source.state_dict()
    known = source.config is not None and source.config.label_names
    fresh = set() if known and list(known) == label_names else _classifier(source, model)
    with torch.no_grad():
        for name in fresh:  # zero: no class is preferred, and no noise reaches the layers below
            model.get_parameter(name).zero_()
    model.default_statistics = source.default_statistics
    try:
        kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
        missing, extra = model.load_state_dict(kept, strict=False)
    except RuntimeError:  # a tensor of another shape
        missing, extra = [], list(weights)
    if extra or set(missing) - fresh:
        raise InputError(
            f"{init} is a {source.name}, whose weights do not fit {recipe.model}: choose its own model and options."
        )
    return model


def _classifier(source: Network, model: Network) -> set[str]:
    """The tensors that differ only in the number of classes; if that is equal, those of the last layer."""
    if source.num_classes == model.num_classes:
        last = {id(tensor) for tensor in classifier(model).parameters()}
        return {name for name, tensor in model.named_parameters() if id(tensor) in last}
    own = model.state_dict()
    return {
        name
        for name, tensor in source.state_dict().items()
        if name in own
        and (tensor.shape[:1], own[name].shape[:1]) == ((source.num_classes,), (model.num_classes,))
        and tensor.shape[1:] == own[name].shape[1:]
    }
