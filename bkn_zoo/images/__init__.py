"""Images: reading untrusted files, and preprocessing them for a network.

    folders         which files of a folder are images
    formats         the supported formats, and removal of unsafe parts of files
    reading         files, arrays and PIL images as upright RGB images
    preprocessing   the preprocessing settings of a checkpoint
    transforms      from an RGB image to the network's input

Pillow and PyTorch are imported at the first use of a name that needs them, because `bkn-zoo list` needs neither.
"""

from typing import TYPE_CHECKING, Any

from bkn_zoo.images.folders import SUFFIXES, image_files, passed_over
from bkn_zoo.images.preprocessing import INTERPOLATIONS, Preprocessing

if TYPE_CHECKING:
    from bkn_zoo.images.reading import MAX_PIXELS, ImageSource, open_header, open_image
    from bkn_zoo.images.transforms import central_square, enlarge, normalize, per_channel, preprocess, preprocess_square

__all__ = [
    "open_image",
    "open_header",
    "preprocess",
    "preprocess_square",
    "Preprocessing",
    "INTERPOLATIONS",
    "central_square",
    "enlarge",
    "normalize",
    "per_channel",
    "image_files",
    "passed_over",
    "ImageSource",
    "SUFFIXES",
    "MAX_PIXELS",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bkn_zoo.images import reading, transforms

    value = getattr(reading if hasattr(reading, name) else transforms, name)
    globals()[name] = value
    return value
