"""The start of a training: a checkpoint or a library's pretrained network. Reading checkpoints needs no PyTorch."""

from pathlib import Path
from typing import NamedTuple

from bkn_zoo.checkpoints.builders import of_library
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG
from bkn_zoo.checkpoints.locate import is_folder, locate
from bkn_zoo.images.preprocessing import Preprocessing

LIBRARY_SIZE = 224
"""Side of the images for a library's network, unless the recipe sets another size."""


class Origin(NamedTuple):
    """A checkpoint or a library's network to start from.

    Attributes:
        init: the name that the caller passed.
        name: a name without paths of this machine.
        config: the config of the checkpoint; None for a library's network.
        preprocessing: the preprocessing that its weights were trained with, if known.
    """

    init: str
    name: str
    config: Config | None
    preprocessing: Preprocessing | None

    @property
    def key(self) -> str:
        """An identifier that does not depend on the working directory: the full path of a folder."""
        return str(Path(self.init).resolve()) if Path(self.init).exists() else self.init


def find_origin(init: str) -> Origin:
    """Find the start called `init`: a folder, a checkpoint's name, "owner/repo", "torchvision:NAME" or "timm:NAME"."""
    if of_library(init):
        from bkn_zoo.conversion.libraries import preprocessing_of

        return Origin(init, init, None, preprocessing_of(init, LIBRARY_SIZE))
    location = locate(init)
    config = Config.read(location.folder / CONFIG)
    name = location.folder.resolve().name if is_folder(init) else init
    if location.revision is not None:
        name = f"{init.partition('@')[0]}@{location.revision}"
    return Origin(init, name, config, config.preprocessing)
