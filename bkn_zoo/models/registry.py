"""The names of all networks: every registered network exists once per norm, as `<network>_<norm>`."""

import fnmatch
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from bkn_zoo.defaults import DEFAULT_CHECKPOINTS
from bkn_zoo.errors import InputError, UnknownNameError, did_you_mean
from bkn_zoo.models.network import Network
from bkn_zoo.norms.baselines import BatchNorm2d, BatchRenorm2d, GroupNorm2d
from bkn_zoo.norms.batch_kalman import INITIAL_GAIN, BatchKalmanNorm2d, new_process_noise
from bkn_zoo.norms.standardized import standardize_convolutions

NormFactory = Callable[..., nn.Module]
"""Makes the norm for channels and channels of the layer below (None for a first layer), with `eps` and `depthwise`."""


def batch_kalman(
    shared_process_noise: bool = True,
    initial_gain: float = INITIAL_GAIN,
    link: bool = True,
    initial_belief: bool = False,
    centered: bool = False,
    transition_rank: int | None = None,
) -> NormFactory:
    """BKN with one process noise R for all layers, as in the paper, or one per layer and channel.

    With `initial_belief`, the first layer has a prior of its own. With `centered`, the norms can start near the
    statistics of a population, as in converted networks. Without `link`, for ablations, the transition A is held at
    zero, so a layer only shrinks its observation towards N(0, R).
    """
    raw_process_noise = new_process_noise(1) if shared_process_noise else None

    def make(channels: int, channels_below: int | None, *, eps: float = 1e-5, depthwise: bool = False) -> nn.Module:
        first = channels_below is None
        # After a depthwise convolution each channel depends on one channel, so A is diagonal.
        shapes = [(channels,)] if depthwise else None
        norm = BatchKalmanNorm2d(
            channels,
            channels_below,
            eps,
            raw_process_noise=raw_process_noise,
            transition_shapes=shapes,
            transition_rank=transition_rank,
            initial_belief=initial_belief and first,
            centered=centered,
        )
        if norm.has_prior:
            norm.initial_gain = initial_gain
            norm.set_gain(initial_gain)
        if not first:
            norm.transition.requires_grad_(link)
        return norm

    return make


def without_belief(kind: Callable[..., nn.Module]) -> NormFactory:
    """The factory of a norm without beliefs, which ignores the layer below."""

    def make(channels: int, channels_below: int | None, *, depthwise: bool = False, **options: float) -> nn.Module:
        return kind(channels, channels_below, **options)

    return make


def batch_renorm(warmup: int = 5_000, r_steps: int = 40_000, d_steps: int = 25_000) -> NormFactory:
    """BRN with its schedule, in training steps."""
    return without_belief(partial(BatchRenorm2d, warmup=warmup, r_steps=r_steps, d_steps=d_steps))


def group_norm(channels_per_group: int | None = None) -> NormFactory:
    """GroupNorm with 32 groups per layer, or with groups of `channels_per_group` channels."""
    return without_belief(partial(GroupNorm2d, channels_per_group=channels_per_group))


NORMS: dict[str, Callable[..., NormFactory]] = {
    "bkn": batch_kalman,
    "bn": lambda: without_belief(BatchNorm2d),
    "brn": batch_renorm,
    "gn": group_norm,
}

COMMON = {"standardized_weights": False}
"""Options of all networks, and their defaults."""

RETIRED = ("prediction_bias", "gain_per_channel")
"""Options that BKN no longer has. The configs of old checkpoints may contain them, switched off."""

Builder = Callable[[NormFactory, int], Network]
_networks: dict[str, Builder] = {}
_default_classes: dict[str, int] = {}


def register(num_classes: int) -> Callable[[Builder], Builder]:
    """Register a network under its function's name, with its usual number of classes."""

    def wrap(build: Builder) -> Builder:
        if build.__name__ in _networks:
            raise InputError(f"a network named {build.__name__!r} is already registered: choose another name.")
        _networks[build.__name__], _default_classes[build.__name__] = build, num_classes
        return build

    return wrap


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """The names that `bkn_zoo.create_model` accepts, and that fit a shell-style pattern such as "*_bkn".

    With `pretrained`, only those with a default checkpoint, which `create_model(name, pretrained=True)` loads.
    """
    names = [f"{network}_{norm}" for network in _networks for norm in NORMS]
    return sorted(name for name in fnmatch.filter(names, pattern) if name in DEFAULT_CHECKPOINTS or not pretrained)


def options_of(name: str) -> dict[str, Any]:
    """The options of a registered network, with their defaults."""
    own = inspect.signature(NORMS[name.rpartition("_")[2]]).parameters.items()
    return COMMON | {option: known.default for option, known in own}


def build(name: str, num_classes: int | None = None, **norm_options: Any) -> Network:
    """A newly initialized network of the zoo. The arguments are those of `bkn_zoo.create_model`."""
    network, _, norm = name.rpartition("_")
    if network not in _networks or norm not in NORMS:
        known = list_models()
        close = f" (did you mean {name}_bkn?)" if name in _networks else did_you_mean(name, known)
        raise UnknownNameError(
            f"unknown model {name!r}{close}: choose one of {', '.join(known)}, or a network of a library, such as "
            "torchvision:resnet50 or timm:repvgg_a0, or convert your own with bkn_zoo.convert(network)."
        )
    num_classes = _default_classes[network] if num_classes is None else num_classes
    if not isinstance(num_classes, int) or num_classes < 1:
        raise InputError(f"num_classes is {num_classes!r}: choose a whole number of at least 1.")
    defaults = options_of(name)
    norm_options = {option: value for option, value in norm_options.items() if option not in RETIRED or value}
    unknown = ", ".join(repr(option) for option in norm_options if option not in defaults)
    if unknown:
        raise InputError(f"{name} does not have the options {unknown}: choose from {', '.join(defaults)}.")
    options = defaults | norm_options
    own = {option: value for option, value in options.items() if option not in COMMON}
    model = _networks[network](NORMS[norm](**own), num_classes)
    if options["standardized_weights"]:
        standardize_convolutions(model)
        model.standardized_weights = True
    # All options, because a later version may have other defaults.
    model.name, model.norm_options = name, options
    return model
