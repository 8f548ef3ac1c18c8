"""Converted classifiers of torchvision and timm, with names such as "torchvision:resnet50" and "timm:repvgg_a0".

Name and options may come from an untrusted config.json. So only functions that the library lists are called, options
are plain numbers, and nothing is downloaded unless the caller requests the library's weights.
"""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bkn_zoo.conversion.converted import Converted, convert, converted_class
from bkn_zoo.errors import HubUnavailableError, InputError, UnknownNameError
from bkn_zoo.images.preprocessing import Preprocessing
from bkn_zoo.models.network import Network

REFUSED_OPTIONS = ("pretrained", "weights", "checkpoint", "cache", "scriptable", "exportable", "features_only")
"""Prefixes of options that would load something, or build something other than a classifier."""

WITHOUT_AUXILIARY_HEADS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


class LibraryNetwork(Converted, Network):
    """A converted classifier that checkpoints, training and inference support like the networks of the zoo."""

    def forward(self, images: Tensor, statistics: str | None = None) -> Tensor:  # type: ignore[override]
        """As in `Network`."""
        self._check(images)
        return super().forward(images, statistics=statistics)

    def forward_features(self, *args: Any, **kwargs: Any) -> Any:
        """Networks of timm have their own."""
        raise InputError(f"{self.name} has no forward_features: only networks of the zoo and of timm have it.")

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        """Replace the classifier: as the library's network does, or else the last linear layer."""
        original = getattr(self._original, "reset_classifier", None)
        if original is None:
            return super().reset_classifier(num_classes)
        original(self, num_classes, *args, **kwargs)
        if self.config is not None and num_classes:
            self.config = self.config.for_classes(num_classes)


def named_network(converted: Any, name: str, num_classes: int, options: dict[str, Any], stride: int) -> LibraryNetwork:
    """The converted network as a network of the zoo, with its name and options."""
    converted.__class__ = converted_class(LibraryNetwork, converted._original, converted._methods)
    converted.name, converted.num_classes, converted.norm_options = name, num_classes, options
    converted.stride, converted.config, converted.revision = stride, None, None
    return converted


def from_library(
    name: str, num_classes: int | None = None, options: Mapping[str, Any] | None = None, *, pretrained: bool = False
) -> LibraryNetwork:
    """A classifier of torchvision or timm, converted; `pretrained` downloads the library's own weights first.

    The options are numbers and lists of numbers for the library's constructor.
    """
    build, load = library_functions(name)
    options = dict(options or {})
    ours = {option: options.pop(option) for option in ("standardized_weights", "transition_rank") if option in options}
    if pretrained and ours.get("standardized_weights"):
        raise InputError(f"the weights of {name} were not standardized in their training: omit standardized_weights.")
    for option, value in options.items():
        plain = all(isinstance(x, bool | int | float) for x in (value if isinstance(value, list | tuple) else [value]))
        if option.startswith(REFUSED_OPTIONS) or not plain:
            raise InputError(f"{name} does not support {option}={value!r}: options are numbers or lists of numbers.")
    classes = 1000 if num_classes is None else num_classes
    if not isinstance(classes, int) or classes < 1:
        raise InputError(f"num_classes is {classes!r}: choose a whole number of at least 1.")
    try:
        with warnings.catch_warnings(action="ignore"):  # deprecation warnings of the library
            model = build(num_classes=classes, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(
            f"{name} does not support these options ({error}): correct {options or 'num_classes'}."
        ) from None
    if pretrained:
        try:
            weights = load()
        except Exception as error:  # any problem with the library's server
            raise HubUnavailableError(
                f"the weights of {name} could not be downloaded ({error}): try again later."
            ) from error
        # The classifier may be for other classes.
        own = model.state_dict()
        model.load_state_dict({k: v for k, v in weights.items() if k in own and own[k].shape == v.shape}, strict=False)
    about: Any = getattr(model, "pretrained_cfg", {})
    smallest = about["input_size"][-1] if about.get("fixed_input_size") else 75 if "inception" in name else 32
    return named_network(convert(model, **ours), name, classes, options | ours, smallest)


def preprocessing_of(name: str, size: int) -> Preprocessing:
    """The preprocessing of the library's weights of a network, for a given image size."""
    library, _, network = name.partition(":")
    library_functions(name)
    about: Any
    if library == "torchvision":
        import torchvision.models as models

        # TensorFlow's weights, for which torchvision changes the input inside the network.
        if network in WITHOUT_AUXILIARY_HEADS:
            return Preprocessing(size, (0.5,) * 3, (0.5,) * 3)
        about = models.get_model_weights(network).DEFAULT.transforms()
        return Preprocessing(size, about.mean, about.std, interpolation=about.interpolation.value)
    import timm

    about = timm.get_pretrained_cfg(network)
    return Preprocessing(size, about.mean, about.std, interpolation=about.interpolation)


def library_functions(name: str) -> tuple[Callable[..., nn.Module], Callable[[], Mapping[str, Tensor]]]:
    """The functions that build a network and load its weights; an error if the installed library does not have it."""
    library, _, network = name.partition(":")
    if library == "torchvision":
        import torchvision.models as models

        if network in models.list_models(module=models):
            options = WITHOUT_AUXILIARY_HEADS.get(network, {})
            return (
                lambda **given: models.get_model(network, weights=None, **options | given),
                lambda: models.get_model_weights(network).DEFAULT.get_state_dict(
                    check_hash=True, weights_only=True, progress=sys.stderr.isatty()
                ),
            )
    elif library == "timm":
        try:
            import timm
        except ImportError:
            raise UnknownNameError(f"{name} needs timm: install it with pip install 'bkn-zoo[timm]'.") from None
        if network in timm.list_models():
            return (
                lambda **given: timm.create_model(network, pretrained=False, **given),
                lambda: timm.create_model(network, pretrained=True).state_dict(),
            )
        untagged, dot, _ = network.partition(".")
        if dot and untagged in timm.list_models():
            raise UnknownNameError(
                f"names of timm's networks do not contain the tag of their weights: use timm:{untagged}."
            )
    raise UnknownNameError(
        f"the installed {library} has no classifier {network!r}: correct the name, or upgrade {library}."
    )
