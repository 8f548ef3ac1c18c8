"""Reads the images and options of a request.

Python's lock stops all other clients, so it is held for a few milliseconds at a time: JSON of many parts or escapes,
which takes a parser long, is refused first, and base64 is decoded slice by slice.
"""

import binascii
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .errors import ServiceError
from .schemas import MAX_IMAGES, Options

FORM, JSON = "multipart/form-data", "application/json"
OPTIONS = tuple(Options.model_fields)
# In a query or a JSON object, because each is compared with the options.
MAX_NAMES = 32
# Of difflib's ratio: statistic, topK and mode are near; code, token and stop are not.
NEAR = 0.7
FILE_NAME = re.compile(rb"[^\r\n\0]+\.(jpe?g|png|webp|gif|bmp|tiff?|json)", re.IGNORECASE)
# Bytes of JSON that are parsed in the event loop.
SMALL_JSON = 32_768
# Strings, lists, objects and their members in JSON.
MAX_PARTS = 8192
STRUCTURE = (b'"', b",", b"[", b"{")
# Bytes per escape. Base64 has one per 32 letters if + and / are escaped.
BYTES_PER_ESCAPE = 16
SLICE = 65_536
# From the URL-safe alphabet of base64 to the standard one.
LETTERS = bytes.maketrans(b"-_", b"+/")
DATA_URI = re.compile(r"data:[^,]{0,1000},")
# Of a form's content type, and of the disposition of its parts.
MAX_OPTIONS = 8
BOUNDARY = re.compile(rb'[^"\\]{1,200}')

# Runs a function of an input of this size in a thread: (size, function, ...).
Work = Callable[..., Awaitable[Any]]


def _malformed(message: str) -> ServiceError:
    return ServiceError("malformed_request", message)


async def read_uploads(
    request: Request, field: str, several: bool, work: Work
) -> tuple[list[bytes | ServiceError], Options]:
    """The images of a request, with an error for each that cannot be read, and its options.

    Options in the body override those in the query.

    Args:
        field: the name of the image in JSON and in forms; options are beside it, or in `parameters`, which overrides.
        several: whether there may be more than one image: a list in JSON, or several files in a form.
        work: runs the parsing of a large body outside the event loop.
    """
    query, kind = _query(request), request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        files, given = await _from_form(request, field, MAX_IMAGES if several else 1)
        images = [_or_error(bytes, file) for file in files]
    elif kind == JSON:
        body = await _read_body(request)
        if len(body) <= SMALL_JSON:
            images, given = _from_json(body, field, several)
        else:
            images, given = await work(len(body), _from_json, body, field, several)
    elif several:
        raise _malformed(f"the request has no images: send a form with files {field!r}, or JSON; see /docs.")
    else:
        # The first bytes determine the format, whatever the header says.
        images, given = [_or_error(_not_text, await _read_body(request))], {}
    return images, _options(query | given)


async def _read_body(request: Request) -> bytes:
    """The body in one buffer. A list of tiny parts would need many times their size."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return bytes(body)


def _or_error(read: Callable[..., bytes], source: Any) -> bytes | ServiceError:
    try:
        image = read(source)
    except ServiceError as error:
        return error
    return image or _malformed("the request has no image: send its bytes as the body, or see /docs.")


def _not_text(body: bytes) -> bytes:
    """Refuse the mistakes of curl's users: a file's name instead of the file, and JSON without its content type."""
    start = body[:5000].strip()
    if start.startswith(b"{") or (len(body) < 5000 and FILE_NAME.fullmatch(start)):
        raise ServiceError(
            "unsupported_format",
            "the body is text instead of an image: with curl, send --data-binary @photo.jpg; send JSON with the header "
            "Content-Type: application/json.",
        )
    return body


# Options


def _query(request: Request) -> dict[str, Any]:
    _check_number(request.scope["query_string"].count(b"&") + 1)
    given = request.query_params
    return _options(_chosen(given)).model_dump(exclude_unset=True) if given else {}


def _check_number(names: int) -> None:
    if names > MAX_NAMES:
        raise ServiceError(
            "bad_parameter",
            f"there are more than {MAX_NAMES} parameters: send only {', '.join(OPTIONS)} and the image.",
        )


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the given parameters. Other names are ignored, unless they are nearly an option: misspelt."""
    _check_number(len(given))
    for name in given:
        if name not in OPTIONS and len(name) < 20 and get_close_matches(name.lower(), OPTIONS, cutoff=NEAR):
            raise ServiceError("bad_parameter", f"{name!a} is not an option: choose from {', '.join(OPTIONS)}.")
    # Pydantic would accept it as 0 or 1.
    if isinstance(given.get("top_k"), bool):
        raise ServiceError("bad_parameter", 'top_k: send a whole number, as in {"top_k": 3}.')
    return {name: given[name] for name in OPTIONS if given.get(name) is not None}


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ServiceError("bad_parameter", f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


# JSON


def _from_json(body: bytes, field: str, several: bool) -> tuple[list[bytes | ServiceError], dict[str, Any]]:
    data = parse_body(body)
    found = data if isinstance(data, dict) else {}
    inner = {} if found.get("parameters") is None else found["parameters"]
    if not isinstance(inner, dict):
        raise ServiceError("bad_parameter", 'parameters: send an object of options, as in {"top_k": 3}.')
    # An option of Hugging Face's clients.
    if any(given.get("function_to_apply") not in (None, "softmax") for given in (found, inner)):
        raise ServiceError("bad_parameter", "function_to_apply: only softmax is supported: send softmax, or omit it.")
    options, sources = _chosen(found) | _chosen(inner), found.get(field, [])
    if several and (not isinstance(sources, list) or not 1 <= len(sources) <= MAX_IMAGES):
        raise _malformed(f"the request has no list {field!r} of 1 to {MAX_IMAGES} images: send that many.")
    if not several and not isinstance(sources, str):
        raise _malformed(f'the JSON has no text {field!r}: send {{"{field}": "the image in base64"}}.')
    return [_or_error(decode_base64, source) for source in (sources if several else [sources])], options


def parse_body(body: bytes) -> Any:
    """The content of a JSON body."""
    parts = escapes = 0
    for place in range(0, len(body), SLICE):
        part = body[place : place + SLICE]
        parts += sum(map(part.count, STRUCTURE))
        escapes += part.count(b"\\")
    if parts > MAX_PARTS or escapes > MAX_PARTS + len(body) // BYTES_PER_ESCAPE:
        raise _malformed("the JSON has too many parts: send the image in base64, and the options.")
    try:
        return from_json(body)
    except ValueError:
        raise _malformed("the body is not valid JSON, as its type says: correct it, or send the image.") from None


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
    except (ValueError, TypeError):
        raise _malformed("the image is not base64: encode the file's bytes.") from None


# Forms


class _InMemory(MultiPartParser):
    """Keeps files in memory, where their bytes are counted. On disk, each would need a descriptor."""

    # Unlimited, because the body is limited.
    spool_max_size = 0

    def on_headers_finished(self) -> None:
        _check_header_options(self._current_part.content_disposition or b"")
        super().on_headers_finished()


def _check_header_options(header: bytes) -> None:
    """Refuse a header of many options, because Python needs microseconds for each."""
    if header.count(b";") > MAX_OPTIONS:
        raise MultiPartException("a header has too many options")


def _only_boundary(headers: Headers) -> Headers:
    """The content type without its charset, which could choose a slow codec: forms are in UTF-8."""
    given = headers["content-type"].encode("latin-1")
    _check_header_options(given)
    boundary = parse_options_header(given)[1].get(b"boundary", b"")
    if not BOUNDARY.fullmatch(boundary):
        raise MultiPartException("it has no boundary")
    return Headers(raw=[(b"content-type", b'%b; boundary="%b"' % (FORM.encode(), boundary))])


async def _from_form(request: Request, field: str, most: int) -> tuple[list[bytes], dict[str, Any]]:
    try:
        headers = _only_boundary(request.headers)
        async with aclosing(request.stream()) as stream:
            parser = _InMemory(headers, stream, max_files=most, max_fields=len(OPTIONS) + 5, max_part_size=10_000)
            form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        reason = error.message.rstrip(".") if isinstance(error, MultiPartException) else "its parts cannot be separated"
        many = reason.startswith("Too many files")
        advice = "send several images to /v1/classify/batch, fewer at a time" if many else "send multipart/form-data"
        raise _malformed(f"the form cannot be read ({reason}): {advice}.") from None
    files = form.getlist(field)
    if not files:
        raise _malformed(f"the form has no file {field!r}: send one, as in -F {field}=@photo.jpg.")
    images = [await file.read() for file in files if isinstance(file, UploadFile)]
    if len(images) < len(files):
        raise _malformed(
            f"the field {field!r} of the form contains text instead of a file: send the file, with an @ before its "
            f"name, as in -F {field}=@photo.jpg."
        )
    return images, _chosen({name: text for name, text in form.items() if isinstance(text, str) and text != ""})
