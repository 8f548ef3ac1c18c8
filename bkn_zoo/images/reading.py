"""Reads files, arrays and PIL images as upright RGB images.

Files are untrusted. Format and number of pixels are checked before anything is decoded, invisible parts are not
decompressed, and every problem is an `ImageError`. Nothing is ever downloaded.
"""

import io
import math
import os
import stat
from typing import Any

import numpy as np
from PIL import Image
from PIL.ExifTags import Base as Tag
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from bkn_zoo.errors import BrokenImageError, ImageError, ImageFormatError, ImageTooLargeError
from bkn_zoo.images.formats import FORMATS, MAX_PARTS, SLIM, find_format, orientation, webp_size
from bkn_zoo.images.preprocessing import Preprocessing

MAX_PIXELS = 50_000_000
MAX_ROWS = 65_535  # as in JPEG; Pillow needs memory for each row, even a short one
BYTES_PER_PIXEL = 8  # of the largest files: uncompressed RGBA with 16 bits

# Left, top, right, bottom.
Box = tuple[float, float, float, float]
ImageSource = bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | np.ndarray

# By the orientation in EXIF.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image as a person sees it, in RGB: upright, on white, and the first frame of an animation.

    A PIL image that fulfils this already is returned unchanged.

    Args:
        source: the bytes of a file; the path of a file (a string is always a path, never a URL); a PIL image; or an
            array, (height, width) or (height, width, 1, 3 or 4), of bytes, 16-bit numbers or floating point numbers in
            [0, 1].
        max_pixels: the maximal number of pixels.
    """
    if isinstance(source, np.ndarray):
        return _to_rgb(_from_array(source, max_pixels))
    if isinstance(source, Image.Image):
        return _decode_image(source, "the image", max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), "the image", max_pixels)
    if isinstance(source, str | os.PathLike):
        return _from_bytes(_read_file(source, max_pixels), os.fspath(source), max_pixels)
    raise ImageFormatError(
        f"a {type(source).__name__} is not an image: pass the bytes or the path of a file, a PIL image or an array."
    )


def open_file(path: str | os.PathLike[str]) -> ImageFile:
    """A file whose header was read and checked. `open_image` or `resized_box` decodes it."""
    return open_header(_read_file(path, MAX_PIXELS), what=os.fspath(path))


def upright_size(image: ImageFile) -> tuple[int, int]:
    """Width and height of the upright image."""
    # Pillow turns a TIFF itself.
    turned = orientation(image) in (5, 6, 7, 8) and not isinstance(image, TiffImageFile)
    return image.size[::-1] if turned else image.size


def resized_square(image: Image.Image, size: int, interpolation: str = "bilinear", crop: float = 1.0) -> Image.Image:
    """The largest square in the middle of an image, or a part of it, resized."""
    side = min(image.size) * crop
    left, top = (image.width - side) / 2, (image.height - side) / 2
    method = Image.Resampling[interpolation.upper()]
    return image.resize((size, size), method, box=(left, top, left + side, top + side))


def resized_box(image: ImageFile, box: Box, size: int) -> Image.Image:
    """A box of the upright image, decoded and resized to a square.

    The decoder of a JPEG divides both sides by 2, 4 or 8 if the box keeps at least `size` x `size` pixels.
    """
    whole = upright_size(image)
    exact: tuple[float, float] = whole
    if orientation(image) not in TURNS:
        factor = min(box[2] - box[0], box[3] - box[1]) / size
        drafted = image.draft(None, (math.ceil(image.width / factor), math.ceil(image.height / factor)))
        # Sides that the decoder cannot divide end with a part of a pixel.
        exact = drafted[1][2:] if drafted else whole
    shown = open_image(image)
    ends = zip(box, 2 * exact, 2 * whole, 2 * shown.size, strict=True)
    within: Any = tuple(min(place * part / before, now) for place, part, before, now in ends)
    return shown.resize((size, size), Image.Resampling.BILINEAR, within)


def normalized_array(square: Image.Image, preprocessing: Preprocessing) -> np.ndarray:
    """An image of the network's size as its input, (3, size, size)."""
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    pixels = np.ascontiguousarray(np.asarray(square).transpose(2, 0, 1))
    return (pixels / np.float32(255) - mean) / std


def _read_file(path: str | os.PathLike[str], max_pixels: int) -> bytes:
    name, limit = os.fspath(path), BYTES_PER_PIXEL * max_pixels + 2**24
    try:
        about = os.stat(path)
    except (OSError, ValueError):  # ValueError for a null character
        raise ImageError(f"there is no file {name!r}: correct the path (URLs are not followed).") from None
    if not stat.S_ISREG(about.st_mode):
        raise ImageFormatError(f"{name} is not a file: pass an image file.")
    if about.st_size > limit:
        raise ImageTooLargeError(f"{name} has {about.st_size:,} bytes, but {limit:,} are allowed: make it smaller.")
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ImageError(f"{name} cannot be read ({error.strerror}): check its permissions.") from None


def _from_bytes(data: bytes, what: str, max_pixels: int) -> Image.Image:
    return _decode_image(open_header(data, max_pixels, what), what, max_pixels)


def open_header(data: bytes, max_pixels: int = MAX_PIXELS, what: str = "the image") -> ImageFile:
    """A file whose header was read and checked. Nothing is decoded yet."""
    name = find_format(data, what)
    try:
        if name == "WebP":
            _check_size(webp_size(data), what, max_pixels)
        shown, exif = SLIM[name](data) if name in SLIM else (data, None)
        image = FORMATS[name][1](_File(shown))
        if exif is not None:
            image.info["exif"] = exif
        _check_size(image.size, what, max_pixels)
        # Read at least one row at once: Pillow copies the incomplete row with each block that it reads.
        image.decodermaxblock = max(image.decodermaxblock, BYTES_PER_PIXEL * image.width)
        return image
    except ImageError:
        raise
    except Exception as error:
        raise _explain(error, what, f"a {name} file") from error


def _decode_image(image: Image.Image, what: str, max_pixels: int) -> Image.Image:
    try:
        _check_size(image.size, what, max_pixels)
        if isinstance(image, TiffImageFile):
            tags = image.tag_v2
            _check_size((tags.get(Tag.TileWidth, 1), tags.get(Tag.TileLength, 1)), what, max_pixels)
        held = orientation(image)
        if held > 4:  # rows become columns
            _check_size(image.size[::-1], what, max_pixels)
        image.load()
        turn = None if isinstance(image, TiffImageFile) else TURNS.get(held)  # Pillow turns a TIFF itself
        upright = _to_rgb(image)
        return upright if turn is None else upright.transpose(turn)
    except ImageError:
        raise
    except Exception as error:
        named = next((name for name, (_, file) in FORMATS.items() if isinstance(image, file)), image.format)
        raise _explain(error, what, "an image" if named is None else f"a {named} file") from error


def _explain(error: Exception, what: str, kind: str) -> ImageError:
    """An ImageError for an exception of Pillow's decoders, which may raise almost anything."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return ImageTooLargeError(f"{what} has more pixels than Pillow allows: make it smaller first.")
    return BrokenImageError(
        f"{what} is {kind} that cannot be decoded (damaged, truncated or of a rare kind): save it again."
    )


def _check_size(size: tuple[Any, Any], what: str, max_pixels: int) -> None:
    width, height = size
    if not isinstance(width, int) or not isinstance(height, int) or min(size) < 1:
        raise BrokenImageError(f"{what} has no pixels: save it again.")
    if width * height > max_pixels:
        raise ImageTooLargeError(
            f"{what} has {width} x {height} pixels, but {max_pixels:,} are allowed: make it smaller first."
        )
    if height > MAX_ROWS:
        raise ImageTooLargeError(f"{what} has {height:,} rows, but {MAX_ROWS:,} are allowed: make it smaller first.")


class _File(io.BytesIO):
    """Bytes with a limit on the number of reads."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > 4 * MAX_PARTS:  # a chunk of a PNG needs four reads
            raise ValueError("too many parts")
        return super().read(size)


def _from_array(array: np.ndarray, max_pixels: int) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4)):
        raise ImageFormatError(
            f"an array of shape {array.shape} is not an image: make it (height, width) or (height, width, 1, 3 or 4)."
        )
    _check_size((array.shape[1], array.shape[0]), "the array", max_pixels)
    if array.dtype == np.uint16:
        array = array >> 8
    elif np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # false for NaN, too
            raise ImageFormatError("an array of floating point numbers must have values in [0, 1]: scale it.")
        array = np.rint(array * 255.0)
    elif array.dtype != np.uint8:
        raise ImageFormatError(f"an array of {array.dtype} is not an image: make it uint8, uint16 or float in [0, 1].")
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip values above 255
    elif image.mode in ("I", "F"):  # without a defined white
        raise ImageFormatError("the image has numbers of 32 bits: convert it to 8 or 16 bits.")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        over_white = Image.new("RGB", image.size, "white")
        over_white.paste(image, mask=image)
        return over_white
    return image if image.mode == "RGB" else image.convert("RGB")
