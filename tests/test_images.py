"""Any image becomes an upright RGB one, then exactly what training's evaluation makes of it; bad ones are refused."""

import contextlib
import io
import os
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from attackers import encoded, run_lengths
from attackers import tiff as exif_of
from PIL import Image, ImageFile

from bkn_zoo.errors import BrokenImageError, ImageError, ImageFormatError, ImageTooLargeError
from bkn_zoo.images import Preprocessing, open_header, open_image, preprocess, reading
from bkn_zoo.images.formats import MAX_PARTS, MAX_SCANS
from bkn_zoo.images.transforms import central_square, normalize
from bkn_zoo.training.data import evaluation_batches
from bkn_zoo.training.datasets import ArrayImages, Data, FileImages

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FORMATS = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF")


def noise(height=23, width=31, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def picture(width=31, height=23):
    """Smooth, so that lossy formats keep it nearly as it is."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def pixels(image):
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def corner(image):
    found = image.getpixel((0, 0))
    assert isinstance(found, tuple)
    return found


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, data, before=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def gif(frame, before=b""):
    """One whose first frame asks for a background of its own size, on a screen of 10 x 10."""
    control = b"!\xf9\x04\x08\0\0\0\0"
    descriptor = b"," + struct.pack("<HHHHB", 0, 0, *frame, 0)
    return b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0) + before + control + descriptor + b"\2\1\x44\0;"


def tiff(side, *tags, compression=1, data=b""):
    """Grey; the data begin at byte 200."""
    own = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, compression), (262, 3, 1, 1)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted([*own, *tags]))
    head = b"II*\0" + struct.pack("<IH", 8, len(own) + len(tags)) + entries + struct.pack("<I", 0)
    return head.ljust(200, b"\0") + data


# Sources


@pytest.mark.parametrize("format", FORMATS)
def test_every_accepted_format_is_read_from_every_source(format, tmp_path):
    path, data = tmp_path / "image.txt", encoded(picture(), format)  # whatever the file is called
    path.write_bytes(data)
    tolerance = {"JPEG": 30, "WebP": 30, "GIF": 60}.get(format, 0)
    for source in (data, bytearray(data), memoryview(data), str(path), path, Image.open(path)):
        assert abs(pixels(open_image(source)) - pixels(picture())).max() <= tolerance
    assert open_header(data).size == (31, 23)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.full((4, 5), 7, np.uint8), (7, 7, 7)),
        (np.full((4, 5, 1), 7, np.uint8), (7, 7, 7)),
        (np.full((4, 5, 4), [0, 0, 0, 0], np.uint8), (255, 255, 255)),
        (np.full((4, 5, 3), [0, 65535, 128 * 257], np.uint16), (0, 255, 128)),
        (np.full((4, 5, 3), [0.0, 1.0, 0.2]), (0, 255, 51)),
        (np.full((8, 5, 6), [1, 2, 3, 4, 5, 6], np.uint8)[::2, :, 2:5], (3, 4, 5)),  # not contiguous
    ],
)
def test_arrays_of_all_kinds(array, expected):
    image = open_image(array)
    assert image.size == (5, 4)
    assert corner(image) == expected


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4, 2), np.uint8), "shape"),
        (np.zeros((1, 3, 4, 3), np.uint8), "shape"),
        (np.zeros((3, 0), np.uint8), "no pixels"),
        (np.zeros((3, 4), np.int64), "int64"),
        *((np.full((3, 4), value), "scale it") for value in (255.0, -0.1, np.nan)),
    ],
)
def test_array_of_a_wrong_shape_is_refused(array, message):
    with pytest.raises(ImageError, match=message):
        open_image(array)


def test_unsupported_image_sources_are_refused(tmp_path, monkeypatch):
    """A string is a path and never an address."""
    for thing in (None, 3, [1, 2], torch.zeros(3, 4, 4), io.BytesIO(b"")):
        with pytest.raises(ImageFormatError, match=f"a {type(thing).__name__} is not an image"):
            open_image(thing)
    os.mkfifo(tmp_path / "pipe")
    large, secret = tmp_path / "large.png", tmp_path / "secret.png"
    large.touch()
    os.truncate(large, 2**30)  # a hole: it takes no space
    secret.write_bytes(encoded(picture()))
    monkeypatch.setattr(reading, "open", raising(PermissionError(13, "Permission denied")), raising=False)
    for source, kind, words in (
        ("http://127.0.0.1:9/cat.png", ImageError, r"there is no file 'http.*URLs are not followed"),
        ("a\0b", ImageError, "there is no file"),
        (tmp_path, ImageError, "is not a file"),
        (tmp_path / "pipe", ImageError, "is not a file"),
        (large, ImageTooLargeError, "bytes"),
        (secret, ImageError, r"secret\.png cannot be read \(Permission denied\)"),  # though root may read everything
        (b"", ImageFormatError, "the image is empty"),
    ):
        with pytest.raises(kind, match=words):
            open_image(source)


def raising(error):
    def fail(*_):
        raise error

    return fail


# Kinds of pixels


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_image_of_any_mode_keeps_its_colour(mode):
    white = Image.new("RGB", (6, 4), "white").convert("RGBA" if mode in ("LA", "PA", "RGBa") else "RGB")
    np.testing.assert_allclose(pixels(open_image(white.convert(mode))), 255, atol=1)
    if mode in ("LA", "PA", "RGBA", "RGBa"):  # what is transparent shows white
        clear = Image.new("RGBA", (6, 4), (0, 0, 0, 0)).convert(mode)
        if mode == "PA":
            clear.putalpha(0)
        np.testing.assert_array_equal(pixels(open_image(clear)), 255)
        assert corner(open_image(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128))))) == (127, 127, 127)  # half
    if mode == "CMYK":
        for format in ("JPEG", "TIFF"):
            red = open_image(encoded(Image.new("RGB", (16, 16), "red").convert(mode), format))
            assert np.abs(np.array(corner(red)) - (255, 0, 0)).max() <= 6


@pytest.mark.parametrize(("format", "byte_order"), [("PNG", "<"), ("TIFF", "<"), ("TIFF", ">")])
def test_sixteen_bits_are_scaled_and_not_clipped(format, byte_order):
    ramp = np.linspace(0, 65535, 256).reshape(16, 16).astype(f"{byte_order}u2")
    found = open_image(encoded(Image.fromarray(ramp), format))
    np.testing.assert_array_equal(pixels(found)[:, :, 0], ramp >> 8)


def test_pixels_of_32_bits_are_refused():
    for dtype in (np.int32, np.float32):
        with pytest.raises(ImageFormatError, match="convert it to 8 or 16 bits"):
            open_image(encoded(Image.fromarray(np.ones((3, 4), dtype)), "TIFF"))


@pytest.mark.parametrize("format", ["GIF", "WebP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_used(format):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(np.array(corner(open_image(data))) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WebP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_camera_s_orientation_is_applied_once(format, orientation):
    upright = Image.new("RGB", (32, 16), "black")
    upright.paste("white", (0, 0, 16, 8))  # at the top left
    turn = Image.Transpose
    undo = [None, turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM, turn.TRANSPOSE, turn.ROTATE_90]
    method = [*undo, turn.TRANSVERSE, turn.ROTATE_270][orientation - 1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(upright if method is None else upright.transpose(method), format, exif=exif)
    for source in (data, Image.open(io.BytesIO(data))):
        found = open_image(source)
        assert found.size == (32, 16)
        assert np.abs(pixels(found) - pixels(upright)).max() < 40


@pytest.mark.filterwarnings("ignore")
def test_metadata_may_be_damaged_or_behind_the_pixels():
    for junk in (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0junk", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01" * 50):
        assert open_image(encoded(picture(), "JPEG", exif=junk)).size == (31, 23)
    data, end = encoded(picture(), "PNG"), chunk(b"IEND", b"")
    turned = data.removesuffix(end) + chunk(b"eXIf", exif_of((0x0112, 3, 1, 6))) + end
    assert open_image(turned).size == picture().size[::-1]


@pytest.mark.filterwarnings("error")
def test_only_orientation_is_read_from_exif():
    """Pillow would make objects of every number of EXIF, and a warning of every damaged tag."""
    rationals = exif_of((0x0112, 3, 1, 6), (0x011A, 5, 1_200_000, 40)) + bytes(9_600_000)
    tags = exif_of(*((k, 5, 1, 2**31) for k in range(1, 65_536)))
    for exif, size in ((rationals, (23, 31)), (tags, (31, 23))):
        files = [encoded(picture(), "PNG", exif=exif), encoded(picture(), "WebP", exif=exif)]
        whole = encoded(picture(), "JPEG")
        parts = [exif[k : k + 65_000] for k in range(0, len(exif), 65_000)]
        segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(part) + 8) + b"Exif\0\0" + part for part in parts)
        files += [whole[:2] + junk + segments + whole[2:] for junk in (b"", b"\xff\xff", b"\xff\x00\x00", b"\xff\xd0")]
        for data in files:
            with within(1):  # a few milliseconds; Pillow takes seconds
                assert open_image(data).size == size


# What is refused


OTHERS = {
    b"\0\0\0\x18ftypheic\0\0\0\0": "HEIC", b"\0\0\0\x18ftypavif\0\0\0\0": "AVIF", b"%PDF-1.7": "PDF",
    b"<!DOCTYPE html><html>": "HTML", b"<?xml version='1.0'?>\n<!-- a comment -->\n<svg/>": "SVG",
    b"hello": "no known image format", bytes(100): "no known image format",
}  # fmt: skip


@pytest.mark.parametrize(("data", "name"), OTHERS.items(), ids=OTHERS.values())
def test_other_formats_are_refused_by_name(data, name, tmp_path):
    words = rf"is in {name}: convert it to one of JPEG, PNG, WebP, GIF, BMP, TIFF\."
    with pytest.raises(ImageFormatError, match=words):
        open_image(data)
    path = tmp_path / "notes.png"
    path.write_bytes(data)
    with pytest.raises(ImageFormatError, match=rf"notes\.png is in {name}"):
        open_image(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", FORMATS)
def test_truncated_image_is_broken(format, tmp_path):
    data = encoded(Image.fromarray(noise()), format)
    path = tmp_path / "notes.png"
    # The last bytes of a GIF or JPEG only say that it ends; a TIFF of Pillow's ends with its directory or its pixels.
    for share in (0.3, 0.5, 0.9):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(BrokenImageError, match=rf"notes\.png is a {format} file that cannot be decoded"):
            open_image(path)
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


# Bombs


def inflating(megabytes):
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(megabytes)) + packer.flush()


def changed(data, place, header):
    return data[:place] + header + data[place + len(header) :]


def large_headers():
    """Small files whose headers promise 16384 x 16384 pixels or more."""
    tiny = Image.new("RGB", (16, 16))
    jpeg, extended = encoded(tiny, "JPEG"), encoded(tiny, "WebP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    return {
        "bmp": changed(encoded(tiny, "BMP"), 18, struct.pack("<ii", 20000, 20000)),
        "jpeg": changed(jpeg, jpeg.index(b"\xff\xc0") + 5, struct.pack(">HH", 20000, 20000)),
        "lossy webp": changed(encoded(tiny, "WebP"), 26, b"\xff\x3f\xff\x3f"),
        "lossless webp": changed(encoded(tiny, "WebP", lossless=True), 21, b"\xff\xff\xff\x0f"),
        "extended webp": changed(extended, 24, b"\xff\xff\0\xff\x0f\0"),
    }


TURNED = chunk(b"eXIf", b"II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0")
TOO_LARGE = {
    "png": png(20000, 20000, zlib.compress(bytes(1000))),
    "png of 4 billion squared": png(2**31 - 1, 2**31 - 1, b""),
    "gif whose frame is larger than its screen": gif((9000, 9000)),
    "gif beyond what Pillow allows": gif((65000, 65000)),
    "tiff": tiff(20000, (273, 4, 1, 200), compression=8, data=bytes(100)),
    "tiff of few pixels in one large tile": tiff(16, (322, 4, 1, 30000), (323, 4, 1, 30000), (324, 4, 1, 200)),
    **large_headers(),
    "png of very many rows": png(1, 49_999_999, inflating(1)),
    "png of very many columns, to be turned": png(49_999_999, 1, inflating(1), TURNED),
}
LONG_TAGS = [(40_000 + k, 7, 9_000_000, 20_000) for k in range(990)]
TOO_MANY_PARTS = {
    "png of many chunks": png(4, 4, zlib.compress(bytes(52)), chunk(b"teXt", b"") * 500_000),
    "png of many pieces of pixels": png(4, 4, zlib.compress(bytes(52)), chunk(b"IDAT", b"") * 500_000),
    "gif of many comments": gif((10, 10), b"!\xfe" + b"\1a" * 2_000_000 + b"\0"),
    "gif of junk": gif((10, 10), b"a" * 4_000_000),
    "tiff of many strips": tiff(16, (273, 4, 2_000_000, 200), (278, 4, 1, 1), data=bytes(8_000_000)),
    "tiff of many strips in disguise": tiff(16, (273, 7, 8_000_000, 200), (278, 4, 1, 1), data=bytes(8_000_000)),
    "tiff of many long tags at one place": tiff(16, *LONG_TAGS, data=bytes(9_100_000)),
    "tiff of many tags": b"MM\0+\0\x08\0\0" + struct.pack(">QQ", 16, 2**40),
}
HIDDEN = {  # made by the test, since every process that collects the tests would take a second for them
    "text": lambda: png(4, 4, zlib.compress(bytes(52)), chunk(b"zTXt", b"a\0\0" + inflating(1)) * 100),
    "profile": lambda: png(4, 4, zlib.compress(bytes(52)), chunk(b"iCCP", b"a\0\0" + inflating(50))),
    "more pixels than it says": lambda: png(4, 4, inflating(50)),
}


BOMBS = [
    *((name, data, ImageTooLargeError) for name, data in TOO_LARGE.items()),
    *((name, data, BrokenImageError) for name, data in TOO_MANY_PARTS.items()),
    ("bmp of run lengths", run_lengths(), ImageFormatError),
]


@contextlib.contextmanager
def less_memory_than(limit):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def within(seconds):
    """Of the process, which other processes do not delay."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("data", "kind"), [bomb[1:] for bomb in BOMBS], ids=[bomb[0] for bomb in BOMBS])
def test_bombs_are_refused_in_little_time_and_memory(data, kind):
    assert MAX_PARTS < 500_000
    with within(1), pytest.raises(kind):  # a few milliseconds, and 0.2 s for those of many parts
        open_image(data)
    with less_memory_than(2 * len(data) + 5_000_000), pytest.raises(kind):
        open_image(data)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_data_is_never_decompressed(name):
    data = HIDDEN[name]()
    with less_memory_than(5_000_000):
        assert open_image(data).size == (4, 4)


def test_limit_on_pixels_is_the_caller_s():
    assert open_header(png(6000, 5000, b"")).size == (6000, 5000)  # counted before they are decoded
    with pytest.raises(ImageTooLargeError):
        open_header(png(6000, 5000, b""), max_pixels=29_999_999)
    for source in (encoded(picture(10, 10)), picture(10, 10), np.zeros((10, 10), np.uint8)):
        assert open_image(source, max_pixels=100).size == (10, 10)
        with pytest.raises(ImageTooLargeError, match="10 x 10 pixels, but 99 are allowed"):
            open_image(source, max_pixels=99)


def test_a_jpeg_of_very_many_scans_is_refused():
    data = encoded(Image.new("L", (64, 64)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert open_image(data[:-2] + 10 * scan + data[-2:]).size == (64, 64)
    with pytest.raises(BrokenImageError):
        open_image(data[:-2] + MAX_SCANS * scan + data[-2:])


# Preprocessing


def evaluated(split, preprocessing):
    data = Data("folder", split, split, split, ["one"], preprocessing)
    return torch.cat([batch[0] for batch in evaluation_batches(data, split, 2, torch.device("cpu"))])


@pytest.mark.parametrize(("size", "native_size"), [(32, None), (64, 24), (24, 24), (20, 32), (64, 32), (32, 32)])
def test_inference_sees_exactly_what_evaluation_saw(size, native_size, tmp_path):
    preprocessing = Preprocessing(size, MEAN, STD, native_size)
    paths = []
    for k, (height, width) in enumerate([(41, 67), (67, 41), (32, 32), (24, 24), (7, 9)]):
        for format in ("PNG", "JPEG"):
            paths.append(tmp_path / f"{k}.{format.lower()}")
            Image.fromarray(noise(height, width)).save(paths[-1], format)
    found = torch.stack([preprocess(open_image(path), preprocessing) for path in paths])
    assert found.dtype == torch.float32
    assert found.shape == (len(paths), 3, size, size)
    assert torch.equal(found, evaluated(FileImages(paths, [0] * len(paths)), preprocessing))
    if native_size == 32:  # and of a data set in memory
        arrays = np.stack([noise(32, 32), noise(32, 32)[::-1], noise(32, 32)[:, ::-1]])
        found = torch.stack([preprocess(open_image(array), preprocessing) for array in arrays])
        in_memory = ArrayImages(torch.from_numpy(arrays).permute(0, 3, 1, 2).contiguous(), torch.zeros(3).long())
        assert torch.equal(found, evaluated(in_memory, preprocessing))


@pytest.mark.parametrize("size", [33, 224])
def test_numpy_normalizes_bit_for_bit_like_pytorch(size):
    pixels = np.arange(size * size * 3).reshape(size, size, 3).astype(np.uint8)
    wanted = normalize(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255, Preprocessing(size, MEAN, STD))
    assert torch.equal(preprocess(Image.fromarray(pixels), Preprocessing(size, MEAN, STD)), wanted[0])


def test_the_square_is_the_middle_and_is_normalized():
    wide = Image.new("RGB", (30, 10), "black")
    wide.paste("white", (10, 0, 20, 10))
    for image in (wide, wide.transpose(Image.Transpose.ROTATE_90)):
        square = central_square(image, 10)
        assert torch.equal(square, torch.ones(3, 10, 10))
        found = normalize(square[None], Preprocessing(10, (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)))
        assert found[0, :, 0, 0].tolist() == [1.0, 3.0, 0.5]
