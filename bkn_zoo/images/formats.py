"""The supported file formats, and removal of the parts of a file that Pillow must not read.

The functions of this module parse the bytes of untrusted files, before Pillow reads them. A file that exceeds a limit
raises an exception of any type, which `bkn_zoo.images.reading` turns into an `ImageError`.
"""

import re
import struct
from collections.abc import Iterator

from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base as Tag
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from bkn_zoo.errors import ImageFormatError

MAX_PARTS = 32_768  # chunks, blocks or strips of a file; parsing millions would take Python minutes
MAX_TAGS = 1000  # of a TIFF or of EXIF; cameras write about a hundred
MAX_SCANS = 50  # of a progressive JPEG; each scan processes all pixels, and encoders write about ten


class _GifImage(GifImageFile):
    """Reads only the first frame. For a second one, Pillow would allocate memory before its size can be checked."""

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
    "HEIC": rb"....ftyp(hei|hev|mif|msf)",
    "AVIF": rb"....ftypavi",
    "PDF": rb"%PDF",
    "SVG": rb"\s*(<\?xml.*)?(<!--.*)?<svg",
    "HTML": rb"\s*<(!doctype )?html",
}


def find_format(data: bytes, what: str) -> str:
    accepted = ", ".join(FORMATS)
    if not data:
        raise ImageFormatError(f"{what} is empty: pass a file in one of {accepted}.")
    start = data[:1024]
    for name, (pattern, _) in FORMATS.items():
        if re.match(pattern, start, re.DOTALL):
            return name
    found = (name for name, pattern in OTHER_FORMATS.items() if re.match(pattern, start, re.DOTALL | re.IGNORECASE))
    raise ImageFormatError(f"{what} is in {next(found, 'no known image format')}: convert it to one of {accepted}.")


def webp_size(data: bytes) -> tuple[int, int]:
    """Width and height. Pillow itself reads them only after it has allocated the pixels."""
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _slim_bmp(data: bytes) -> tuple[bytes, bytes | None]:
    (header,) = struct.unpack_from("<I", data, 14)
    if header >= 40 and struct.unpack_from("<I", data, 30)[0] in (1, 2):  # Pillow decodes these in Python
        raise ImageFormatError(
            "run-length encoded BMP files are not supported, because decoding takes too long: save it as a PNG."
        )
    return data, None


def _slim_jpeg(data: bytes) -> tuple[bytes, bytes | None]:
    """A JPEG without the metadata of cameras and editors, all of which Pillow would read; and its EXIF data."""
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise ValueError("too many scans")
    kept, exif, place = [data[:2]], None, 2
    for _ in range(MAX_PARTS):
        place = data.index(b"\xff", place)
        marker, length = struct.unpack_from(">xBH", data, place)
        if marker == 0xDA:  # the pixels
            return b"".join([*kept, data[place:]]), exif
        if marker in (0x00, 0xFF):  # not a marker, or a fill byte
            place += 1
        elif 0xD0 <= marker <= 0xD9 or marker == 0x01:  # markers without a length, which are not allowed here
            place += 2
        else:
            end = place + 2 + length
            if marker == 0xE1 and exif is None and data.startswith(b"Exif\0\0", place + 4):
                exif = data[place + 4 : end]
            if marker in (0xE0, 0xEE) or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
                kept.append(data[place:end])  # only these two application segments define colours
            place = end
    raise ValueError("too many parts")


def _slim_png(data: bytes) -> tuple[bytes, bytes | None]:
    """A PNG without text and profiles, which are not visible and can inflate from a few bytes to many megabytes."""
    kept, place = [data[:8]], 8
    for _ in range(MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if end > len(data):
            raise EOFError("cut short")
        if kind[0] & 0x20 == 0 or kind in (b"tRNS", b"eXIf"):  # a capital letter marks a chunk that is required
            # The orientation may come after the pixels, where Pillow reads it too late.
            kept.insert(2 if kind == b"eXIf" else len(kept), data[place:end])
        if kind == b"IEND":
            return b"".join(kept), None
        place = end
    raise ValueError("too many chunks")


def tiff_size(data: bytes) -> tuple[int, int]:
    """Width and height. Pillow itself reads them only after it has read every strip."""
    sizes = {}
    for at, tag, kind, _ in _tiff_tags(data):
        if tag in (Tag.ImageWidth, Tag.ImageLength):
            (sizes[tag],) = _tiff_values(data, at, kind, 1)
    return sizes[Tag.ImageWidth], sizes[Tag.ImageLength]


def _tiff_tags(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """The entries of the first directory: position, tag, type and number of values of each."""
    order = "<" if data[:2] == b"II" else ">"
    offset, count, entry = ("8xQ", "Q", "HHQ8x") if 43 in data[2:4] else ("4xI", "H", "HHI4x")
    (place,) = struct.unpack_from(order + offset, data)
    (entries,) = struct.unpack_from(order + count, data, place)
    if entries > MAX_TAGS:
        raise ValueError("too many tags")
    place += struct.calcsize(order + count)
    for k in range(entries):
        at = place + k * struct.calcsize(order + entry)
        yield at, *struct.unpack_from(order + entry, data, at)


def _tiff_values(data: bytes, at: int, kind: int, numbers: int) -> tuple[int, ...]:
    """The whole numbers of an entry, which are elsewhere in the file unless they fit into it."""
    order, is_big = "<" if data[:2] == b"II" else ">", 43 in data[2:4]
    form = f"{order}{numbers}{ {1: 'B', 3: 'H', 4: 'I', 16: 'Q'}[kind] }"
    place = at + (12 if is_big else 8)
    if struct.calcsize(form) > (8 if is_big else 4):
        (place,) = struct.unpack_from(order + ("Q" if is_big else "I"), data, place)
    return struct.unpack_from(form, data, place)


def _slim_tiff(data: bytes) -> tuple[bytes, bytes | None]:
    """A TIFF without the directories of EXIF, and with few values, because Pillow makes an object of each."""
    slim, size, stored = bytearray(data), 0, 0
    for at, tag, kind, numbers in _tiff_tags(data):
        is_bytes = kind in (1, 2, 7) and tag not in (Tag.StripOffsets, Tag.TileOffsets)
        if numbers > MAX_PARTS and not is_bytes:
            raise ValueError("too many numbers in a tag")
        size += numbers if is_bytes else 8 * numbers
        if tag in (Tag.ExifOffset, Tag.GPSInfo, 0xA005):  # 0xA005: interoperability
            slim[at : at + 2] = b"\xff\xff"
        if tag in (Tag.StripByteCounts, Tag.TileByteCounts):
            stored += sum(_tiff_values(data, at, kind, numbers))
    if size > 2 * len(data) + 2**20:
        raise ValueError("repeated tags")
    if stored > 2 * len(data):
        raise ValueError("strips that share their bytes, so that a small file takes long")
    return bytes(slim), None


# From a file to the part that Pillow reads, and the EXIF data that was removed.
SLIM = {"BMP": _slim_bmp, "JPEG": _slim_jpeg, "PNG": _slim_png, "TIFF": _slim_tiff}


def orientation(image: Image.Image) -> int:
    """The orientation in EXIF data, or 1 (upright). Pillow would read all other tags, too, even millions of values."""
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
