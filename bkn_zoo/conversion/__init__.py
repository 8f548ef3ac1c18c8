"""Converts networks from batch normalization to BKN."""

import warnings
from typing import Any

from bkn_zoo.checkpoints.builders import build_network, is_model
from bkn_zoo.conversion.converted import Converted, convert
from bkn_zoo.conversion.learning import LEARNING_GAIN, learn_statistics, load_batchnorm_weights, start_near_population
from bkn_zoo.conversion.libraries import LibraryNetwork, from_library
from bkn_zoo.conversion.proof import Proof, prove
from bkn_zoo.norms.batch_kalman import BATCHNORM_GAIN

__all__ = [
    "convert",
    "Converted",
    "prove",
    "Proof",
    "from_library",
    "is_model",
    "LibraryNetwork",
    "load_batchnorm_weights",
    "start_near_population",
    "BATCHNORM_GAIN",
    "LEARNING_GAIN",
    "learn_statistics",
]


def __getattr__(name: str) -> Any:
    if name == "create_model":
        warnings.warn("bkn_zoo.conversion.create_model is now bkn_zoo.create_model", DeprecationWarning, stacklevel=2)
        return build_network
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
