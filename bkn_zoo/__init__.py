"""Batch Kalman Normalization: the layer, networks that use it, and their checkpoints."""

from bkn_zoo.checkpoints import from_pretrained, list_checkpoints, save_pretrained
from bkn_zoo.errors import BknZooError, CheckpointError, InputError, UnknownNameError
from bkn_zoo.models import Network, create_model, list_models

__version__ = "0.1.0"

__all__ = [
    "list_models",
    "create_model",
    "list_checkpoints",
    "from_pretrained",
    "save_pretrained",
    "Network",
    "BknZooError",
    "UnknownNameError",
    "InputError",
    "CheckpointError",
]
