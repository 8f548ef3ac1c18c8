"""Networks by their names: those of the zoo, and those of libraries, which a module of an upper layer builds."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bkn_zoo.errors import UnknownNameError

if TYPE_CHECKING:
    from bkn_zoo.models.network import Network

LIBRARIES = ("torchvision", "timm")


def build_network(name: str, num_classes: int | None = None, **options: Any) -> "Network":
    """A newly initialized network of the zoo or of a library. The arguments are those of `bkn_zoo.create_model`."""
    if ":" in name:
        return _libraries(name).from_library(name, num_classes, options)
    from bkn_zoo.models import registry  # imports PyTorch

    return registry.build(name, num_classes, **options)


def of_library(name: str) -> bool:
    """Whether this has the form of a library's network name, even if it does not exist."""
    return name.startswith(tuple(f"{library}:" for library in LIBRARIES))


def is_model(name: str) -> bool:
    """Whether `build_network` supports this name."""
    if ":" not in name:
        from bkn_zoo.models import registry  # imports PyTorch

        return name in registry.list_models()
    try:
        _libraries(name).library_functions(name)
    except UnknownNameError:
        return False
    return True


def _libraries(name: str) -> Any:
    if not of_library(name):
        raise UnknownNameError(f"unknown library in {name!r}: choose one of {', '.join(LIBRARIES)}.")
    # By its name, because imports lead to lower layers.
    return import_module("bkn_zoo.conversion.libraries")
