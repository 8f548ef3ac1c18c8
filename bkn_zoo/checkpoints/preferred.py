"""The checkpoint to use if the caller does not name one."""

from collections.abc import Iterator

from bkn_zoo.checkpoints.builders import is_model
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.defaults import NETWORKS, PREFERRED_CHECKPOINT
from bkn_zoo.errors import CheckpointError


def default_checkpoint() -> str:
    """The name of the default checkpoint."""
    return usable_checkpoints()[0]


def usable_checkpoints() -> list[str]:
    """The names of all checkpoints that classify images, in order of preference; an error if there is none.

    First the preferred one, if it exists, then BKN networks before others, then those with more classes, then the more
    accurate ones. `bkn-zoo list` has the same order.
    """
    ranked = sorted(
        (name != PREFERRED_CHECKPOINT, config.norm != "bkn", -config.num_classes, -(config.top1 or 0.0), name)
        for name, config in _usable(list_checkpoints())
    )
    if not ranked:
        raise CheckpointError(
            "no checkpoint that classifies images was found: name a folder or owner/repo on the Hub (in a shell with "
            "--checkpoint), or set BKN_ZOO_CHECKPOINTS to a folder of checkpoints."
        )
    return [rank[-1] for rank in ranked]


def _usable(names: list[str]) -> Iterator[tuple[str, Config]]:
    for name in names:
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError:  # loading it by name will say why
            continue
        network = config.architecture.rpartition("_")[0]
        if config.preprocessing is not None and (network in NETWORKS or is_model(config.architecture)):
            yield name, config
