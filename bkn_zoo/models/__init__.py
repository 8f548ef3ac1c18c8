"""Networks: importing this package registers them all."""

import warnings
from typing import Any

from bkn_zoo.models import efficientnet_lite, inception, resnet  # noqa: F401
from bkn_zoo.models.network import Network
from bkn_zoo.models.registry import build, list_models

__all__ = ["Network", "build", "list_models"]


def __getattr__(name: str) -> Any:
    if name == "create_model":
        warnings.warn("bkn_zoo.models.create_model is now bkn_zoo.create_model", DeprecationWarning, stacklevel=2)
        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
