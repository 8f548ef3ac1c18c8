"""JSON with images in base64, read in steps of less than a millisecond.

Python's own parser and decoder hold Python's lock until they have finished, and so stop all other clients. Here long
strings are cut out of the JSON first. Only the rest is parsed at once, and the strings are decoded slice by slice.
"""

import binascii
import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from .errors import MalformedRequestError

LONG = 256  # bytes; longer strings are cut out
MAX_REST = 32_768  # bytes of JSON besides long strings
MAX_QUOTES = 8192
SLICE = 65_536  # bytes of a string that are decoded at once
ESCAPE = 6  # bytes of the longest escape, such as \u002b
LETTERS = bytes.maketrans(b"-_", b"+/")  # from the URL-safe alphabet of base64 to the standard one
DATA_URI = re.compile(rb"\Adata:[^,]{0,1000},")
TOO_MANY_PARTS = "the JSON has too many parts: send the image in base64, and the options."
INVALID = "the body is not valid JSON, as its type says: correct it, or send the image."

Strings = dict[str, memoryview]


def parse_body(body: bytes) -> tuple[Any, Strings]:
    """The content of a body, with a mark in place of each long string, and the long strings by their marks."""
    rest, strings, secret = bytearray(), Strings(), secrets.token_hex(8)
    view, place = memoryview(body), 0
    for begin, end in _strings(body):
        if end - begin > LONG:
            mark = f"{secret}{len(strings)}"
            strings[mark] = view[begin:end]
            rest += view[place : min(begin, place + MAX_REST)]
            rest += mark.encode()
            place = end
    rest += view[place : place + MAX_REST + 1]
    if len(rest) > MAX_REST:
        raise MalformedRequestError(TOO_MANY_PARTS)
    try:
        return json.loads(bytes(rest)), strings
    except (ValueError, RecursionError):
        raise MalformedRequestError(INVALID) from None


def _strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Where each string begins and ends, without its quotes."""
    place, begin = 0, -1
    for _ in range(MAX_QUOTES):
        quote = body.find(b'"', place)
        if quote < 0:
            return
        before = body[max(place, quote - LONG) : quote]
        is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
        place = quote + 1
        if begin < 0:
            begin = place
        elif not is_escaped:
            yield begin, quote
            begin = -1
    raise MalformedRequestError(TOO_MANY_PARTS)


def decode_base64(text: Any, strings: Strings) -> bytes:
    """The bytes that a base64 text of parsed JSON encodes. The text may be the mark of a long string."""
    image, letters = bytearray(), b""
    try:
        for number, part in enumerate(_slices(strings[text]) if text in strings else [text]):
            more = part.encode("ascii") if number else DATA_URI.sub(b"", part.encode("ascii"))
            letters += more.translate(LETTERS, b" \t\r\n")
            whole = max(0, len(letters) - 1) // 4 * 4  # all but the last four letters, because only those may be padded
            if letters.find(b"=", 0, whole) >= 0:
                raise ValueError("padding in the middle")
            image += binascii.a2b_base64(letters[:whole], strict_mode=True)
            letters = letters[whole:]
        image += binascii.a2b_base64(letters + b"=" * (-len(letters) % 4), strict_mode=True)
        return bytes(image)
    except (ValueError, TypeError, AttributeError):  # binascii.Error is a ValueError
        raise MalformedRequestError("the image is not base64: encode the file's bytes.") from None


def _slices(string: memoryview) -> Iterator[str]:
    """The text of a JSON string, in slices that split no escape sequence."""
    place = 0
    while place < len(string):
        part = bytes(string[place : place + SLICE])
        escape = part.rfind(b"\\", 1 - ESCAPE) if place + SLICE < len(string) else -1
        part = part[:escape] if escape > 0 else part
        place += len(part)
        yield json.loads(b'"%b"' % part)
