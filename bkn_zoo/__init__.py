"""Batch Kalman Normalization: the layer, networks that use it, and their checkpoints."""

from typing import TYPE_CHECKING, Any

from bkn_zoo.checkpoints.folder import list_checkpoints, save_pretrained
from bkn_zoo.checkpoints.hub import from_pretrained, push_to_hub
from bkn_zoo.errors import BknZooError, CheckpointError, InputError, UnknownNameError
from bkn_zoo.models import Network, create_model, list_models

if TYPE_CHECKING:
    from bkn_zoo.inference.classifier import Classifier

__version__ = "0.1.0"

__all__ = [
    "list_models",
    "create_model",
    "list_checkpoints",
    "from_pretrained",
    "save_pretrained",
    "push_to_hub",
    "Classifier",
    "Network",
    "BknZooError",
    "UnknownNameError",
    "InputError",
    "CheckpointError",
]


def __getattr__(name: str) -> Any:
    """The classifier when it is first used: it imports OpenVINO, which training and the layers do not need."""
    if name == "Classifier":
        from bkn_zoo.inference.classifier import Classifier

        return Classifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
