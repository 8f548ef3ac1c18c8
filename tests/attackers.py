"""Clients that cost a service more than they should, each as bytes to send."""

import argparse
import base64
import io
import json
import random
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from difflib import get_close_matches
from functools import cache

import numpy as np
from http_client import chunked, connect, head, post
from PIL import Image, ImageFile

# The address of attackers, so that limits per address tell them from healthy clients.
ATTACKERS = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"

# Images


def picture(number: int = 0, side: int = 40) -> Image.Image:
    """A picture with some detail; another one for each number."""
    row, column = np.mgrid[0:side, 0:side] / (3 + number)
    colours = np.stack([np.sin(column + number), np.cos(row * (1 + number % 3)), np.sin(row + column)], axis=-1)
    return Image.fromarray((127.5 + 120 * colours).astype(np.uint8))


def noise(side: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream, before = io.BytesIO(), ImageFile.MAXBLOCK
    ImageFile.MAXBLOCK = 2**26  # or Pillow could not write noise as a progressive JPEG
    try:
        image.save(stream, kind, **options)
    finally:
        ImageFile.MAXBLOCK = before
    return stream.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes], pixels: bytes = b"", data: bytes = b"") -> bytes:
    """A grey PNG of 8 bits; or of these compressed pixels, in RGB."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if data else 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", data or zlib.compress(pixels, 1)), (b"IEND", b"")]
    found = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(found)


Tag = tuple[int, int, int, int]


def tiff(*entries: Tag, after: bytes = b"") -> bytes:
    """A TIFF of these tags, types, counts and values, and of what follows its directory."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + packed + bytes(4) + after


def striped(strip: bytes, count: int, *more: Tag, size: tuple[int, int], depth: bytes = b"") -> bytes:
    """A TIFF whose strips are all the same bytes; `depth` are the bits per sample, if there are several."""
    place = 8 + 2 + 12 * (6 + len(more)) + 4 + len(depth)
    offsets, sizes = (struct.pack("<I", value) * count for value in (place, len(strip)))
    bits = (258, 3, 3, place - len(depth)) if depth else (258, 3, 1, 8)
    return tiff(
        (256, 4, 1, size[0]), (257, 4, 1, size[1]), bits, (273, 4, count, place + len(strip)), (278, 4, 1, 1),
        (279, 4, count, place + len(strip) + len(offsets)), *more, after=depth + strip + offsets + sizes,
    )  # fmt: skip


GREY, RGB, PLAIN, DEFLATED = (262, 3, 1, 1), (262, 3, 1, 2), (259, 3, 1, 1), (259, 3, 1, 8)


def strips(count: int = 32_768) -> bytes:
    """A TIFF of one row per strip, all of them the same eight bytes."""
    return striped(bytes(8), count, GREY, PLAIN, size=(8, count))


def planar(side: int = 4000) -> bytes:
    """An uncompressed TIFF of three planes, one row per strip."""
    more = (RGB, PLAIN, (277, 3, 1, 3), (284, 3, 1, 2))
    return striped(bytes(side), 3 * side, *more, size=(side, side), depth=struct.pack("<HHH", 8, 8, 8))


def progressive(side: int = 2000) -> bytes:
    return encoded(noise(side), "JPEG", quality=90, progressive=True)


@cache
def large_webp() -> bytes:
    """49 megapixels in a few bytes."""
    return encoded(Image.new("RGB", (7000, 7000)), "WEBP", lossless=True, method=0)


def run_lengths(side: int = 7000) -> bytes:
    """Pillow decodes them in Python, and no other thread has its turn meanwhile."""
    header = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, 8, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 1084, 0, 0, 1078) + header + bytes(1024) + b"\0\0\0\1\0\1"


def rationals() -> bytes:
    """EXIF of more than a million numbers."""
    exif = tiff((0x0112, 3, 1, 6), (0x011A, 5, 1_200_000, 38), after=bytes(9_600_000))
    return encoded(picture(), "PNG", exif=exif)


def many_tags() -> bytes:
    return encoded(picture(), "PNG", exif=tiff(*((tag, 5, 1, 2**31) for tag in range(1, 65_536))))


def packed(bits: str) -> bytes:
    """Bits in the order in which deflate and VP8L read them."""
    whole = bits.ljust(-(-len(bits) // 8) * 8, "0")
    return np.packbits(np.frombuffer(whole.encode(), np.uint8) - 48, bitorder="little").tobytes()


def number(value: int, bits: int) -> str:
    return f"{value:0{bits}b}"[::-1]


def lossless_webp(side: int = 996) -> bytes:
    """A lossless WebP with a group of five codes for each tile of 4 x 4 pixels."""
    tiles = (side // 4) ** 2
    lengths = "".join(number(length, 3) for length in (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1))
    # A code of 256 symbols of 8 bits each, and one of a single symbol.
    full, single = "0" + number(8, 4) + lengths + "0" + "0" * 256, "1000"
    meta = "0" + full + "1" + number(13, 7) + full + 3 * single
    meta += "".join(f"{tile & 255:08b}{tile >> 8:08b}" for tile in range(tiles))
    header = number(0x2F, 8) + number(side - 1, 14) + number(side - 1, 14) + number(0, 4)
    data = packed(header + "0" + "0" + "1" + number(0, 3) + meta + tiles * 5 * single)
    data += bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data


def empty_blocks(count: int) -> bytes:
    """So many deflate blocks, in eights, that hold nothing but their own codes."""
    lengths = "".join(number(length, 3) for length in (0, 0, 1, *[0] * 14, 1))
    block = number(4, 3) + number(0, 10) + number(14, 4) + lengths + "1" + number(127, 7) + "1" + number(107, 7) + "000"
    return packed(8 * block) * (count // 8)


def png_of_empty_blocks(size: int = 9_900_000, side: int = 64) -> bytes:
    good = zlib.compress(bytes((3 * side + 1) * side))
    return png(side, side, data=good[:2] + empty_blocks(8 * size // 90) + good[2:])


def tiff_of_one_strip(count: int = 30_000) -> bytes:
    """A TIFF of many strips, all of them the same empty deflate blocks."""
    good = zlib.compress(bytes(8))
    return striped(good[:2] + empty_blocks(26_000) + good[2:], count, GREY, DEFLATED, size=(8, count))


def form_in_punycode(files: int = 32, fields: int = 7) -> bytes:
    """A form whose charset is a slow codec of Python, with names as long as they may be."""
    name, value = ("".join(map(chr, range(5000, 5000 + k))).encode("punycode").decode() for k in (1450, 3500))
    parts = [f'--x\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n\r\nx\r\n'] * files
    parts += [f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{value}\r\n' for k in range(fields)]
    body = "".join([*parts, "--x--\r\n"]).encode()
    return post(body, "Content-Type: multipart/form-data; boundary=x; charset=punycode", target="/v1/classify/batch")


@cache
def large_png() -> bytes:
    return png(7000, 7000, pixels=bytes(7001 * 7000))


# What attackers send, by the rows of the table of attack.py


def long_method() -> bytes:
    return head("".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=15_000)), "/health/live")


@cache
def near_names(count: int = 960) -> list[str]:
    """Names whose letters are those of an option, but whose order is just not near enough to be called misspelt.

    They pass the quick tests of `difflib.get_close_matches`, so that each costs it a full comparison.
    """
    generator, names = random.Random(0), dict[str, None]()
    while len(names) < count:
        name = "".join(generator.sample("statistics", 10))
        if not get_close_matches(name, ["statistics"], cutoff=0.7):
            names[name] = None
    return list(names)


def in_json(**fields: object) -> bytes:
    return post(json.dumps(fields).encode(), "Content-Type: application/json")


ROWS: dict[str, Callable[[], bytes]] = {
    "1 chunks of 17 bytes": lambda: chunked() + (b"11\r\n" + b"a" * 17 + b"\r\n") * 410_000 + b"0\r\n\r\n",
    "2 methods of 15 kB": long_method,
    "3a TIFF of 32,768 strips": lambda: post(strips()),
    "3b planar TIFF": lambda: post(planar()),
    "3c progressive JPEG of noise": lambda: post(progressive()),
    "4a near-miss names in JSON": lambda: in_json(image="aGVsbG8=", **dict.fromkeys(near_names(), 1)),
    "4b near-miss names in a query": lambda: post(b"x", target="/v1/classify?" + "=1&".join(near_names()) + "=1"),
    "5 empty headers": lambda: b"GET /health/live HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 15_800 + b"\r\n",
    "6 base64 in JSON, 9.9 MB": lambda: in_json(image=base64.b64encode(bytes(7_420_000)).decode()),
    "7 WebP of 49 megapixels": lambda: post(large_webp()),
    "8 form in punycode": form_in_punycode,
    "9 WebP of 62,001 codes": lambda: post(lossless_webp()),
    "10 TIFF of one shared strip": lambda: post(tiff_of_one_strip()),
    "11 PNG of empty blocks": lambda: post(png_of_empty_blocks()),
}
OTHERS: dict[str, Callable[[], bytes]] = {
    "trailers": lambda: chunked() + b"0\r\n" + b"".join(b"X-%d: %s\r\n" % (k, b"a" * 50) for k in range(50_000)),
    "trailers that end": lambda: chunked() + b"0\r\n" + b"a:\r\n" * 50_000 + b"\r\n",
    "upgrade": lambda: post(b"GET / HTTP/1.1\r\n\r\n", "Connection: Upgrade", "Upgrade: h2c"),
    "stalled head": lambda: b"POST /v1/classify HTTP/1.1\r\nHost: a\r\nX-Lo",
    "stalled body": lambda: post(bytes(9_000_000))[:3_000_000],
    "pipelining": lambda: b"GET /health/live HTTP/1.1\r\nHost:a\r\n\r\n" * 20_000,
    "chunks of 1 byte": lambda: chunked() + b"1\r\na\r\n" * 500_000 + b"0\r\n\r\n",
    "run lengths": lambda: post(run_lengths()),
    "many rows": lambda: post(png(1, 49_999_999, pixels=bytes(1000))),
    "EXIF in a PNG": lambda: post(rationals()),
    "65535 tags": lambda: post(many_tags()),
    "large PNG": lambda: post(large_png()),
    "PNG of many chunks": lambda: post(png(9, 9, *[(b"eXIf", b"")] * 30_000, pixels=bytes(90))),
    "GIF of many blocks": lambda: post(encoded(picture(), "GIF")[:-1] + b"\x21\xfe" + b"\x01a" * 130_000 + b"\0;"),
}  # fmt: skip


@cache
def prepared(name: str) -> bytes:
    """What an attacker sends, made once: making it must not take time from the service."""
    return (ROWS | OTHERS)[name]()


def attack(port: int, name: str, until: float) -> int:
    """Send the same again and again, each time on a new connection, and read an answer; how often it was sent."""
    sent = 0
    while (left := until - time.monotonic()) > 0:
        data = long_method() if name.startswith("2 ") else prepared(name)
        with suppress(OSError), connect(port, left, ATTACKERS) as connection:
            connection.sendall(data)
            connection.recv(65_536)
        sent += 1
    return sent


def begin(port: int, seconds: float, *flags: object) -> subprocess.Popen[str]:
    """A process of attackers; its output is a line when it begins, and how often each attack was sent."""
    command = [sys.executable, __file__, str(port), str(seconds), *map(str, flags)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def main() -> None:
    """Attack a port of this machine for some seconds, with one attacker or with random ones in turn."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--name", choices=[*ROWS, *OTHERS])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = [args.name] if args.name else [*ROWS, *OTHERS]
    for name in names:
        prepared(name)
    print("begun", flush=True)
    end = time.monotonic() + args.seconds
    sent: Counter[str] = Counter()

    def client(number: int) -> None:
        generator = random.Random(args.seed + number)
        while (now := time.monotonic()) < end:
            name = generator.choice(names)
            sent[name] += attack(args.port, name, end if args.name else min(end, now + generator.uniform(0.1, 3)))
            time.sleep(0 if args.name else generator.uniform(0, 1))

    with ThreadPoolExecutor(args.clients) as clients:
        list(clients.map(client, range(args.clients)))
    print(json.dumps(sent))


if __name__ == "__main__":
    main()
