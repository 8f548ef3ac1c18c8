"""Turns errors of huggingface_hub into errors of bkn_zoo: one sentence with the remedy, and never a token.

The client itself retries transfers, resumes them, and uses its cache if the Hub cannot be reached.
"""

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from bkn_zoo.errors import BknZooError, HubAccessError, HubError, HubNotFoundError, HubUnavailableError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SECRET = re.compile(r"hf_\w+|Bearer\s+[^\s'\"]+")
CHANGED = (HubError, "{what} was changed by someone else meanwhile ({status}): try again")
FAILED = (HubUnavailableError, "the Hub failed ({status}, about {what}): try again later")
BY_STATUS: dict[int, tuple[type[HubError], str]] = {
    401: (HubAccessError, "the Hub requires a valid token for {what} (401): set HF_TOKEN, or run `hf auth login`"),
    403: (HubAccessError, "the token is not allowed to do this with {what} (403): use another one, or ask the owner"),
    404: (HubNotFoundError, "the Hub has no {what}, or it is private: correct the name, or set HF_TOKEN"),
    409: CHANGED,
    412: CHANGED,
    429: (
        HubUnavailableError,
        "the Hub accepts no more requests for now (429, about {what}): try again in some minutes",
    ),
}


@contextmanager
def hub_errors(what: str, token: str | bool | None = None) -> Iterator[None]:
    """Raise a HubError for an error of the client.

    Args:
        what: the repository and revision, for the message.
        token: the caller's token, if any, which the message must not show.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses

    try:
        yield
    except BknZooError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        kind, message = _sentence_for(what, error)
        for secret in (token, get_token()):
            message = message.replace(secret, "***") if secret and isinstance(secret, str) else message
        # Not "from error": messages of the client may contain secrets.
        raise kind(SECRET.sub("***", message) + ".") from None


def _sentence_for(what: str, error: Exception) -> tuple[type[HubError], str]:
    from huggingface_hub import constants, errors

    chain = _chain(error)
    status = next(filter(None, (getattr(getattr(each, "response", None), "status_code", 0) for each in chain)), 0)

    def is_one_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in chain)

    if is_one_of(errors.OfflineModeIsEnabled):
        return HubUnavailableError, (
            f"{what} is not completely in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, or load the "
            "checkpoint once without it"
        )
    if any(isinstance(each, OSError) and each.errno in FULL_DISK for each in chain):
        return HubError, (
            f"there is no space for {what} in {constants.HF_HUB_CACHE}: free space there, or set HF_HOME or cache_dir "
            "to a folder on another disk"
        )
    if is_one_of(UnicodeEncodeError) or any(type(each).__name__ == "LocalProtocolError" for each in chain):
        return HubAccessError, "the token contains invalid characters: set HF_TOKEN again, or run `hf auth login`"
    if is_one_of(errors.RevisionNotFoundError):
        return HubNotFoundError, f"{what} does not exist, but its repository does: correct the revision after the @"
    if is_one_of(errors.GatedRepoError):
        return HubAccessError, f"{what} is open to approved users only: ask for access on its page, and set HF_TOKEN"
    if is_one_of(errors.RepositoryNotFoundError):
        status = 404
    if is_one_of(errors.LocalTokenNotFoundError):
        status = 401
    if status in BY_STATUS or status >= 500:
        kind, message = BY_STATUS.get(status, FAILED)
        return kind, message.format(what=what, status=status)
    # A file that is shorter than announced, or not in the cache, is an OSError without a number.
    unnumbered = any(isinstance(each, OSError) and each.errno is None for each in chain)
    if not status and (unnumbered or is_one_of(errors.HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError)):
        return HubUnavailableError, (
            f"the Hub cannot be reached for {what}, or the transfer stopped ({type(chain[-1]).__name__}): check the "
            "connection and HF_ENDPOINT, and try again; complete files are kept"
        )
    if not status and isinstance(error, OSError):
        return HubError, f"{what} cannot be stored ({error.strerror}): set HF_HOME to a folder that you can write to"
    return HubError, f"{what}: {str(error).strip().partition('. ')[0].splitlines()[0].rstrip('.')}"


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes, the last one first."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain
