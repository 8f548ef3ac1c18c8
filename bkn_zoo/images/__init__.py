"""Images: reading untrusted files, and preprocessing them for a network.

Pillow and PyTorch are imported at the first use of a name that needs them, because `bkn-zoo list` needs neither.
"""

from typing import TYPE_CHECKING, Any

from bkn_zoo.images.folders import SUFFIXES, image_files, passed_over
from bkn_zoo.images.preprocessing import INTERPOLATIONS, Preprocessing

if TYPE_CHECKING:
    from bkn_zoo.images.reading import MAX_PIXELS, ImageSource, open_header, open_image
    from bkn_zoo.images.transforms import central_square, enlarge, normalize, per_channel, preprocess, preprocess_square

__all__ = [
    "INTERPOLATIONS",
    "MAX_PIXELS",
    "SUFFIXES",
    "ImageSource",
    "Preprocessing",
    "central_square",
    "enlarge",
    "image_files",
    "normalize",
    "open_header",
    "open_image",
    "passed_over",
    "per_channel",
    "preprocess",
    "preprocess_square",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bkn_zoo.images import reading, transforms

    return getattr(reading if hasattr(reading, name) else transforms, name)
