"""Asks the Hugging Face Hub: tries again where that can help, and says in one sentence what is wrong where it cannot.

The client, huggingface_hub, is imported when the first question is asked: most uses of bkn_zoo never ask one.
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

from bkn_zoo.errors import BknZooError, HubAccessError, HubError, HubNotFoundError, HubUnavailableError

ATTEMPTS = 3
"""Of one question. The client itself repeats some of its requests, and goes on with a file that was cut off."""

LONGEST_WAIT = 60
"""Seconds; where the Hub asks for more, the caller is told instead of kept waiting."""

TRANSIENT = (408, 429, 500, 502, 503, 504)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SECRET = re.compile(r"hf_\w+|Bearer\s+[^\s'\"]+")

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


def ask(what: str, question: Callable[[], Answer], attempts: int = ATTEMPTS, token: str | bool | None = None) -> Answer:
    """The answer to a question about a repository, or a HubError.

    Args:
        what: the repository and revision, for the sentence.
        question: calls the client; it may be asked more than once.
        attempts: how often.
        token: that the caller passed, if any; errors do not show it.
    """
    from huggingface_hub.errors import HTTPError  # of whichever HTTP library it uses

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
                # Not "from error": messages of the client may hold what a log should not.
                raise _without(token, explain(what, chain)) from None
        log.warning("The Hub did not answer about %s; trying again in %d s.", what, wait)
        time.sleep(wait)
    raise AssertionError("unreachable")


def _without(token: str | bool | None, error: HubError) -> HubError:
    return type(error)(str(error).replace(token, "***")) if token and isinstance(token, str) else error


@contextmanager
def _bars_on_a_terminal() -> Iterator[None]:
    """The client shows some of its bars wherever its messages go, unless HF_HUB_DISABLE_PROGRESS_BARS decides."""
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
    """One sentence, with the remedy, for what the client raised and what had led to it."""
    from huggingface_hub import constants, errors

    def is_one_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(error, kinds) for error in chain)

    status = _status(chain)
    if is_one_of(errors.OfflineModeIsEnabled):
        return HubUnavailableError(
            f"{what} is not in the cache, or not all of it, and HF_HUB_OFFLINE forbids to ask the Hub: unset it, or "
            "load the checkpoint once while it is not set."
        )
    if any(isinstance(error, OSError) and error.errno in FULL_DISK for error in chain):
        return HubError(
            f"there is no room for {what} in {constants.HF_HUB_CACHE}: make room there, or name a folder on another "
            "disk by HF_HOME or cache_dir."
        )
    if is_one_of(UnicodeEncodeError) or any(type(error).__name__ == "LocalProtocolError" for error in chain):
        return HubAccessError("the token has characters that no token has: set HF_TOKEN again, or run `hf auth login`.")
    if is_one_of(errors.RevisionNotFoundError):
        return HubNotFoundError(f"{what} does not exist, though its repository does: correct the revision after the @.")
    if is_one_of(errors.GatedRepoError):
        return HubAccessError(f"{what} is open to approved users only: ask for access on its page, and set HF_TOKEN.")
    if is_one_of(errors.RepositoryNotFoundError) or status == 404:
        return HubNotFoundError(
            f"the Hub has no {what}, or shows it only to some: correct the name, or set HF_TOKEN to a token that may "
            "read it."
        )
    if is_one_of(errors.LocalTokenNotFoundError) or status == 401:
        return HubAccessError(
            f"the Hub wants a valid token for {what} (401): set HF_TOKEN to one, or run `hf auth login`."
        )
    if status == 403:
        return HubAccessError(
            f"the token may not do this with {what} (403): take one with the right to, or ask the repository's owner."
        )
    return _explain_failure(what, chain, status)


def _explain_failure(what: str, chain: list[BaseException], status: int | None) -> HubError:
    asked = _retry_after(chain)
    if status == 429:
        when = f"in {asked} seconds" if asked else "in some minutes"
        return HubUnavailableError(f"the Hub takes no more requests for now (429, about {what}): try again {when}.")
    if status in (409, 412):
        return HubError(f"{what} was changed by someone else meanwhile ({status}): try again.")
    if status is not None and status >= 500:
        return HubUnavailableError(f"the Hub fails ({status}, about {what}): try again later.")
    if status is not None:
        return HubError(f"the Hub refuses the request about {what} ({status}): {_first_sentence(chain[0])}.")
    if any(map(_is_broken_connection, chain)) or isinstance(chain[0], json.JSONDecodeError):
        reason = type(chain[-1]).__name__
        return HubUnavailableError(
            f"the Hub cannot be reached for {what}, or stopped half-way ({reason}): check the connection and "
            "HF_ENDPOINT, and try again; files that arrived whole are kept."
        )
    if isinstance(chain[0], OSError) and chain[0].errno is not None:
        return HubError(f"{what} cannot be stored ({chain[0].strerror}): name a folder of yours by HF_HOME.")
    return HubError(f"{what}: {_first_sentence(chain[0])}.")


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and those that led to it, the last one first."""
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
    """Seconds until a further attempt; None if that would be in vain."""
    if any(isinstance(error, OSError) and error.errno in FULL_DISK for error in chain):
        return None
    status, asked = _status(chain), _retry_after(chain)
    cut = status is None and any(map(_is_broken_connection, chain)) and not any(map(_is_no_connection, chain))
    if status in TRANSIENT or cut:
        return 2 ** (attempt - 1) if asked is None else asked
    return None


def _is_broken_connection(error: BaseException) -> bool:
    from huggingface_hub.errors import FileMetadataError, HTTPError

    # A file that came shorter than announced is an OSError without a number.
    incomplete = isinstance(error, OSError) and error.errno is None
    return isinstance(error, HTTPError | FileMetadataError | ConnectionError | TimeoutError) or incomplete


def _is_no_connection(error: BaseException) -> bool:
    """There is none to begin with, so that a cached file or an error should come at once."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled) or type(error).__name__ in ("ConnectError", "ConnectTimeout")


def _first_sentence(error: BaseException) -> str:
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0].partition(". ")[0].rstrip(".")
    token = get_token()
    return SECRET.sub("***", text.replace(token, "***") if token else text)
