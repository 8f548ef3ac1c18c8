"""Reads the images and options of a request."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .base64_json import decode_base64, parse_body
from .errors import ServiceError
from .schemas import Options
from .settings import Settings

FORM, JSON = "multipart/form-data", "application/json"
OPTIONS = tuple(Options.model_fields)
MAX_NAMES = 32  # in a query or a JSON object, because each is compared with the options
TOO_MANY_NAMES = f"there are more than {MAX_NAMES} parameters: send only {', '.join(OPTIONS)} and the image."
NEAR = 0.7  # of difflib's ratio: statistic, topK and mode are near; code, token and stop are not
FILE_NAME = re.compile(rb"[^\r\n\0]+\.(jpe?g|png|webp|gif|bmp|tiff?|json)", re.IGNORECASE)
# Bytes that are parsed in the event loop.
SMALL_JSON = 32_768
# Of a form's content type, and of the disposition of its parts.
MAX_OPTIONS = 8
BOUNDARY = re.compile(rb'[^"\\]{1,200}')

Work = Callable[..., Awaitable[Any]]  # runs a function of an input of this size in a thread: (size, function, ...)


async def read_upload(request: Request, field: str, work: Work) -> tuple[bytes, Options]:
    """The image and the options of a request. Options in the body override those in the query.

    Args:
        field: the name of the image in JSON and in forms; options are beside it, or in `parameters`, which overrides.
        work: runs the parsing of a large body outside the event loop.
    """
    query, kind = _query(request), _content_type(request)
    if kind == FORM:
        (image, *_), given = await _from_form(request, field, 1)
    elif kind == JSON:
        image, given = await _parse_json(await _read_body(request), work, _one_image, field)
    else:  # any other content type; the first bytes determine the format
        image, given = _not_text(await _read_body(request)), {}
    return _image(image), _options(query | given)


async def read_uploads(
    request: Request, field: str, most: int, work: Work
) -> tuple[list[bytes | ServiceError], Options]:
    """The same for several images, in a form or in JSON, with an error for each that cannot be read."""
    query, kind = _query(request), _content_type(request)
    if kind == FORM:
        files, given = await _from_form(request, field, most)
        images: list[bytes | ServiceError] = [_or_error(bytes, file) for file in files]
    elif kind == JSON:
        images, given = await _parse_json(await _read_body(request), work, _several_images, field, most)
    else:
        raise ServiceError(
            "malformed_request", f"the request has no images: send a form with files {field!r}, or JSON; see /docs."
        )
    return images, _options(query | given)


async def _parse_json(body: bytes, work: Work, parse: Callable[..., Any], *arguments: Any) -> Any:
    """Parse a body with a function, in a thread unless the body is small."""
    return parse(body, *arguments) if len(body) <= SMALL_JSON else await work(len(body), parse, body, *arguments)


def _one_image(body: bytes, field: str) -> tuple[bytes, dict[str, Any]]:
    found, given = _from_json(body)
    if not isinstance(found.get(field), str):
        raise ServiceError(
            "malformed_request", f'the JSON has no text {field!r}: send {{"{field}": "the image in base64"}}.'
        )
    return decode_base64(found[field]), given


def _several_images(body: bytes, field: str, most: int) -> tuple[list[bytes | ServiceError], dict[str, Any]]:
    found, given = _from_json(body)
    sources = found.get(field)
    if not isinstance(sources, list) or not 1 <= len(sources) <= most:
        raise ServiceError(
            "malformed_request", f"the request has no list {field!r} of 1 to {most} images: send that many."
        )
    return [_or_error(decode_base64, source) for source in sources], given


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _query(request: Request) -> dict[str, Any]:
    if request.scope["query_string"].count(b"&") >= MAX_NAMES:
        raise ServiceError("bad_parameter", TOO_MANY_NAMES)
    given = request.query_params
    if not given:
        return {}
    return _options(_chosen(given)).model_dump(exclude_unset=True)


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among the given parameters. Other names are ignored, unless they are nearly an option: misspelt."""
    if len(given) > MAX_NAMES:
        raise ServiceError("bad_parameter", TOO_MANY_NAMES)
    for name in given:
        if name not in OPTIONS and len(name) < 20 and get_close_matches(name.lower(), OPTIONS, cutoff=NEAR):
            raise ServiceError("bad_parameter", f"{name!a} is not an option: choose from {', '.join(OPTIONS)}.")
    if isinstance(given.get("top_k"), bool):  # pydantic would accept it as 0 or 1
        raise ServiceError("bad_parameter", 'top_k: send a whole number, as in {"top_k": 3}.')
    return {name: given[name] for name in OPTIONS if given.get(name) is not None}


async def _read_body(request: Request) -> bytes:
    """The body in one buffer. A list of tiny parts would need many times their size."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return bytes(body)


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ServiceError("bad_parameter", f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


def _image(image: bytes) -> bytes:
    if not image:
        raise ServiceError("malformed_request", "the request has no image: send its bytes as the body, or see /docs.")
    return image


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


def _or_error(read: Callable[..., bytes], *arguments: Any) -> bytes | ServiceError:
    try:
        return _image(read(*arguments))
    except ServiceError as error:
        return error


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
    parts: dict[str, int] = {"max_files": most, "max_fields": len(OPTIONS) + 5, "max_part_size": 10_000}
    try:
        headers = _only_boundary(request.headers)
        async with aclosing(request.stream()) as stream:
            form = await _InMemory(headers, stream, **parts).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        reason = error.message.rstrip(".") if isinstance(error, MultiPartException) else "its parts cannot be separated"
        many = reason.startswith("Too many files")
        advice = "send several images to /v1/classify/batch, fewer at a time" if many else "send multipart/form-data"
        raise ServiceError("malformed_request", f"the form cannot be read ({reason}): {advice}.") from None
    files = form.getlist(field)
    if not files:
        raise ServiceError(
            "malformed_request", f"the form has no file {field!r}: send one, as in -F {field}=@photo.jpg."
        )
    images = [await file.read() for file in files if isinstance(file, UploadFile)]
    if len(images) < len(files):
        raise ServiceError(
            "malformed_request",
            f"the field {field!r} of the form contains text instead of a file: send the file, with an @ before its "
            f"name, as in -F {field}=@photo.jpg.",
        )
    return images, _chosen({name: text for name, text in form.items() if isinstance(text, str) and text != ""})


def _from_json(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a JSON body, and its options."""
    data = parse_body(body)
    found = data if isinstance(data, dict) else {}
    inner = {} if found.get("parameters") is None else found["parameters"]
    if not isinstance(inner, dict):
        raise ServiceError("bad_parameter", 'parameters: send an object of options, as in {"top_k": 3}.')
    for given in (found, inner):
        if given.get("function_to_apply") not in (None, "softmax"):  # an option of Hugging Face's clients
            raise ServiceError(
                "bad_parameter", "function_to_apply: only softmax is supported: send softmax, or omit it."
            )
    return found, _chosen(found) | _chosen(inner)


class Upload:
    """A body that is being received.

    Attributes:
        size: number of received bytes.
        refusal: the reason if it was aborted.
    """

    def __init__(self) -> None:
        self.size = 0
        self.refusal: ServiceError | None = None
        self._waiting: asyncio.Timeout | None = None

    async def next(self, receive: Any, seconds: float) -> Any:
        """The next message of the client; an error if it is silent for too long or the upload is aborted."""
        refusal = self.refusal
        if refusal is None:
            try:
                async with asyncio.timeout(seconds) as self._waiting:
                    return await receive()
            except TimeoutError:
                refusal = self.refusal or ServiceError(
                    "too_slow", f"no data of the body arrived for {seconds:g} s: send it at once."
                )
            finally:
                self._waiting = None
        raise refusal

    def give_up(self, refusal: ServiceError) -> None:
        self.refusal = refusal
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """The memory of the bodies of all requests.

    Unfinished bodies may use half of the limit. Beyond that, the upload whose client was silent for the longest time is
    aborted, so that stalled clients do not block active ones.
    """

    def __init__(self, settings: Settings) -> None:
        self.most, self.together = settings.max_bytes, settings.max_held_bytes
        self.stall_seconds, self.held = settings.stall_seconds, 0
        # Bytes of each upload, the longest silent first.
        self._unfinished: dict[Upload, int] = {}

    async def next(self, upload: Upload, receive: Any) -> Any:
        """The next part of an upload; an error if it is too large or too slow."""
        self._unfinished.setdefault(upload, 0)
        message = await upload.next(receive, self.stall_seconds)
        more = len(message.get("body", b""))
        upload.size += more
        self.held += more
        if upload.size > self.most:
            raise self.too_large()
        self._unfinished.pop(upload, None)
        if message.get("more_body", False):
            self._unfinished[upload] = upload.size
        while sum(self._unfinished.values()) > self.together // 2:
            silent = next(iter(self._unfinished))
            del self._unfinished[silent]
            silent.give_up(
                ServiceError("overloaded", "too many uploads at once, and this one was silent: try again.", 1)
            )
        if upload.refusal is not None:
            raise upload.refusal
        if self.held > self.together:
            raise ServiceError("overloaded", "too many uploads at once: try again in a second.", 1)
        return message

    def forget(self, upload: Upload) -> None:
        self.held -= upload.size
        self._unfinished.pop(upload, None)

    def give_up_unfinished(self) -> None:
        """Abort unfinished uploads before the service stops."""
        for upload in list(self._unfinished):
            upload.give_up(ServiceError("unavailable", "the service is stopping: try again, or use another one.", 5))

    def too_large(self) -> ServiceError:
        return ServiceError(
            "too_large", f"the request is larger than {self.most} bytes: send a smaller or more compressed image."
        )


class BodyLimit:
    """ASGI middleware: counts the bytes of bodies as they arrive, and aborts bodies that are too large or too slow."""

    def __init__(self, app: Any, bodies: Bodies) -> None:
        self.app, self.bodies = app, bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        bodies, upload, is_whole = self.bodies, Upload(), False
        announced = dict(scope["headers"]).get(b"content-length", b"")
        too_large = announced.isdigit() and int(announced[:19]) > bodies.most

        async def counted() -> Any:
            nonlocal is_whole
            if too_large:
                raise bodies.too_large()
            if is_whole:  # the next message is that the client disconnects
                return await receive()
            message = await bodies.next(upload, receive)
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            bodies.forget(upload)
