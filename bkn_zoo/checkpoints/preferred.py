"""Which checkpoint to use where the caller names none."""

from collections.abc import Iterator

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.conversion.libraries import is_model
from bkn_zoo.errors import CheckpointError

PREFERRED_CHECKPOINT = "inception_v2_bkn.tiny_imagenet"  # not the most accurate, but far faster than that


def default_checkpoint() -> str:
    """The name of the checkpoint to use where none is named."""
    return usable_checkpoints()[0]


def usable_checkpoints() -> list[str]:
    """The names of those that can classify images, in the order to prefer them in; an error if there is none.

    The preferred one if it is there, then BKN networks before others, then those that tell most classes apart.
    """
    ranked = sorted(
        (name != PREFERRED_CHECKPOINT, config.norm != "bkn", -config.num_classes, name)
        for name, config in _usable(list_checkpoints())
    )
    if not ranked:
        raise CheckpointError(
            "there is no checkpoint here that classifies images: name one, a folder or owner/repo on the Hub "
            "(by --model in a shell), or put some into a folder that the variable BKN_ZOO_CHECKPOINTS names."
        )
    return [rank[-1] for rank in ranked]


def _usable(names: list[str]) -> Iterator[tuple[str, Config]]:
    for name in names:
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError:  # who asks for it by name will be told
            continue
        if config.preprocessing is not None and is_model(config.architecture):
            yield name, config
