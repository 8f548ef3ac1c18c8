"""Requests to the Hugging Face Hub, with retries where they can help, and errors of one sentence where they cannot.

The client, huggingface_hub, is imported at the first request, because most uses of bkn_zoo make none.
"""

import errno
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from bkn_zoo.errors import BknZooError, HubAccessError, HubError, HubNotFoundError, HubUnavailableError, counted

ATTEMPTS = 3
"""Attempts per request. The client itself also repeats some requests, and resumes incomplete downloads."""

LONGEST_WAIT = 60
"""Seconds. If the Hub asks for a longer delay, an error says so instead of waiting."""

TRANSIENT = (408, 429, 500, 502, 503, 504)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SECRET = re.compile(r"hf_\w+|Bearer\s+[^\s'\"]+")

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


def ask(what: str, question: Callable[[], Answer], attempts: int = ATTEMPTS, token: str | bool | None = None) -> Answer:
    """The response to a request about a repository, or a HubError.

    Args:
        what: the repository and revision, for error messages.
        question: calls the client; it may be called more than once.
        attempts: the maximal number of calls.
        token: the caller's token, if any, which errors must not show.
    """
    from huggingface_hub.errors import HTTPError  # of the HTTP library that the client uses

    for attempt in range(1, attempts + 1):
        try:
            with _bars_on_a_terminal():
                return question()
        except BknZooError:
            raise
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            chain = _chain(error)
            wait = _wait(chain, attempt)
            if wait is None or wait > LONGEST_WAIT or attempt == attempts:
                # Not "from error": messages of the client may contain secrets.
                raise _without(token, explain(what, chain)) from None
        log.warning("The Hub did not respond about %s; retrying in %d s.", what, wait)
        time.sleep(wait)
    raise AssertionError("unreachable")


def _without(token: str | bool | None, error: HubError) -> HubError:
    return type(error)(str(error).replace(token, "***")) if token and isinstance(token, str) else error


@contextmanager
def _bars_on_a_terminal() -> Iterator[None]:
    """Hide the client's progress bars outside a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS is set."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def explain(what: str, chain: list[BaseException]) -> HubError:
    """An error of one sentence, with the remedy, for an exception of the client and its causes."""
    from huggingface_hub import constants, errors

    def is_one_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in chain)

    status = _status(chain)
    if is_one_of(errors.OfflineModeIsEnabled):
        return HubUnavailableError(
            f"{what} is not completely in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, or load the "
            "checkpoint once without it."
        )
    if any(isinstance(error, OSError) and error.errno in FULL_DISK for error in chain):
        return HubError(
            f"there is no space for {what} in {constants.HF_HUB_CACHE}: free space there, or set HF_HOME or cache_dir "
            "to a folder on another disk."
        )
    if is_one_of(UnicodeEncodeError) or any(type(error).__name__ == "LocalProtocolError" for error in chain):
        return HubAccessError("the token contains invalid characters: set HF_TOKEN again, or run `hf auth login`.")
    if is_one_of(errors.RevisionNotFoundError):
        return HubNotFoundError(f"{what} does not exist, but its repository does: correct the revision after the @.")
    if is_one_of(errors.GatedRepoError):
        return HubAccessError(f"{what} is open to approved users only: ask for access on its page, and set HF_TOKEN.")
    if is_one_of(errors.RepositoryNotFoundError) or status == 404:
        return HubNotFoundError(
            f"the Hub has no {what}, or it is private: correct the name, or set HF_TOKEN to a token that may read it."
        )
    if is_one_of(errors.LocalTokenNotFoundError) or status == 401:
        return HubAccessError(f"the Hub requires a valid token for {what} (401): set HF_TOKEN, or run `hf auth login`.")
    if status == 403:
        return HubAccessError(
            f"the token is not allowed to do this with {what} (403): use a token with this right, or ask the owner."
        )
    return _explain_failure(what, chain, status)


def _explain_failure(what: str, chain: list[BaseException], status: int | None) -> HubError:
    asked = _retry_after(chain)
    if status == 429:
        when = f"in {counted(asked, 'second')}" if asked else "in some minutes"
        return HubUnavailableError(f"the Hub accepts no more requests for now (429, about {what}): try again {when}.")
    if status in (409, 412):
        return HubError(f"{what} was changed by someone else meanwhile ({status}): try again.")
    if status is not None and status >= 500:
        return HubUnavailableError(f"the Hub failed ({status}, about {what}): try again later.")
    if status is not None:
        return HubError(f"the Hub refuses the request about {what} ({status}): {_first_sentence(chain[0])}.")
    if any(map(_is_broken_connection, chain)) or isinstance(chain[0], json.JSONDecodeError):
        reason = type(chain[-1]).__name__
        return HubUnavailableError(
            f"the Hub cannot be reached for {what}, or the transfer stopped ({reason}): check the connection and "
            "HF_ENDPOINT, and try again; complete files are kept."
        )
    if isinstance(chain[0], OSError) and chain[0].errno is not None:
        return HubError(
            f"{what} cannot be stored ({chain[0].strerror}): set HF_HOME to a folder that you can write to."
        )
    return HubError(f"{what}: {_first_sentence(chain[0])}.")


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and its causes, the last one first."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain


def _status(chain: list[BaseException]) -> int | None:
    for error in chain:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None and status >= 400:
            return status
    return None


def _retry_after(chain: list[BaseException]) -> int | None:
    for error in chain:
        value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
        if value.isdigit():
            return int(value)
    return None


def _wait(chain: list[BaseException], attempt: int) -> int | None:
    """Seconds until the next attempt; None if another attempt cannot help."""
    if any(isinstance(error, OSError) and error.errno in FULL_DISK for error in chain):
        return None
    status, asked = _status(chain), _retry_after(chain)
    cut = status is None and any(map(_is_broken_connection, chain)) and not any(map(_is_no_connection, chain))
    if status in TRANSIENT or cut:
        return 2 ** (attempt - 1) if asked is None else asked
    return None


def _is_broken_connection(error: BaseException) -> bool:
    from huggingface_hub.errors import FileMetadataError, HTTPError

    # A file shorter than announced is an OSError without a number.
    incomplete = isinstance(error, OSError) and error.errno is None
    return isinstance(error, HTTPError | FileMetadataError | ConnectionError | TimeoutError) or incomplete


def _is_no_connection(error: BaseException) -> bool:
    """Whether there is no connection, so that a cached file or an error should come at once."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled) or type(error).__name__ in ("ConnectError", "ConnectTimeout")


def _first_sentence(error: BaseException) -> str:
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(". ")[0].rstrip(".")
    token = get_token()
    return SECRET.sub("***", text.replace(token, "***") if token else text)
