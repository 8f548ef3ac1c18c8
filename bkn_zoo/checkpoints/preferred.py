"""Which checkpoint to use where the caller names none."""

from collections.abc import Iterator

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.errors import CheckpointError

PREFERRED_CHECKPOINT = "efficientnet_lite0_bkn.imagenet"
"""Not the most accurate, but no slower and no larger than others for photographs: results/benchmark_defaults.*.json."""

NETWORKS = (
    "efficientnet_lite0",
    "efficientnet_lite1",
    "efficientnet_lite2",
    "inception_cifar",
    "inception_v2",
    "resnet101",
)
"""Of the zoo itself: known here, so that choosing one of their checkpoints does not import PyTorch."""


def default_checkpoint() -> str:
    """The name of the checkpoint to use where none is named."""
    return usable_checkpoints()[0]


def usable_checkpoints() -> list[str]:
    """The names of those that can classify images, in the order to prefer them in; an error if there is none.

    The preferred one if it is there, then BKN networks before others, then those that tell most classes apart, then the
    most accurate ones. `bkn-zoo list` has the same order.
    """
    ranked = sorted(
        (name != PREFERRED_CHECKPOINT, config.norm != "bkn", -config.num_classes, -(top1(config) or 0.0), name)
        for name, config in _usable(list_checkpoints())
    )
    if not ranked:
        raise CheckpointError(
            "there is no checkpoint here that classifies images: name one, a folder or owner/repo on the Hub "
            "(by --checkpoint in a shell), or put some into a folder that the variable BKN_ZOO_CHECKPOINTS names."
        )
    return [rank[-1] for rank in ranked]


def top1(config: Config) -> float | None:
    """The accuracy that a checkpoint reports in its default mode."""
    return config.accuracy.get(config.default_statistics, {}).get("top1")


def _usable(names: list[str]) -> Iterator[tuple[str, Config]]:
    for name in names:
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError:  # loading it by name says why
            continue
        if config.preprocessing is not None and _is_model(config.architecture):
            yield name, config


def _is_model(architecture: str) -> bool:
    if architecture.rpartition("_")[0] in NETWORKS:
        return True
    from bkn_zoo.conversion.libraries import is_model  # which imports PyTorch

    return is_model(architecture)
