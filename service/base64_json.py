"""JSON with images in base64, read in steps that hold Python's lock for a few milliseconds.

Python's lock stops all other clients. Bodies of many parts or escapes, which take a parser long, are refused first, and
base64 is decoded slice by slice.
"""

import binascii
import re
from typing import Any

from pydantic_core import from_json

from .errors import ServiceError

# Strings, lists, objects and their members.
MAX_PARTS = 8192
STRUCTURE = (b'"', b",", b"[", b"{")
# Bytes per escape. Base64 has one per 32 letters if + and / are escaped.
BYTES_PER_ESCAPE = 16
SLICE = 65_536
# From the URL-safe alphabet of base64 to the standard one.
LETTERS = bytes.maketrans(b"-_", b"+/")
DATA_URI = re.compile(r"data:[^,]{0,1000},")
TOO_MANY_PARTS = "the JSON has too many parts: send the image in base64, and the options."
INVALID = "the body is not valid JSON, as its type says: correct it, or send the image."


def parse_body(body: bytes) -> Any:
    """The content of a JSON body."""
    parts = escapes = 0
    for place in range(0, len(body), SLICE):
        part = body[place : place + SLICE]
        parts += sum(map(part.count, STRUCTURE))
        escapes += part.count(b"\\")
    if parts > MAX_PARTS or escapes > MAX_PARTS + len(body) // BYTES_PER_ESCAPE:
        raise ServiceError("malformed_request", TOO_MANY_PARTS)
    try:
        return from_json(body)
    except ValueError:
        raise ServiceError("malformed_request", INVALID) from None


def decode_base64(text: Any) -> bytes:
    """The bytes that a base64 text encodes."""
    image, letters = bytearray(), b""
    try:
        begin = found.end() if (found := DATA_URI.match(text)) else 0
        for place in range(begin, len(text), SLICE):
            letters += text[place : place + SLICE].encode("ascii").translate(LETTERS, b" \t\r\n")
            # All but the last four letters, because only those may be padded.
            whole = max(0, len(letters) - 1) // 4 * 4
            if letters.find(b"=", 0, whole) >= 0:
                raise ValueError("padding in the middle")
            image += binascii.a2b_base64(letters[:whole], strict_mode=True)
            letters = letters[whole:]
        image += binascii.a2b_base64(letters + b"=" * (-len(letters) % 4), strict_mode=True)
        return bytes(image)
    except (ValueError, TypeError):  # binascii.Error is a ValueError
        raise ServiceError("malformed_request", "the image is not base64: encode the file's bytes.") from None
