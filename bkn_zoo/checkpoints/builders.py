"""Networks by their names: those of the zoo, and those of libraries, such as "timm:repvgg_a0".

Networks of libraries are built by a layer above this one. So `bkn_zoo/__init__.py` enters the name of its module into a
table, and the module is imported when one of its networks is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bkn_zoo.errors import UnknownNameError

if TYPE_CHECKING:
    from bkn_zoo.models.network import Network

LIBRARY_MODULES: dict[str, str] = {}
"""By library, the module that builds its networks. It has the functions `from_library` and `check_name`."""


def build_network(name: str, num_classes: int | None = None, **options: Any) -> "Network":
    """A newly initialized network of the zoo or of a library. The arguments are those of `bkn_zoo.create_model`."""
    if ":" in name:
        return _module_of(name).from_library(name, num_classes, options)
    from bkn_zoo.models import registry  # imports PyTorch

    return registry.build(name, num_classes, **options)


def of_library(name: str) -> bool:
    """Whether this has the form of a library's network name, even if it does not exist."""
    return name.partition(":")[0] in LIBRARY_MODULES and ":" in name


def is_model(name: str) -> bool:
    """Whether `build_network` supports this name."""
    if ":" not in name:
        from bkn_zoo.models import registry  # imports PyTorch

        return name in registry.list_models()
    try:
        _module_of(name).check_name(name)
    except UnknownNameError:
        return False
    return True


def _module_of(name: str) -> Any:
    library = name.partition(":")[0]
    if library not in LIBRARY_MODULES:
        raise UnknownNameError(f"unknown library in {name!r}: choose one of {', '.join(LIBRARY_MODULES)}.")
    return import_module(LIBRARY_MODULES[library])
