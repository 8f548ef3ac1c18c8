"""The bodies of requests: how many bytes of them may be in memory, and how long they may take."""

import asyncio
from typing import Any

from .errors import ServiceError
from .settings import Settings


class Upload:
    """A body that is being received: its size so far, and why it was aborted, if so."""

    def __init__(self) -> None:
        self.size = 0
        self.refusal: ServiceError | None = None
        self.waiting: asyncio.Timeout | None = None

    def give_up(self, refusal: ServiceError) -> None:
        self.refusal = refusal
        if self.waiting is not None:
            self.waiting.reschedule(asyncio.get_running_loop().time())


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

    def limit(self, app: Any) -> Any:
        """ASGI middleware: counts the bytes of bodies as they arrive, and aborts those that are too large or slow."""

        async def limited(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            upload, is_whole = Upload(), False
            announced = dict(scope["headers"]).get(b"content-length", b"")

            async def counted() -> Any:
                nonlocal is_whole
                if announced.isdigit() and int(announced[:19]) > self.most:
                    raise self._too_large()
                # The message after the whole body is that the client disconnects.
                message = await (receive() if is_whole else self._next(upload, receive))
                is_whole = not message.get("more_body", False)
                return message

            try:
                await app(scope, counted, send)
            finally:
                self.held -= upload.size
                self._unfinished.pop(upload, None)

        return limited

    def give_up_unfinished(self) -> None:
        """Abort unfinished uploads before the service stops."""
        for upload in list(self._unfinished):
            upload.give_up(ServiceError("unavailable", "the service is stopping: try again, or use another one.", 5))

    async def _next(self, upload: Upload, receive: Any) -> Any:
        """The next part of an upload; an error if it is too large, too slow or aborted."""
        self._unfinished.setdefault(upload, 0)
        message = await self._receive(upload, receive)
        more = len(message.get("body", b""))
        upload.size += more
        self.held += more
        if upload.size > self.most:
            raise self._too_large()
        self._unfinished.pop(upload, None)
        if message.get("more_body", False):
            self._unfinished[upload] = upload.size
        while sum(self._unfinished.values()) > self.together // 2:
            silent = next(iter(self._unfinished))
            del self._unfinished[silent]
            silent.give_up(ServiceError("overloaded", "too many uploads, and this one was silent: try again.", 1))
        if upload.refusal is not None:
            raise upload.refusal
        if self.held > self.together:
            raise ServiceError("overloaded", "too many uploads at once: try again in a second.", 1)
        return message

    async def _receive(self, upload: Upload, receive: Any) -> Any:
        if upload.refusal is not None:
            raise upload.refusal
        try:
            async with asyncio.timeout(self.stall_seconds) as upload.waiting:
                return await receive()
        except TimeoutError:
            message = f"no data of the body arrived for {self.stall_seconds:g} s: send it at once."
            raise upload.refusal or ServiceError("too_slow", message) from None
        finally:
            upload.waiting = None

    def _too_large(self) -> ServiceError:
        return ServiceError(
            "too_large", f"the request is larger than {self.most} bytes: send a smaller or more compressed image."
        )
