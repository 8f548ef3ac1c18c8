"""Batch Kalman Normalization: the layer, networks that use it, and their checkpoints.

Every name is imported at its first use. So using the layer does not import the Hub, images or OpenVINO, and listing
checkpoints does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bkn_zoo.errors import BknZooError, CheckpointError, InputError, NonFiniteLossError, TrainingError, UnknownNameError
from bkn_zoo.version import __version__

if TYPE_CHECKING:
    from bkn_zoo.checkpoints.folder import from_pretrained as from_pretrained
    from bkn_zoo.checkpoints.folder import save_pretrained as save_pretrained
    from bkn_zoo.checkpoints.hub import push_to_hub as push_to_hub
    from bkn_zoo.checkpoints.locate import list_checkpoints as list_checkpoints
    from bkn_zoo.conversion import convert as convert
    from bkn_zoo.conversion import learn_statistics as learn_statistics
    from bkn_zoo.conversion import start_near_population as start_near_population
    from bkn_zoo.create import create_model as create_model
    from bkn_zoo.images import Preprocessing as Preprocessing
    from bkn_zoo.inference.classifier import Classifier as Classifier
    from bkn_zoo.inference.export import export as export
    from bkn_zoo.models import Network as Network
    from bkn_zoo.models import list_models as list_models
    from bkn_zoo.norms import BatchKalmanNorm as BatchKalmanNorm
    from bkn_zoo.norms import BatchKalmanNorm1d as BatchKalmanNorm1d
    from bkn_zoo.norms import BatchKalmanNorm2d as BatchKalmanNorm2d
    from bkn_zoo.norms import BatchKalmanNorm3d as BatchKalmanNorm3d
    from bkn_zoo.norms import KalmanSequential as KalmanSequential
    from bkn_zoo.norms import no_weight_decay as no_weight_decay
    from bkn_zoo.norms import recalibrate as recalibrate
    from bkn_zoo.training.finish import TrainingResult as TrainingResult
    from bkn_zoo.training.recipes import Recipe as Recipe
    from bkn_zoo.training.run import fine_tune as fine_tune
    from bkn_zoo.training.run import train as train

LAZY_NAMES = {
    name: f"bkn_zoo.{module}"
    for module, names in {
        "norms": "BatchKalmanNorm BatchKalmanNorm1d BatchKalmanNorm2d BatchKalmanNorm3d KalmanSequential "
        "no_weight_decay recalibrate",
        "models": "Network list_models",
        "create": "create_model",
        "conversion": "convert start_near_population learn_statistics",
        "checkpoints.locate": "list_checkpoints",
        "checkpoints.folder": "from_pretrained save_pretrained",
        "checkpoints.hub": "push_to_hub",
        "training.run": "train fine_tune",
        "training.recipes": "Recipe",
        "training.finish": "TrainingResult",
        "inference.classifier": "Classifier",
        "inference.export": "export",
        "images": "Preprocessing",
    }.items()
    for name in names.split()
}
"""The public names, and their modules."""

__all__ = ["BknZooError", "CheckpointError", "InputError", "NonFiniteLossError", "TrainingError", "UnknownNameError"]
__all__ += [*LAZY_NAMES, "__version__"]

PACKAGES = ("checkpoints", "conversion", "images", "inference", "kernels", "models", "norms", "publishing", "training")
"""Packages that can be used as attributes, such as `bkn_zoo.norms`, without importing them first."""


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
