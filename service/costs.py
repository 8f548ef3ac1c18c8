"""How an image is decoded, by what its first bytes say.

The times are those of one slow core, measured for each class of file: `python tests/attack.py --costs` prints them.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from PIL.ImageFile import ImageFile

from bkn_zoo.images.formats import find_format, tiff_size, webp_size
from bkn_zoo.images.reading import open_header

# Seconds; above it an image is decoded in a process.
CHEAP = 0.06
# Seconds up to which a plain JPEG or PNG is a photograph.
PHOTOGRAPH = 0.6
# Of a JPEG, or chunks of a PNG; Pillow takes Python microseconds for each.
MAX_SEGMENTS = 256
# Seconds per pixel.
PNG, PNG_WITH_ALPHA, BMP, WEBP, JPEG = 40e-9, 80e-9, 5e-9, 60e-9, 15e-9
# Seconds per pixel and scan of a progressive JPEG.
JPEG_SCAN = 2.5e-9
# Seconds per byte. A PNG may consist of empty deflate blocks.
JPEG_BYTE, PROGRESSIVE_BYTE, PNG_BYTE = 20e-9, 45e-9, 100e-9
# Of a JPEG: frames of the usual kind, which are neither progressive nor arithmetically coded.
USUAL_FRAMES = {b"\xff\xc0", b"\xff\xc1"}


class Kind(IntEnum):
    """Which images an image may have to wait for: those of its own kind."""

    CHEAP = 0
    PHOTOGRAPH = 1
    SLOW = 2


class Cost(NamedTuple):
    """What decoding takes.

    Attributes:
        pixels: how many the file says it has; 0 if it does not say.
        seconds: estimated; infinite for formats whose structure can hide work.
        image: opened if the file is cheap, otherwise None.
    """

    kind: Kind
    pixels: int
    seconds: float = float("inf")
    image: ImageFile | None = None


def estimate(data: bytes, max_pixels: int) -> Cost:
    """The cost of a file; raises ImageError where its header shows that it cannot be used."""
    name = find_format(data, "the image")
    width, height = _size(name, data)
    # Lossless WebP and its transparency may have a code for each tile, which takes long and hundreds of megabytes.
    hides_work = name in ("GIF", "TIFF") or (name == "WebP" and (b"VP8L" in data or b"ALPH" in data))
    markers = _markers(name, data)
    if hides_work or len(markers) > MAX_SEGMENTS:
        return Cost(Kind.SLOW, width * height)
    if name == "WebP" and CHEAP < WEBP * width * height <= WEBP * max_pixels:
        # Opening it would allocate all pixels.
        return Cost(Kind.SLOW, width * height, WEBP * width * height)
    image = open_header(data, max_pixels)
    pixels = image.width * image.height
    seconds, is_usual = _decoding_seconds(name, image, markers, data)
    if seconds <= CHEAP:
        return Cost(Kind.CHEAP, pixels, seconds, image)
    return Cost(Kind.PHOTOGRAPH if is_usual and seconds <= PHOTOGRAPH else Kind.SLOW, pixels, seconds)


def _decoding_seconds(name: str, image: ImageFile, markers: list[bytes], data: bytes) -> tuple[float, bool]:
    """An estimate, and whether it is of a usual photograph or screenshot."""
    pixels = image.width * image.height
    if name == "JPEG":
        if USUAL_FRAMES & {*markers}:
            return JPEG * pixels + JPEG_BYTE * len(data), True
        return (JPEG + JPEG_SCAN * data.count(b"\xff\xda")) * pixels + PROGRESSIVE_BYTE * len(data), False
    if name == "PNG":
        is_plain = image.mode in ("1", "L", "P", "RGB") and "transparency" not in image.info
        return (PNG if is_plain else PNG_WITH_ALPHA) * pixels + PNG_BYTE * len(data), True
    return {"BMP": BMP, "WebP": WEBP}[name] * pixels, False


def _size(name: str, data: bytes) -> tuple[int, int]:
    """Width and height of formats that are costly to open; 0 for others, and where they are missing."""
    try:
        if name == "TIFF":
            return tiff_size(data)
        if name == "WebP":
            return webp_size(data)
        if name == "GIF":
            width, height = struct.unpack_from("<HH", data, 6)
            return width, height
    except (struct.error, KeyError, ValueError):
        pass
    return 0, 0


def _markers(name: str, data: bytes) -> list[bytes]:
    """The first segments of a JPEG up to its pixels, or chunks of a PNG; where it is damaged, opening it says so."""
    found: list[bytes] = []
    place = {"PNG": 8, "JPEG": 2}.get(name, len(data))
    while len(found) <= MAX_SEGMENTS and not {b"IEND", b"\xff\xda"} & {*found[-1:]}:
        try:
            if name == "PNG":
                length, marker = struct.unpack_from(">I4s", data, place)
                place += 12 + length
            else:
                marker, length = struct.unpack_from(">2sH", data, place)
                place += 2 + length
        except struct.error:
            break
        found.append(marker)
    return found
