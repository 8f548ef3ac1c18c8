"""The network of a recipe, with new weights or those of a checkpoint or library."""

import torch

from bkn_zoo.checkpoints.builders import build_network, of_library
from bkn_zoo.checkpoints.folder import from_pretrained
from bkn_zoo.conversion.libraries import from_library
from bkn_zoo.errors import InputError
from bkn_zoo.models import Network
from bkn_zoo.training.recipes import Recipe
from bkn_zoo.training.state import classifier


def build(recipe: Recipe, init: str | None, label_names: list[str]) -> Network:
    """The recipe's network for these classes, with the weights of `init` if there is one.

    The classifier of `init` is kept if its classes have the same names. If it knows all classes, among others, its rows
    for these are kept. Otherwise the classifier starts at zero.
    """
    model = build_network(recipe.model, len(label_names), **recipe.norm_options)
    if init is None:
        return model
    source = from_library(init, pretrained=True) if of_library(init) else from_pretrained(init)
    weights = source.state_dict()
    known = list((source.config and source.config.label_names) or ())
    fresh = set() if known == label_names else _classifier(source, model)
    rows = [known.index(name) for name in label_names] if set(label_names) <= set(known) else None
    with torch.no_grad():
        for name in fresh:
            if rows is not None:
                model.get_parameter(name).copy_(weights[name][rows])
            else:  # zero, so that no class is preferred, and no noise reaches the layers below
                model.get_parameter(name).zero_()
    model.default_statistics = source.default_statistics
    try:
        kept = {name: tensor for name, tensor in weights.items() if name not in fresh}
        missing, extra = model.load_state_dict(kept, strict=False)
    except RuntimeError:  # a tensor has another shape
        missing, extra = [], list(weights)
    if extra or set(missing) - fresh:
        raise InputError(
            f"{init} is a {source.name}, whose weights do not fit {recipe.model}: use the same model and options."
        )
    return model


def _classifier(source: Network, model: Network) -> set[str]:
    """The tensors that differ only in the number of classes; if it is equal, those of the last layer."""
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
