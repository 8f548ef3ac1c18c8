"""From a request to the bytes of an image and the options that came with them."""

import base64
import binascii
import json
import re
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from service.errors import BadParameterError, MalformedRequestError, OverloadedError, TooLargeError
from service.schemas import Options

OPTIONS = tuple(Options.model_fields)
MAX_JSON_PARTS = 1000  # base64 has none; a million would keep Python, and so every other client, waiting


async def read_upload(request: Request, field: str) -> tuple[bytes, Options]:
    """The image and the options of a request; those in the body win over those in the query.

    Args:
        field: the name of the image in JSON and in forms; options stand beside it, or within `parameters`.
    """
    query = _options({name: request.query_params[name] for name in OPTIONS if name in request.query_params})
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        image, given = await _from_form(request, field)
    elif kind == "application/json":
        image, given = _from_json(await request.body(), field)
    else:  # whatever else it is called; what it is, its first bytes say
        image, given = await request.body(), {}
    if not image:
        raise MalformedRequestError("the request holds no image: send its bytes as the body, or see /docs.")
    return image, _options(query.model_dump(exclude_unset=True) | given)


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadParameterError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


async def _from_form(request: Request, field: str) -> tuple[bytes, dict[str, Any]]:
    try:
        async with request.form(max_files=1, max_fields=len(OPTIONS) + 5, max_part_size=10_000) as form:
            upload = form.get(field)
            if not isinstance(upload, UploadFile):
                raise MalformedRequestError(f"the form has no file {field!r}: send one, as in -F {field}=@photo.jpg.")
            given = {name: form[name] for name in OPTIONS if isinstance(form.get(name), str) and form[name] != ""}
            return await upload.read(), given
    except (HTTPException, KeyError, ValueError) as error:  # of which the first is what starlette makes of its own
        reason = error.detail.rstrip(".") if isinstance(error, HTTPException) else "its parts cannot be told apart"
        raise MalformedRequestError(f"the form cannot be read ({reason}): send multipart/form-data.") from None


def _from_json(body: bytes, field: str) -> tuple[bytes, dict[str, Any]]:
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_PARTS:
        raise MalformedRequestError("the JSON has too many parts: send the image in base64, and the options.")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedRequestError("the body is called JSON and is none: send valid JSON, or the image.") from None
    if not isinstance(data, dict) or not isinstance(data.get(field), str):
        raise MalformedRequestError(f'the JSON has no text {field!r}: send {{"{field}": "the image in base64"}}.')
    try:
        image = base64.b64decode(re.sub(r"^data:[^,]*,", "", data[field]), validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRequestError(f"{field} is not base64: encode the image file's bytes.") from None
    inner = data.get("parameters")
    given = inner if isinstance(inner, dict) else data
    return image, {name: given[name] for name in OPTIONS if given.get(name) is not None}


class BodyLimit:
    """ASGI middleware: counts the bytes of bodies as they come, and refuses those that are too many.

    Args:
        most: bytes of one body.
        together: bytes of all bodies that are in memory.
    """

    def __init__(self, app: Any, most: int, together: int) -> None:
        self.app, self.most, self.together = app, most, together
        self.held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        size = 0
        announced = dict(scope["headers"]).get(b"content-length", b"")
        hopeless = announced.isdigit() and int(announced[:19]) > 11 * self.most  # more than would be swallowed

        async def counted() -> Any:
            nonlocal size
            if hopeless:
                raise self._too_large()
            message = await receive()
            more = len(message.get("body", b""))
            size += more
            self.held += more
            if size > self.most:
                await self._swallow(message, receive)
                raise self._too_large()
            if self.held > self.together:
                raise OverloadedError("too many uploads at once: try again in a second.", 1)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.held -= size

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"the request is larger than {self.most} bytes: send a smaller or more compressed image.")

    async def _swallow(self, message: Any, receive: Any) -> None:
        """Read on, up to ten times as much as is allowed: many clients hear no answer before they have sent all."""
        size = 0
        while message.get("more_body") and size < 10 * self.most:
            message = await receive()
            size += len(message.get("body", b""))
