"""Checkpoints on the Hugging Face Hub: load one by its id, publish a folder.

Downloads use huggingface_hub and its cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as usual. Nothing
from a repository is executed or unpickled.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bkn_zoo.checkpoints.builders import is_model
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, INDEX, NEEDED_FILES, WEIGHTS, files_of
from bkn_zoo.errors import (
    BknZooError,
    CheckpointError,
    HubAccessError,
    HubError,
    HubNotFoundError,
    HubUnavailableError,
    InputError,
)
from bkn_zoo.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REACHABLE_SECONDS = 5
"""Seconds for the Hub to respond to the first request."""

REPOSITORY = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII)
"""The rule of the Hub. Its client would also refuse other names, but only at the end of a training."""


def download(
    repository: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Path, str]:
    """Download the files that loading needs into the cache; returns the folder there and the commit."""
    from huggingface_hub import snapshot_download

    what = f"{repository}@{revision}" if revision else repository
    # The config comes first, so that weights which cannot be used are not downloaded.
    for patterns in ([CONFIG], list(NEEDED_FILES)):
        with hub_errors(what):
            found = snapshot_download(
                repository,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                allow_patterns=patterns,
                library_name="bkn_zoo",
                library_version=__version__,
            )
        folder = Path(found)
        if not (folder / CONFIG).exists():
            raise CheckpointError(f"{what} has no {CONFIG}, so it is not a checkpoint of bkn_zoo: correct the name.")
        # Both downloads are of one commit, even if there is a new one meanwhile.
        revision = folder.name
        architecture = Config.read(folder / CONFIG).architecture
        if not is_model(architecture):
            raise CheckpointError(f"{what} is a {architecture}, which this bkn_zoo does not know: upgrade bkn_zoo.")
    return folder, folder.name


class Publication(NamedTuple):
    """The result of publishing: the commit and its address."""

    commit: str
    url: str


def push_to_hub(folder: str | os.PathLike[str], repository: str, *, private: bool = False) -> Publication:
    """Publish a checkpoint folder as "owner/repo", in one commit. Repeating it changes nothing.

    A repository that does not exist is created, as a private one if asked.
    """
    check_repository(repository)
    folder = Path(folder)
    files = [path.name for path in files_of(folder)]
    with hub_errors(repository):
        api = _api()
        api.create_repo(repository, private=private, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=files,
            # The weights of an earlier commit.
            delete_patterns=[WEIGHTS, INDEX, "model-?????-of-?????.safetensors"],
            commit_message=f"Publish {folder.resolve().name} with bkn_zoo {__version__}",
        )
    return Publication(made.oid, made.commit_url)


def check_reachable(repository: str) -> None:
    """Raise an error within seconds if the Hub does not respond. The client itself would retry for a long time."""
    with suppress(HubNotFoundError), hub_errors(repository):  # not found is a response, too
        _api().repo_info(repository, timeout=REACHABLE_SECONDS)


def check_repository(repository: str) -> None:
    """Refuse names that cannot be the id of a repository."""
    if not REPOSITORY.fullmatch(repository):
        raise InputError(
            f"{repository!r} cannot be a repository: use owner/repo with letters from a to z, digits and -_. "
            "(in a shell, --name sets the name)."
        )


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn an error of huggingface_hub into a HubError that says what to do about the repository `what`."""
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

    try:
        yield
    except BknZooError:
        raise
    except (HTTPError, OSError, ValueError) as error:
        # The client reports a file that is missing in its cache, and the reason is the cause of that error.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        # Not "from error": messages of the client may contain a token.
        raise _hub_error(what, cause or error) from None


def _hub_error(what: str, error: BaseException) -> HubError:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalTokenNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return HubAccessError(f"{what} is open to approved users only: ask for access on its page, and set HF_TOKEN.")
    if isinstance(error, RevisionNotFoundError):
        return HubNotFoundError(f"{what} does not exist, but its repository does: correct the revision after the @.")
    if isinstance(error, RepositoryNotFoundError):
        return HubNotFoundError(f"the Hub has no {what}, or it is private: correct the name, or set HF_TOKEN.")
    if status in (401, 403) or isinstance(error, LocalTokenNotFoundError | UnicodeEncodeError):
        return HubAccessError(
            f"{what} needs a valid token with the right to do this ({status or 'none was sent'}): set HF_TOKEN, or run "
            "`hf auth login`."
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return HubError(f"{what} cannot be stored ({error.strerror}): free space, or set HF_HOME to another folder.")
    return HubUnavailableError(
        f"the Hub cannot be reached for {what}, or failed ({status or type(error).__name__}): check the connection and "
        "HF_HUB_OFFLINE, and try again later."
    )


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(library_name="bkn_zoo", library_version=__version__)
