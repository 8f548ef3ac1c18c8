"""The base class of all networks, and the convolution with its norm."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bkn_zoo.errors import CheckpointError, InputError, few_names
from bkn_zoo.modes import Statistics, check_mode, choose_statistics
from bkn_zoo.norms.batch_kalman import OneNoise, multiplied_once
from bkn_zoo.norms.kalman import Belief
from bkn_zoo.norms.standardized import standardized_once

State = tuple[Tensor, Belief | None]
"""Features and the belief about them, which layers pass on."""


class BeliefNetwork(nn.Module):
    """A network whose norms share one choice of statistics per call: one of the zoo, or one from `bkn_zoo.convert`."""

    # Images per statistics group in training, and the group size of `expected` statistics; None means the whole batch.
    statistics_batch_size: int | None = None
    # The mode at inference, if a call does not choose one. With a property, torch.compile of torch 2.11 recurses.
    default_statistics: str = "population"
    # Whether convolutions before norms have standardized weights.
    standardized_weights: bool = False
    # Norms of a converted network that population statistics allow to fold into a convolution, with its name. None for
    # a network of the zoo, whose own code shows them.
    foldable: Mapping[str, str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "default_statistics":
            check_mode(value)
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["standardized_weights"] = self.standardized_weights

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # Raw weights of standardized convolutions fit plain ones, too, with which they compute something else.
        check_standardized(self, local_metadata.get("standardized_weights"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def check_standardized(model: BeliefNetwork, trained: bool | None) -> None:
    """Refuse weights that were trained with the other choice; None if that is not known."""
    if trained not in (None, model.standardized_weights):
        raise InputError(
            f"these weights were trained with standardized_weights={trained}: create or convert the network with the "
            "same option."
        )


class Network(BeliefNetwork, OneNoise):
    """A classifier of the zoo, with its name in the registry and all options of its norms, including defaults.

    `config` and `revision` are those of the checkpoint that it was loaded from.
    """

    stride: int  # of the whole network, and the smallest size of an image
    # Subclasses define these two. They are not defined here: a converted network may have modules of these names.
    features: Callable[[Tensor, Statistics], Tensor]  # images to the last feature map
    head: Callable[[Tensor], Tensor]  # last feature map to logits

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.name = ""
        self.norm_options: dict[str, Any] = {}
        self.num_classes = num_classes
        self.config: Any = None
        self.revision: str | None = None

    def forward(self, images: Tensor, statistics: Statistics | str | None = None) -> Tensor:
        """Logits, (images, classes), of preprocessed images, (images, 3, height, width).

        At inference, `statistics` is "population", "sample" or "expected".
        """
        return self.head(self.forward_features(images, statistics))

    def forward_features(self, images: Tensor, statistics: Statistics | str | None = None) -> Tensor:
        """The last feature map, (images, channels, height, width). The arguments are those of `forward`."""
        self._check(images)
        chosen = choose_statistics(self.training, statistics, self.statistics_batch_size, self.default_statistics)
        if images.shape[0] == 0:  # an empty batch has no statistics and needs none
            chosen = Statistics("population")
        if torch.compiler.is_compiling():
            return self.features(images, chosen)
        multiplied = multiplied_once(self, images) if self.norm_options.get("transition_rank") else nullcontext()
        with standardized_once(self) if self.standardized_weights else nullcontext(), multiplied:
            return self.features(images, chosen)

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier, which is the last linear layer, by a new one for `num_classes` classes."""
        if not isinstance(num_classes, int) or num_classes < 1:
            raise InputError(f"num_classes is {num_classes!r}: choose a whole number of at least 1.")
        name, old = [(name, layer) for name, layer in self.named_modules() if isinstance(layer, nn.Linear)][-1]
        parent, _, child = name.rpartition(".")
        new = nn.Linear(old.in_features, num_classes, device=old.weight.device, dtype=old.weight.dtype)
        setattr(self.get_submodule(parent), child, new)
        self.num_classes = num_classes
        if self.config is not None:
            self.config = self.config.for_classes(num_classes)

    def save_pretrained(self, folder: str | os.PathLike[str], **about: Any) -> None:
        """Write a checkpoint folder. The arguments are those of `bkn_zoo.save_pretrained`."""
        import_module("bkn_zoo.checkpoints.folder").save_pretrained(self, folder, **about)

    def push_to_hub(self, repository: str, **options: Any) -> Any:
        """Publish as "owner/repo" on the Hub, with options of `bkn_zoo.push_to_hub` and `bkn_zoo.save_pretrained`."""
        return import_module("bkn_zoo.checkpoints.folder").publish_network(self, repository, **options)

    def reset_parameters(self) -> None:
        """Initialize all weights, for example after `to_empty` of a network on the meta device."""
        resets = [getattr(module, "reset_parameters", None) for module in self.modules() if module is not self]
        for reset in filter(None, resets):
            reset()
        initialize(self)

    def _check(self, images: Tensor) -> None:
        if images.ndim != 4 or images.shape[1] != 3:
            raise InputError(f"images have the shape {tuple(images.shape)}: pass (images, 3, height, width).")
        if self.training and images.shape[0] == 0:
            raise InputError("the batch is empty: training needs at least one image.")
        if min(images.shape[2:]) < self.stride:
            raise InputError(
                f"images of {images.shape[2]} x {images.shape[3]} are smaller than the network's stride of "
                f"{self.stride}: enlarge them first."
            )
        if not images.is_floating_point():
            raise InputError(f"images are {images.dtype}: preprocess them to floating point numbers.")


class ConvNorm(nn.Module):
    """Convolution, pooling, norm, ReLU. Average pooling is cheaper here than before a 1x1 convolution."""

    def __init__(
        self,
        make_norm: Any,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        first: bool = False,
        pool: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.pool = pool
        self.norm = make_norm(out_channels, None if first else in_channels)

    def forward(self, state: State, statistics: Statistics) -> State:
        x, belief = state
        x = self.conv(x)
        if self.pool is not None:
            x = self.pool(x)
        return self.norm(x, belief, statistics, relu=True)


class Branch(nn.Sequential):
    """ConvNorms in sequence."""

    def forward(self, state: State, statistics: Statistics) -> State:  # type: ignore[override]
        for layer in self:
            state = layer(state, statistics)
        return state


def initialize(network: nn.Module) -> None:
    """He initialization with fan-out for convolutions; linear layers keep PyTorch's default."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            with torch.no_grad():
                # PyTorch includes the outputs of other groups in the fan-out.
                module.weight.mul_(math.sqrt(module.groups))


def global_average(x: Tensor) -> Tensor:
    # Unlike torch.mean, this pooling returns its gradient in the layout of x, so it is not copied.
    return torch.flatten(nn.functional.avg_pool2d(x, x.shape[2:]), 1)


def tensors_of(model: Network) -> dict[str, Tensor]:
    """The tensors that a checkpoint stores; a parameter that layers share occurs once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if first.setdefault(id(tensor), name) == name}


def check_tensors(where: str, model: Network, wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    network = f"{model.name} with {model.num_classes} classes"
    if missing := few_names(sorted(name for name in wanted if name not in given)):
        raise CheckpointError(f"{where} lacks {missing}: use the weights of {network}.")
    if extra := few_names(sorted(name for name in given if name not in wanted)):
        raise CheckpointError(
            f"{where} contains {extra}, which the network does not have: use the weights of {network}."
        )
    for name, tensor in wanted.items():
        shape = tuple(given[name].shape) if isinstance(given[name], Tensor) else "no tensor"
        if shape != tensor.shape:
            raise CheckpointError(
                f"{where}: {name} is {shape}, but {network} needs {tuple(tensor.shape)}: use the weights of that "
                "network, or correct its number of classes."
            )
