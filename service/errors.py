"""All error statuses of the service."""

from fastapi.responses import JSONResponse

from bkn_zoo.errors import BknZooError, BrokenImageError, ImageFormatError, ImageTooLargeError


class ServiceError(Exception):
    """An error response: its status, a code for programs, and a message that says what to do."""

    status, code = 500, "internal"

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


class MalformedRequestError(ServiceError):
    status, code = 400, "malformed_request"


class KeyRefusedError(ServiceError):
    status, code = 401, "invalid_key"


class UnknownModelError(ServiceError):
    status, code = 404, "unknown_model"


class SlowError(ServiceError):
    status, code = 408, "too_slow"


class TooLargeError(ServiceError):
    status, code = 413, "too_large"


class UnsupportedFormatError(ServiceError):
    status, code = 415, "unsupported_format"


class BadParameterError(ServiceError):
    status, code = 422, "bad_parameter"


class BadImageError(ServiceError):
    status, code = 422, "broken_image"


class OverloadedError(ServiceError):
    status, code = 429, "overloaded"


class InternalError(ServiceError):
    """A bug in the service."""


class UnavailableError(ServiceError):
    status, code = 503, "unavailable"


class DeadlineError(ServiceError):
    status, code = 504, "deadline"


CODES = {404: "not_found", 405: "method_not_allowed"}  # errors of the framework itself
OURS: list[tuple[type[BknZooError], type[ServiceError]]] = [
    (ImageFormatError, UnsupportedFormatError),
    (ImageTooLargeError, TooLargeError),
    (BrokenImageError, BadImageError),
    (BknZooError, BadParameterError),
]


def of_the_image(error: BknZooError) -> ServiceError:
    """The error response for an error of the library that the image or the parameters caused."""
    return next(answer for kind, answer in OURS if isinstance(error, kind))(str(error))


def error_body(error: ServiceError) -> dict[str, dict[str, str]]:
    return {"error": {"code": error.code, "message": error.message}}


def respond(error: ServiceError) -> JSONResponse:
    return error_response(error.status, error.code, error.message, error.retry_after)


def error_response(status: int, code: str, message: str, retry_after: int | None = None) -> JSONResponse:
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)
