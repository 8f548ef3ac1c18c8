"""Running averages taken anew by the final weights, to be compared with those that a training left."""

import copy
from collections.abc import Iterable

from torch import Tensor

from bkn_zoo.models import Network
from bkn_zoo.norms.recalibration import recalibrate
from bkn_zoo.norms.running import RunningNorm


def layers(model: Network) -> list[RunningNorm]:
    return [module for module in model.modules() if isinstance(module, RunningNorm)]


def recalibrated(model: Network, batches: Iterable[Tensor]) -> Network:
    """A copy whose running averages are taken anew over `batches`, by the weights as they are now."""
    model = copy.deepcopy(model)
    recalibrate(model, batches)
    return model
