"""All error statuses of the service."""

from fastapi.responses import JSONResponse

from bkn_zoo.errors import BknZooError, BrokenImageError, ImageFormatError, ImageTooLargeError

STATUSES = {
    "malformed_request": 400, "invalid_key": 401, "unknown_model": 404, "not_found": 404, "method_not_allowed": 405,
    "too_slow": 408, "too_large": 413, "unsupported_format": 415, "broken_image": 422, "bad_parameter": 422,
    "overloaded": 429, "internal": 500, "unavailable": 503, "deadline": 504,
}  # fmt: skip
# Errors of the library that the image or the parameters caused.
CAUSED = {ImageFormatError: "unsupported_format", ImageTooLargeError: "too_large", BrokenImageError: "broken_image"}


class ServiceError(Exception):
    """An error response: a code for programs, its status, and a message that says what to do."""

    def __init__(self, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.message, self.retry_after = code, STATUSES[code], message, retry_after


def of_the_image(error: BknZooError) -> ServiceError:
    """The error response for an error of the library that the image or the parameters caused."""
    return ServiceError(
        next((code for kind, code in CAUSED.items() if isinstance(error, kind)), "bad_parameter"), str(error)
    )


def error_body(error: ServiceError) -> dict[str, dict[str, str]]:
    return {"error": {"code": error.code, "message": error.message}}


def respond(error: ServiceError) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.status, headers)
