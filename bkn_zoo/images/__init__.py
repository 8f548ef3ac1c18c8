"""Images: reading untrusted files, and preprocessing them for a network.

    folders         which files of a folder are images
    formats         the accepted formats, and what of a file is safe to read
    reading         a file, an array or an image of Pillow's, as an upright RGB image
    preprocessing   what a checkpoint's config says about its input
    transforms      from an RGB image to that input

Pillow and PyTorch are imported when a name that needs them is first used: `bkn-zoo list` needs neither.
"""

from typing import TYPE_CHECKING, Any

from bkn_zoo.images.folders import SUFFIXES, image_files, passed_over
from bkn_zoo.images.preprocessing import INTERPOLATIONS, Preprocessing

if TYPE_CHECKING:
    from bkn_zoo.images.reading import MAX_PIXELS, ImageSource, open_header, open_image
    from bkn_zoo.images.transforms import central_square, enlarge, normalize, per_channel, preprocess

__all__ = [
    "open_image",
    "open_header",
    "preprocess",
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
