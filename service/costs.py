"""How long an image takes to decode, by what its first bytes say.

The times are those of one slow core, measured for each class of file: `python tests/attack.py --costs` prints them. A
file that takes longer than `CHEAP`, or whose structure can make Pillow take long, is decoded apart from small images.
"""

import struct
from typing import NamedTuple

from PIL.ImageFile import ImageFile

from bkn_zoo.images.formats import find_format, tiff_size, webp_size
from bkn_zoo.images.reading import open_header

CHEAP = 0.06  # seconds
MAX_SEGMENTS = 256  # of a JPEG or chunks of a PNG; Pillow takes Python microseconds for each
PNG, PNG_WITH_ALPHA, BMP, WEBP = 40e-9, 80e-9, 5e-9, 60e-9  # seconds per pixel
JPEG, JPEG_SCAN = 15e-9, 2.5e-9  # seconds per pixel, and of a progressive one per pixel and scan
JPEG_BYTE, PROGRESSIVE_BYTE = 20e-9, 45e-9  # seconds per byte


class Cost(NamedTuple):
    """What decoding takes.

    Attributes:
        pixels: how many the file says it has; 0 if it does not say.
        seconds: estimated; infinite for formats whose structure can hide work.
        image: opened if the file is cheap, otherwise None.
    """

    pixels: int
    seconds: float
    image: ImageFile | None = None


def estimate(data: bytes, max_pixels: int) -> Cost:
    """The cost of a file; raises ImageError where its header shows that it cannot be used."""
    kind = find_format(data, "the image")
    width, height = _size(kind, data)
    pixels = width * height
    if kind in ("GIF", "TIFF") or not _has_few_segments(kind, data):
        return Cost(pixels, float("inf"))
    if kind == "WebP" and CHEAP < WEBP * pixels <= WEBP * max_pixels:
        return Cost(pixels, WEBP * pixels)  # opening it would allocate all pixels
    image = open_header(data, max_pixels)
    pixels = image.width * image.height
    seconds = _seconds(kind, image, pixels, data)
    return Cost(pixels, seconds, image if seconds <= CHEAP else None)


def _seconds(kind: str, image: ImageFile, pixels: int, data: bytes) -> float:
    if kind == "JPEG":
        if not image.info.get("progressive"):
            return JPEG * pixels + JPEG_BYTE * len(data)
        return (JPEG + JPEG_SCAN * data.count(b"\xff\xda")) * pixels + PROGRESSIVE_BYTE * len(data)
    if kind == "PNG":
        plain = image.mode in ("1", "L", "P", "RGB") and "transparency" not in image.info
        return (PNG if plain else PNG_WITH_ALPHA) * pixels
    return {"BMP": BMP, "WebP": WEBP}[kind] * pixels


def _size(kind: str, data: bytes) -> tuple[int, int]:
    """Width and height of formats that are costly to open; 0 for others, and where they are missing."""
    try:
        if kind == "TIFF":
            return tiff_size(data)
        if kind == "WebP":
            return webp_size(data)
        if kind == "GIF":
            width, height = struct.unpack_from("<HH", data, 6)
            return width, height
    except (struct.error, KeyError, ValueError):
        pass
    return 0, 0


def _has_few_segments(kind: str, data: bytes) -> bool:
    """Whether a PNG, or a JPEG up to its pixels, has few; where it is damaged, opening it says so."""
    place = {"PNG": 8, "JPEG": 2}.get(kind)
    if place is None:
        return True
    for _ in range(MAX_SEGMENTS):
        try:
            if kind == "PNG":
                length, name = struct.unpack_from(">I4s", data, place)
                place += 12 + length
            else:
                name, length = struct.unpack_from(">2sH", data, place)
                place += 2 + length
        except struct.error:
            return True
        if name in (b"IEND", b"\xff\xda"):
            return True
    return False
