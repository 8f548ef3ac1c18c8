"""From batch normalization to BKN."""

from bkn_zoo.conversion.batchnorm import (
    BATCHNORM_GAIN,
    LEARNING_GAIN,
    load_batchnorm_weights,
    start_near_population,
)
from bkn_zoo.conversion.converted import Converted, convert
from bkn_zoo.conversion.learning import Learned, learn_statistics
from bkn_zoo.conversion.libraries import LibraryNetwork, create_model, from_library, is_model
from bkn_zoo.conversion.measure import Advice, Shift, advise, measure
from bkn_zoo.conversion.proof import Proof, prove

__all__ = [
    "convert",
    "Converted",
    "prove",
    "Proof",
    "create_model",
    "from_library",
    "is_model",
    "LibraryNetwork",
    "load_batchnorm_weights",
    "start_near_population",
    "BATCHNORM_GAIN",
    "LEARNING_GAIN",
    "measure",
    "Shift",
    "advise",
    "learn_statistics",
    "Learned",
    "Advice",
]
