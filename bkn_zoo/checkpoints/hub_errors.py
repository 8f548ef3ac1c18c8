"""Turns errors of huggingface_hub into errors of bkn_zoo: one sentence with the remedy, and never a token.

The client itself resumes interrupted transfers, and uses its cache if the Hub cannot be reached.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from bkn_zoo.errors import BknZooError, HubAccessError, HubError, HubNotFoundError, HubUnavailableError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SECRET = re.compile(r"hf_\w+|Bearer\s+[^\s'\"]+")

BAD_TOKEN = HubAccessError, "the token contains invalid characters: set HF_TOKEN again, or run `hf auth login`"
NO_TOKEN = HubAccessError, "the Hub requires a valid token for {what} (401): set HF_TOKEN, or run `hf auth login`"
NOT_FOUND = HubNotFoundError, "the Hub has no {what}, or it is private: correct the name, or set HF_TOKEN"
CHANGED = HubError, "{what} was changed by someone else meanwhile ({status}): try again"
BUSY = HubUnavailableError, "the Hub accepts no more requests (429, about {what}): try again in some minutes"
FAILED = HubUnavailableError, "the Hub failed ({status}, about {what}): try again later"
REFUSED = HubAccessError, "the token is not allowed to do this with {what} (403): use another one, or ask the owner"
GATED = HubAccessError, "{what} is open to approved users only: ask for access on its page, and set HF_TOKEN"
NO_REVISION = HubNotFoundError, "{what} does not exist, but its repository does: correct the revision after the @"
OFFLINE = HubUnavailableError, "{what} is not completely in the cache, and HF_HUB_OFFLINE forbids downloads: unset it"
UNREACHABLE = (
    HubUnavailableError,
    "the Hub cannot be reached for {what}, or the transfer stopped ({last}): check the connection, and try again",
)
FULL = HubError, "there is no space for {what} in {cache}: free space there, or set HF_HOME to a folder on another disk"
UNWRITABLE = HubError, "{what} cannot be stored ({reason}): set HF_HOME to a folder that you can write to"
OTHER = HubError, "{what}: {reason}"

BY_CLASS = {
    "OfflineModeIsEnabled": OFFLINE,
    "UnicodeEncodeError": BAD_TOKEN,
    "LocalProtocolError": BAD_TOKEN,
    "LocalTokenNotFoundError": NO_TOKEN,
    "RevisionNotFoundError": NO_REVISION,
    "GatedRepoError": GATED,
    "RepositoryNotFoundError": NOT_FOUND,
}
"""By the name of a class of the error or of one of its causes; the first that fits counts."""

BY_STATUS = {401: NO_TOKEN, 403: REFUSED, 404: NOT_FOUND, 409: CHANGED, 412: CHANGED, 429: BUSY}
DISCONNECTED = {"HTTPError", "ConnectionError", "TimeoutError", "JSONDecodeError"}


@contextmanager
def hub_errors(what: str, token: str | bool | None = None) -> Iterator[None]:
    """Raise a HubError for an error of the client.

    Args:
        what: the repository and revision, for the message.
        token: the caller's token, if any, which the message must not show.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses

    try:
        yield
    except BknZooError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        chain = _chain(error)
        status = next(filter(None, (getattr(getattr(each, "response", None), "status_code", 0) for each in chain)), 0)
        kind, message = _kind_of(chain, status)
        reason = getattr(error, "strerror", None) or f"{error}. ".partition(". ")[0].strip().splitlines()[0]
        message = message.format(
            what=what, status=status, reason=reason, last=type(chain[-1]).__name__, cache=constants.HF_HUB_CACHE
        )
        for secret in (token, get_token()):
            message = message.replace(secret, "***") if secret and isinstance(secret, str) else message
        # Not "from error": messages of the client may contain secrets.
        raise kind(SECRET.sub("***", message) + ".") from None


def _kind_of(chain: list[BaseException], status: int) -> tuple[type[HubError], str]:
    names = {kind.__name__ for error in chain for kind in type(error).__mro__}
    numbers = [error.errno for error in chain if isinstance(error, OSError)]
    if any(number in FULL_DISK for number in numbers):
        return FULL
    for name, found in BY_CLASS.items():
        if name in names:
            return found
    if status:
        return BY_STATUS.get(status, FAILED if status >= 500 else OTHER)
    # A file that is shorter than announced, or not in the cache, is an OSError without a number.
    if None in numbers or names & DISCONNECTED:
        return UNREACHABLE
    return UNWRITABLE if numbers else OTHER


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes, the last one first."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain
