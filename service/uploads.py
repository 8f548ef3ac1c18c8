"""From a request to the bytes of its images and the options that came with them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from difflib import get_close_matches
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from . import base64_json
from .base64_json import decode_base64
from .errors import (
    BadParameterError,
    MalformedRequestError,
    OverloadedError,
    ServiceError,
    SlowError,
    TooLargeError,
    UnavailableError,
)
from .schemas import Options
from .settings import Settings

FORM, JSON = "multipart/form-data", "application/json"
OPTIONS = tuple(Options.model_fields)
MAX_NAMES = 32  # in a query or a JSON object: each is compared with the options
TOO_MANY_NAMES = f"there are more than {MAX_NAMES} parameters: send only {', '.join(OPTIONS)} and the image."
NEAR = 0.7  # of difflib's ratio: statistic, topK and mode are near; code, token and stop, which others use, are not
SMALL_JSON = 32_768  # bytes that are parsed on the event loop

Work = Callable[..., Awaitable[Any]]  # runs a function on so many bytes of input in a thread: (size, function, ...)


async def read_upload(request: Request, field: str, work: Work) -> tuple[bytes, Options]:
    """The image and the options of a request; those in the body win over those in the query.

    Args:
        field: the name of the image in JSON and in forms; options stand beside it, or within `parameters`, which wins.
        work: where to parse a body that would keep the event loop busy.
    """
    query, kind = _query(request), _kind(request)
    if kind == FORM:
        (image, *_), given = await _from_form(request, field, 1)
    elif kind == JSON:
        image, given = await _parse_json(await _read(request), work, _one_image, field)
    else:  # whatever else it is called; its first bytes say what it is
        image, given = await _read(request), {}
    return _image(image), _options(query | given)


async def read_uploads(
    request: Request, field: str, most: int, work: Work
) -> tuple[list[bytes | ServiceError], Options]:
    """The same for several images, in a form or in JSON; in place of each that cannot be read, its error."""
    query, kind = _query(request), _kind(request)
    if kind == FORM:
        files, given = await _from_form(request, field, most)
        images: list[bytes | ServiceError] = [_or_error(bytes, file) for file in files]
    elif kind == JSON:
        images, given = await _parse_json(await _read(request), work, _several_images, field, most)
    else:
        raise MalformedRequestError(f"several images come in a form, as files {field!r}, or in JSON: see /docs.")
    return images, _options(query | given)


async def _parse_json(body: bytes, work: Work, parse: Callable[..., Any], *arguments: Any) -> Any:
    """What a function makes of a body: in a thread, unless the body is small."""
    return parse(body, *arguments) if len(body) <= SMALL_JSON else await work(len(body), parse, body, *arguments)


def _one_image(body: bytes, field: str) -> tuple[bytes, dict[str, Any]]:
    found, strings, given = _from_json(body)
    if not isinstance(found.get(field), str):
        raise MalformedRequestError(f'the JSON has no text {field!r}: send {{"{field}": "the image in base64"}}.')
    return decode_base64(found[field], strings), given


def _several_images(body: bytes, field: str, most: int) -> tuple[list[bytes | ServiceError], dict[str, Any]]:
    found, strings, given = _from_json(body)
    sources = found.get(field)
    if not isinstance(sources, list) or not 1 <= len(sources) <= most:
        raise MalformedRequestError(f"the request has no list {field!r} of 1 to {most} images: send that many.")
    return [_or_error(decode_base64, source, strings) for source in sources], given


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _query(request: Request) -> dict[str, Any]:
    if request.scope["query_string"].count(b"&") >= MAX_NAMES:
        raise BadParameterError(TOO_MANY_NAMES)
    given = request.query_params
    if not given:
        return {}
    return _options(_chosen(given)).model_dump(exclude_unset=True)


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options among what was given. Other names are other people's, unless they are nearly ours: then misspelt."""
    if len(given) > MAX_NAMES:
        raise BadParameterError(TOO_MANY_NAMES)
    for name in given:
        if name not in OPTIONS and len(name) < 20 and get_close_matches(name.lower(), OPTIONS, cutoff=NEAR):
            raise BadParameterError(f"{name!a} is no option: choose from {', '.join(OPTIONS)}.")
    if isinstance(given.get("top_k"), bool):  # which pydantic would take for 0 or 1
        raise BadParameterError('top_k: send a whole number, as in {"top_k": 3}.')
    return {name: given[name] for name in OPTIONS if given.get(name) is not None}


async def _read(request: Request) -> bytes:
    """The body, in one piece from the start: a list of its parts would take many times their bytes if they are tiny."""
    body = bytearray()
    async for part in request.stream():
        body += part
    return bytes(body)


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadParameterError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


def _image(image: bytes) -> bytes:
    if not image:
        raise MalformedRequestError("the request holds no image: send its bytes as the body, or see /docs.")
    return image


def _or_error(read: Callable[..., bytes], *arguments: Any) -> bytes | ServiceError:
    try:
        return _image(read(*arguments))
    except ServiceError as error:
        return error


class _InMemory(MultiPartParser):
    """Keeps files where their bytes are counted, in memory: on disk each would take a descriptor."""

    spool_max_size = 0  # without end; the body has one


async def _from_form(request: Request, field: str, most: int) -> tuple[list[bytes], dict[str, Any]]:
    parts: dict[str, int] = {"max_files": most, "max_fields": len(OPTIONS) + 5, "max_part_size": 10_000}
    try:
        async with aclosing(request.stream()) as stream:
            form = await _InMemory(request.headers, stream, **parts).parse()
    except (MultiPartException, KeyError, ValueError) as error:
        reason = (
            error.message.rstrip(".") if isinstance(error, MultiPartException) else "its parts cannot be told apart"
        )
        many = reason.startswith("Too many files")
        advice = "send several images to /v1/classify/batch, fewer at a time" if many else "send multipart/form-data"
        raise MalformedRequestError(f"the form cannot be read ({reason}): {advice}.") from None
    images = [await file.read() if isinstance(file, UploadFile) else b"" for file in form.getlist(field)]
    if not images:
        raise MalformedRequestError(f"the form has no file {field!r}: send one, as in -F {field}=@photo.jpg.")
    return images, _chosen({name: text for name, text in form.items() if isinstance(text, str) and text != ""})


def _from_json(body: bytes) -> tuple[dict[str, Any], base64_json.Strings, dict[str, Any]]:
    """What a body of JSON holds, its long strings, and the options in it."""
    data, strings = base64_json.parse(body)
    found = data if isinstance(data, dict) else {}
    inner = {} if found.get("parameters") is None else found["parameters"]
    if not isinstance(inner, dict):
        raise BadParameterError('parameters: send an object of options, as in {"top_k": 3}.')
    for given in (found, inner):
        if given.get("function_to_apply") not in (None, "softmax"):  # an option of Hugging Face's clients
            raise BadParameterError("function_to_apply: scores are softmax's here: say softmax, or leave it out.")
    return found, strings, _chosen(found) | _chosen(inner)


class Upload:
    """A body on its way.

    Attributes:
        size: how many of its bytes have come.
        refusal: why it is given up, once it is.
    """

    def __init__(self) -> None:
        self.size = 0
        self.refusal: ServiceError | None = None
        self._waiting: asyncio.Timeout | None = None

    async def next(self, receive: Any, seconds: float) -> Any:
        """What the client sends next, unless it is silent for too long or the upload is given up."""
        refusal = self.refusal
        if refusal is None:
            try:
                async with asyncio.timeout(seconds) as self._waiting:
                    return await receive()
            except TimeoutError:
                refusal = self.refusal or SlowError(f"nothing of the body came for {seconds:g} s: send it at once.")
            finally:
                self._waiting = None
        raise refusal

    def give_up(self, refusal: ServiceError) -> None:
        self.refusal = refusal
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """How much the bodies of all requests hold.

    Unfinished ones may hold half of what is allowed. Where they are more, that one is given up whose client has been
    silent for longest, so that stalled clients do not keep out active ones.
    """

    def __init__(self, settings: Settings) -> None:
        self.most, self.together, self.stall_seconds = (
            settings.max_bytes,
            settings.max_held_bytes,
            settings.stall_seconds,
        )
        self.held = 0
        self._unfinished: dict[Upload, int] = {}  # bytes of each, those first that have been silent for longest

    async def next(self, upload: Upload, receive: Any) -> Any:
        """What comes next of an upload; raises where that is too much or takes too long."""
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
            silent.give_up(OverloadedError("too many uploads at once, and this one was silent: try again.", 1))
        if upload.refusal is not None:
            raise upload.refusal
        if self.held > self.together:
            raise OverloadedError("too many uploads at once: try again in a second.", 1)
        return message

    def forget(self, upload: Upload) -> None:
        self.held -= upload.size
        self._unfinished.pop(upload, None)

    def give_up_unfinished(self) -> None:
        """Since the service is about to stop."""
        for upload in list(self._unfinished):
            upload.give_up(UnavailableError("the service is about to stop: try again, or another one.", 5))

    def too_large(self) -> TooLargeError:
        return TooLargeError(f"the request is larger than {self.most} bytes: send a smaller or more compressed image.")


class BodyLimit:
    """ASGI middleware: counts the bytes of bodies as they come, and gives up those that are too many or too slow."""

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
            if is_whole:  # what comes now is that the client leaves, whenever it does
                return await receive()
            message = await bodies.next(upload, receive)
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            bodies.forget(upload)
