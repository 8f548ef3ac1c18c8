"""An image from anywhere -> an upright RGB image -> the network's input, exactly as a checkpoint's config says.

Files come from strangers. Their format and their number of pixels are known before anything is decoded, nothing that
does not show is inflated, and whatever is wrong with one is an `ImageError`. Nothing is ever downloaded.
"""

import io
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base as Tag
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from bkn_zoo.errors import BrokenImageError, ImageError, ImageFormatError, ImageTooLargeError
from bkn_zoo.preprocessing import INTERPOLATIONS, Preprocessing

__all__ = [
    "open_image",
    "preprocess",
    "Preprocessing",
    "INTERPOLATIONS",
    "central_square",
    "enlarge",
    "normalize",
    "per_channel",
    "ImageSource",
    "SUFFIXES",
    "MAX_PIXELS",
]

MAX_PIXELS = 50_000_000
MAX_PARTS = 32_768  # chunks, blocks or strips of a file: millions of tiny ones would keep Python busy for minutes
MAX_TAGS = 1000  # of a TIFF or of EXIF; cameras write a hundred or so
MAX_ROWS = 65_535  # as in JPEG; Pillow keeps a place and a few spare bytes for each, however short it is
MAX_SCANS = 50  # of a progressive JPEG, each of which passes over all pixels; encoders write ten or so
BYTES_PER_PIXEL = 8  # of the largest files, uncompressed RGBA in 16 bits
SUFFIXES = frozenset({".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"})

ImageSource = bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | np.ndarray


def image_files(folder: str | os.PathLike[str], others: Counter[str] | None = None) -> list[str]:
    """The names of all images in a folder and those within, in order; what is hidden is left out.

    Links to folders are followed, but not to one that was seen, nor to one that this is in: it would have no end.

    Args:
        others: counts files that are not taken for images, by their suffixes.
    """
    whole = os.path.realpath(folder)
    seen = {whole, *(str(above) for above in Path(whole).parents)}
    found = []
    for place, inner, names in os.walk(folder, followlinks=True):
        # What is no link comes first, and keeps its own name.
        shown = sorted((name for name in inner if not name.startswith(".")), key=lambda name: _link_last(place, name))
        inner.clear()
        for name in shown:
            real = os.path.realpath(os.path.join(place, name))
            if real not in seen:
                seen.add(real)
                inner.append(name)
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                continue
            if suffix in SUFFIXES:
                found.append(os.path.join(place, name))
            elif others is not None:
                others[suffix] += 1
    return sorted(found, key=lambda name: name.split(os.sep))


def _link_last(place: str, name: str) -> tuple[bool, str]:
    return os.path.islink(os.path.join(place, name)), name


def passed_over(folder: str | os.PathLike[str], others: Counter[str]) -> str:
    """What to say of files that `image_files` counted: how many of which kind."""
    kinds = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items()))
    return f"not taken for images in {folder}, by their names: {kinds}"


class _GifImage(GifImageFile):
    """Prepares no background for a second frame: that would be allocated before the frame's size can be checked."""

    disposal_method = property(lambda self: 0, lambda self, method: None)


FORMATS: dict[str, tuple[bytes, type[ImageFile]]] = {
    "JPEG": (rb"\xff\xd8\xff", JpegImageFile),
    "PNG": (rb"\x89PNG\r\n\x1a\n", PngImageFile),
    "WebP": (rb"RIFF....WEBP", WebPImageFile),
    "GIF": (rb"GIF8[79]a", _GifImage),
    "BMP": (rb"BM", BmpImageFile),
    "TIFF": (rb"II[*+]\0|MM\0[*+]", TiffImageFile),
}
OTHER_FORMATS = {
    "ICO": rb"\0\0[\1\2]\0",
    "HEIC": rb"....ftyp(hei|hev|mif|msf)",
    "AVIF": rb"....ftypavi",
    "MP4": rb"....ftyp",
    "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "PSD": rb"8BPS",
    "PDF": rb"%PDF",
    "EPS": rb"%!PS",
    "SVG": rb"\s*(<\?xml.*)?(<!--.*)?<svg",
    "HTML": rb"\s*<(!doctype )?html",
    "ZIP": rb"PK\x03\x04",
}
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by EXIF's orientation


def open_image(source: ImageSource, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image as a person would see it, in RGB: upright, over white, and the first of an animation.

    One of Pillow's that is all this already is returned as it is.

    Args:
        source: the bytes of a file; the path of one (a string is a path, never an address to download from); an image
            of Pillow's; or an array, (height, width) or (height, width, 1, 3 or 4), of bytes, 16-bit numbers or
            floating point numbers in [0, 1].
        max_pixels: that the image may have.
    """
    if isinstance(source, np.ndarray):
        return _to_rgb(_from_array(source, max_pixels))
    if isinstance(source, Image.Image):
        named = next((name for name, (_, file) in FORMATS.items() if isinstance(source, file)), source.format)
        kind = "an image" if named is None else f"a {named} file"
        return _decode(source, "the image", kind, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), "the image", max_pixels)
    if isinstance(source, str | os.PathLike):
        return _from_bytes(_read(source, BYTES_PER_PIXEL * max_pixels + 2**24), os.fspath(source), max_pixels)
    raise ImageFormatError(
        f"a {type(source).__name__} is no image: pass the bytes or the path of a file, a PIL image or a numpy array."
    )


def open_header(data: bytes, max_pixels: int = MAX_PIXELS) -> ImageFile:
    """A file as far as its header says what it is, for `open_image`; what that shows to be wrong is an error here."""
    return _open(data, "the image", max_pixels)


def preprocess(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """An RGB image as the network takes it, (3, size, size)."""
    p = preprocessing
    pixels = enlarge(central_square(image, p.native_size or p.size, p.interpolation)[None], p.size, p.interpolation)
    return normalize(pixels, p)[0].contiguous()


def central_square(image: Image.Image, size: int, interpolation: str = "bilinear") -> Tensor:
    """The largest square in the middle of an RGB image, resized; (3, size, size), in [0, 1]."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    method = Image.Resampling[interpolation.upper()]
    square = image.resize((size, size), method, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float().div_(255)


def enlarge(pixels: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Images (images, 3, side, side) from the size that they were brought to, to that of the network's input."""
    if pixels.shape[-1] == size:
        return pixels
    align_corners = None if interpolation == "nearest" else False
    # Where pixels become more, there is nothing to smooth: the same but for rounding, in half of the time on a CPU.
    faster = interpolation == "bilinear" and size > pixels.shape[-1] and pixels.is_cpu
    return F.interpolate(pixels, size=(size, size), mode=interpolation, align_corners=align_corners, antialias=faster)


def normalize(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Images (images, 3, height, width) in [0, 1], by the mean and deviation of the config."""
    mean, std = (per_channel(values, pixels.device) for values in (preprocessing.mean, preprocessing.std))
    return (pixels - mean).div_(std)


@lru_cache
@torch.inference_mode(False)  # it may be asked for first while a network is evaluated
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Mean or std as (1, 3, 1, 1). Kept, since the host waits for all that a GPU has to do before it copies there."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


def _read(path: str | os.PathLike[str], limit: int) -> bytes:
    name = os.fspath(path)
    try:
        about = os.stat(path)
    except (OSError, ValueError):  # of which the latter for a null character
        raise ImageError(f"there is no file {name!r}: correct the path (URLs are not followed).") from None
    if not stat.S_ISREG(about.st_mode):
        raise ImageFormatError(f"{name} is not a file: name an image file.")
    if about.st_size > limit:
        raise ImageTooLargeError(f"{name} has {about.st_size:,} bytes, but {limit:,} are allowed: make it smaller.")
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ImageError(f"{name} cannot be read ({error.strerror}): check its permissions.") from None


def _from_bytes(data: bytes, what: str, max_pixels: int) -> Image.Image:
    image = _open(data, what, max_pixels)
    return _decode(image, what, f"a {_find_format(data, what)} file", max_pixels)


def _open(data: bytes, what: str, max_pixels: int) -> ImageFile:
    """A file of which the header is read and found to be harmless, and nothing is decoded."""
    name = _find_format(data, what)
    try:
        if name == "WebP":
            _check_size(_webp_size(data), what, max_pixels)
        shown, exif = SLIM[name](data) if name in SLIM else (data, None)
        image = FORMATS[name][1](_File(shown))
        if exif is not None:
            image.info["exif"] = exif
        _check_size(image.size, what, max_pixels)
        # At least a row at once: Pillow copies what it has of a row, however long, with each block that it reads.
        image.decodermaxblock = max(image.decodermaxblock, BYTES_PER_PIXEL * image.width)
        return image
    except ImageError:
        raise
    except Exception as error:
        raise _explain(error, what, f"a {name} file") from error


def _find_format(data: bytes, what: str) -> str:
    accepted = ", ".join(FORMATS)
    if not data:
        raise ImageFormatError(f"{what} is empty: pass a file in one of {accepted}.")
    start = data[:1024]
    for name, (pattern, _) in FORMATS.items():
        if re.match(pattern, start, re.DOTALL):
            return name
    found = (name for name, pattern in OTHER_FORMATS.items() if re.match(pattern, start, re.DOTALL | re.IGNORECASE))
    raise ImageFormatError(f"{what} is in {next(found, 'no known image format')}: convert it to one of {accepted}.")


def _decode(image: Image.Image, what: str, kind: str, max_pixels: int) -> Image.Image:
    try:
        _check_size(image.size, what, max_pixels)
        if isinstance(image, TiffImageFile):
            tags = image.tag_v2
            _check_size((tags.get(Tag.TileWidth, 1), tags.get(Tag.TileLength, 1)), what, max_pixels)
        orientation = _orientation(image)
        if orientation > 4:  # rows become columns
            _check_size(image.size[::-1], what, max_pixels)
        image.load()
        turn = None if isinstance(image, TiffImageFile) else TURNS.get(orientation)  # Pillow turns a TIFF itself
        upright = _to_rgb(image)
        return upright if turn is None else upright.transpose(turn)
    except ImageError:
        raise
    except Exception as error:
        raise _explain(error, what, kind) from error


def _explain(error: Exception, what: str, kind: str) -> ImageError:
    """Pillow's decoders raise almost anything, in words for programmers."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return ImageTooLargeError(f"{what} has more pixels than Pillow allows: make it smaller first.")
    return BrokenImageError(
        f"{what} is {kind} that cannot be decoded, since it is damaged, cut short or of a rare kind: save it again."
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
    """Bytes that cannot be read in too many parts."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > 4 * MAX_PARTS:  # a chunk of a PNG takes four
            raise ValueError("too many parts")
        return super().read(size)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height, which Pillow reads only after it has allocated that many pixels."""
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _slim_bmp(data: bytes) -> tuple[bytes, None]:
    (header,) = struct.unpack_from("<I", data, 14)
    if header >= 40 and struct.unpack_from("<I", data, 30)[0] in (1, 2):  # which Pillow decodes in Python
        raise ImageFormatError("a BMP of run lengths would take too long to decode: save it as a PNG.")
    return data, None


def _slim_jpeg(data: bytes) -> tuple[bytes, bytes | None]:
    """A JPEG without what cameras and editors say of it, all of which Pillow would read; and its EXIF."""
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise ValueError("too many scans")
    kept, exif, place = [data[:2]], None, 2
    for _ in range(MAX_PARTS):
        place = data.index(b"\xff", place)
        marker, length = struct.unpack_from(">xBH", data, place)
        if marker == 0xDA:  # the pixels
            return b"".join([*kept, data[place:]]), exif
        if marker in (0x00, 0xFF):  # nothing, or one that is filled up
            place += 1
        elif 0xD0 <= marker <= 0xD9 or marker == 0x01:  # what has no length, and no place here
            place += 2
        else:
            end = place + 2 + length
            if marker == 0xE1 and exif is None and data.startswith(b"Exif\0\0", place + 4):
                exif = data[place + 4 : end]
            if marker in (0xE0, 0xEE) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
                kept.append(data[place:end])  # of what is for applications, these two say what the colours are
            place = end
    raise ValueError("too many parts")


def _slim_png(data: bytes) -> tuple[bytes, None]:
    """A PNG without its text and profiles: they do not show, and a few bytes may inflate to many megabytes."""
    kept, place = [data[:8]], 8
    for _ in range(MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if end > len(data):
            raise EOFError("cut short")
        if kind[0] & 0x20 == 0 or kind in (b"tRNS", b"eXIf"):  # a capital letter marks what no reader may skip
            # How the camera was held may stand behind the pixels, where Pillow says it too late.
            kept.insert(2 if kind == b"eXIf" else len(kept), data[place:end])
        if kind == b"IEND":
            return b"".join(kept), None
        place = end
    raise ValueError("too many chunks")


def _slim_tiff(data: bytes) -> tuple[bytes, None]:
    """A TIFF without the directories of EXIF, if what it says of itself can be read in a moment.

    Pillow copies the value of every tag, makes a Python object of every strip, and of every number in a tag that it
    looks at.
    """
    order = "<" if data[:2] == b"II" else ">"
    offset, count, entry = ("8xQ", "Q", "HHQ8x") if 43 in data[2:4] else ("4xI", "H", "HHI4x")
    (place,) = struct.unpack_from(order + offset, data)
    (entries,) = struct.unpack_from(order + count, data, place)
    if entries > MAX_TAGS:
        raise ValueError("too many tags")
    place += struct.calcsize(order + count)
    slim, size = bytearray(data), 0
    for k in range(entries):
        at = place + k * struct.calcsize(order + entry)
        tag, kind, numbers = struct.unpack_from(order + entry, data, at)
        is_bytes = kind in (1, 2, 7) and tag not in (Tag.StripOffsets, Tag.TileOffsets)
        if numbers > MAX_PARTS and not is_bytes:
            raise ValueError("too many numbers in a tag")
        size += numbers if is_bytes else 8 * numbers
        if tag in (Tag.ExifOffset, Tag.GPSInfo, 0xA005):  # 0xA005: interoperability
            slim[at : at + 2] = b"\xff\xff"
    if size > 2 * len(data) + 2**20:
        raise ValueError("tags that say the same again")
    return bytes(slim), None


SLIM: dict[str, Callable[[bytes], tuple[bytes, bytes | None]]] = {
    "BMP": _slim_bmp,
    "JPEG": _slim_jpeg,
    "PNG": _slim_png,
    "TIFF": _slim_tiff,
}  # from a file to what Pillow is given of it, and the EXIF that was taken out


def _from_array(array: np.ndarray, max_pixels: int) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4)):
        raise ImageFormatError(
            f"an array of shape {array.shape} is no image: make it (height, width) or (height, width, 1, 3 or 4)."
        )
    _check_size((array.shape[1], array.shape[0]), "the array", max_pixels)
    if array.dtype == np.uint16:
        array = array >> 8
    elif np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # false for NaN as well
            raise ImageFormatError("an array of floating point numbers must hold values in [0, 1]: scale it.")
        array = np.rint(array * 255.0)
    elif array.dtype != np.uint8:
        raise ImageFormatError(f"an array of {array.dtype} is no image: make it uint8, uint16 or float in [0, 1].")
    return Image.fromarray(np.ascontiguousarray(array, dtype=np.uint8))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would clip what is above 255
    elif image.mode in ("I", "F"):
        image = _scale(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        over_white = Image.new("RGB", image.size, "white")
        over_white.paste(image, mask=image)
        return over_white
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale(image: Image.Image) -> Image.Image:
    """Modes that do not say what white is: the least of 1 (for fractions), 255 and 65535 that no pixel exceeds."""
    values = np.asarray(image, dtype=np.float32)  # exact up to 65535 and beyond
    limits = (1, 255, 65535) if image.mode == "F" else (255, 65535)
    white = next((limit for limit in limits if values.max() <= limit), None)
    if white is None or not values.min() >= 0:
        raise ImageFormatError("the image holds values outside of 0 to 65535: convert it to 8 or 16 bits.")
    return Image.fromarray(np.rint(values * np.float32(255 / white)).astype(np.uint8))


def _orientation(image: Image.Image) -> int:
    """How the camera was held, by EXIF; 1, upright, where that is missing or damaged, since the pixels are good.

    Read here, because Pillow would read all that is beside it, which may be millions of numbers.
    """
    if isinstance(image, TiffImageFile):
        found = image.tag_v2.get(Tag.Orientation, 1)
        return found if isinstance(found, int) else 1
    exif = image.info.get("exif")
    if not isinstance(exif, bytes):
        return 1
    exif = exif.removeprefix(b"Exif\0\0")
    order = "<" if exif[:2] == b"II" else ">"
    try:
        (place,) = struct.unpack_from(order + "4xI", exif)
        (entries,) = struct.unpack_from(order + "H", exif, place)
        for k in range(min(entries, MAX_TAGS)):
            tag, kind, numbers, value = struct.unpack_from(order + "HHIH2x", exif, place + 2 + 12 * k)
            if (tag, kind, numbers) == (Tag.Orientation, 3, 1):
                return int(value)
    except struct.error:
        pass
    return 1
