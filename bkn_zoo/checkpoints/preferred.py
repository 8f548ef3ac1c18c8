"""The checkpoint to use if the caller does not name one."""

from collections.abc import Iterator

from bkn_zoo.checkpoints.builders import is_model
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import find, list_checkpoints
from bkn_zoo.errors import CheckpointError

PREFERRED_CHECKPOINT = "efficientnet_lite0_bkn.imagenet"
"""Not the most accurate checkpoint, but the fastest and smallest for photographs: results/benchmark_defaults.*.json."""

NETWORKS = (
    "efficientnet_lite0",
    "efficientnet_lite1",
    "efficientnet_lite2",
    "inception_cifar",
    "inception_v2",
    "resnet101",
)
"""The networks of the zoo, listed here so that choosing a checkpoint does not import PyTorch."""


def default_checkpoint() -> str:
    """The name of the default checkpoint."""
    return usable_checkpoints()[0]


def usable_checkpoints() -> list[str]:
    """The names of all checkpoints that classify images, in order of preference; an error if there is none.

    First the preferred one, if it exists, then BKN networks before others, then those with more classes, then the more
    accurate ones. `bkn-zoo list` has the same order.
    """
    ranked = sorted(
        (name != PREFERRED_CHECKPOINT, config.norm != "bkn", -config.num_classes, -(top1(config) or 0.0), name)
        for name, config in _usable(list_checkpoints())
    )
    if not ranked:
        raise CheckpointError(
            "no checkpoint that classifies images was found: name a folder or owner/repo on the Hub (in a shell with "
            "--checkpoint), or set BKN_ZOO_CHECKPOINTS to a folder of checkpoints."
        )
    return [rank[-1] for rank in ranked]


def top1(config: Config) -> float | None:
    """The accuracy that a checkpoint reports in its default mode."""
    return config.accuracy.get(config.default_statistics, {}).get("top1")


def _usable(names: list[str]) -> Iterator[tuple[str, Config]]:
    for name in names:
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError:  # loading it by name will say why
            continue
        if config.preprocessing is not None and _is_model(config.architecture):
            yield name, config


def _is_model(architecture: str) -> bool:
    return architecture.rpartition("_")[0] in NETWORKS or is_model(architecture)
