"""Batch Kalman Normalization: the layer, networks that use it, and their checkpoints.

Every name is imported at its first use. So using the layer does not import the Hub, images or OpenVINO, and listing
checkpoints does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bkn_zoo.errors import BknZooError, CheckpointError, InputError, NonFiniteLossError, TrainingError, UnknownNameError
from bkn_zoo.upper import UPPER_MODULES
from bkn_zoo.version import __version__

if TYPE_CHECKING:
    from bkn_zoo.checkpoints.folder import from_pretrained, save_pretrained
    from bkn_zoo.checkpoints.hub import push_to_hub
    from bkn_zoo.checkpoints.locate import list_checkpoints
    from bkn_zoo.conversion import convert, learn_statistics, start_near_population
    from bkn_zoo.create import create_model
    from bkn_zoo.images import Preprocessing
    from bkn_zoo.inference.classifier import Classifier
    from bkn_zoo.inference.export import export
    from bkn_zoo.models import Network, list_models
    from bkn_zoo.norms import (
        BatchKalmanNorm,
        BatchKalmanNorm1d,
        BatchKalmanNorm2d,
        BatchKalmanNorm3d,
        KalmanSequential,
        no_weight_decay,
        recalibrate,
    )
    from bkn_zoo.training.finish import TrainingResult
    from bkn_zoo.training.recipes import Recipe
    from bkn_zoo.training.run import fine_tune, train

__all__ = [
    "BatchKalmanNorm",
    "BatchKalmanNorm1d",
    "BatchKalmanNorm2d",
    "BatchKalmanNorm3d",
    "KalmanSequential",
    "no_weight_decay",
    "recalibrate",
    "list_models",
    "create_model",
    "convert",
    "start_near_population",
    "learn_statistics",
    "list_checkpoints",
    "from_pretrained",
    "save_pretrained",
    "push_to_hub",
    "train",
    "fine_tune",
    "Recipe",
    "TrainingResult",
    "Classifier",
    "export",
    "Network",
    "Preprocessing",
    "BknZooError",
    "UnknownNameError",
    "InputError",
    "CheckpointError",
    "TrainingError",
    "NonFiniteLossError",
    "__version__",
]

LAZY_NAMES = {
    name: f"bkn_zoo.{module}"
    for module, names in {
        "checkpoints.folder": ("from_pretrained", "save_pretrained"),
        "checkpoints.hub": ("push_to_hub",),
        "checkpoints.locate": ("list_checkpoints",),
        "conversion": ("convert", "learn_statistics", "start_near_population"),
        "create": ("create_model",),
        "images": ("Preprocessing",),
        "inference.classifier": ("Classifier",),
        "inference.export": ("export",),
        "models": ("Network", "list_models"),
        "norms": (*(name for name in __all__ if "Kalman" in name), "no_weight_decay", "recalibrate"),
        "training.finish": ("TrainingResult",),
        "training.recipes": ("Recipe",),
        "training.run": ("fine_tune", "train"),
    }.items()
    for name in names
}
"""The modules of the names above."""

PACKAGES = ("checkpoints", "conversion", "images", "inference", "kernels", "models", "norms", "publishing", "training")
"""Packages that can be used as attributes, such as `bkn_zoo.norms`, without importing them first."""

UPPER_MODULES.update(checkpoints="bkn_zoo.checkpoints.folder", libraries="bkn_zoo.conversion.libraries")


def __getattr__(name: str) -> Any:
    if name in LAZY_NAMES:
        value = getattr(import_module(LAZY_NAMES[name]), name)
    elif name in PACKAGES:
        value = import_module(f"bkn_zoo.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # look it up only once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_NAMES, *PACKAGES})
