"""Checkpoints on the Hugging Face Hub: load one by its id, publish a folder.

Downloads go through huggingface_hub and its cache, so that HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what
they mean everywhere. Nothing from a repository is executed or unpickled.
"""

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import (
    CONFIG,
    INDEX,
    NEEDED_FILES,
    OWN_FILES,
    WEIGHTS,
    check_hashes,
    files_of,
    no_weights,
    sha256,
    weights_file,
)
from bkn_zoo.checkpoints.hub_client import ask
from bkn_zoo.errors import CheckpointError, DamagedFileError, HubError, HubNotFoundError, InputError
from bkn_zoo.progress import bars_like
from bkn_zoo.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

REACHABLE_SECONDS = 5
"""That the Hub has to answer a first question."""

REPOSITORY = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII)
"""As the Hub has it: its client would refuse others too, but at the end of a training."""


def download(
    repository: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Path, str]:
    """Bring what loading needs of a repository into the cache; returns the folder there and the commit.

    All files are of one commit, even if the revision moves meanwhile. The arguments are those of the Hub's client.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    what = f"{repository}@{revision}" if revision else repository

    def fetch(patterns: tuple[str, ...], at: str | None) -> Path:
        def snapshot() -> str:
            with bars_like(tqdm) as bars:
                return snapshot_download(
                    repository,
                    revision=at,
                    token=token,
                    cache_dir=None if cache_dir is None else Path(cache_dir),
                    allow_patterns=list(patterns),
                    library_name="bkn_zoo",
                    library_version=__version__,
                    tqdm_class=bars,
                )

        return Path(ask(what, snapshot, token=token))

    folder = fetch((CONFIG,), revision)
    commit = folder.name
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{what} holds no {CONFIG}, so it is no checkpoint of bkn_zoo: correct the name.")
    from bkn_zoo.conversion.libraries import is_model  # with PyTorch, which a name that leads nowhere does not need

    # An unknown network or a newer format is refused before its weights are downloaded.
    architecture = Config.read(folder / CONFIG).architecture
    if not is_model(architecture):
        raise CheckpointError(
            f"{folder / CONFIG}: this bkn_zoo has no network {architecture!r}: upgrade it, or load another checkpoint."
        )
    fetch(NEEDED_FILES, commit)
    if not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
        raise no_weights(what, ask(what, lambda: _api(token).list_repo_files(repository, revision=commit), token=token))
    return folder, commit


def remove_damaged(folder: Path) -> str | None:
    """Take a file of weights that is not as it should be out of the cache, so that it can be downloaded again."""
    try:
        check_hashes(weights_file(folder), Config.read(folder / CONFIG).sha256)
    except DamagedFileError as error:
        path = folder / error.file
        path.resolve().unlink(missing_ok=True)  # the blob that it is a link to
        path.unlink(missing_ok=True)
        return error.file
    except CheckpointError:
        return None
    return None


@dataclass(frozen=True)
class Change:
    """What publishing does to one file: "added", "changed" or "removed", and its size in bytes afterwards."""

    file: str
    kind: str
    size: int


@dataclass(frozen=True)
class Publication:
    """What was published: the commit, what it changed (nothing, if all was there), and the pull request, if asked."""

    commit: str
    changes: list[Change]
    pull_request: str | None


def changes(folder: str | os.PathLike[str], repository: str) -> list[Change]:
    """What publishing a checkpoint folder would change; files that are no part of a checkpoint are left alone."""
    from huggingface_hub.hf_api import RepoFile

    try:
        entries = ask(repository, lambda: list(_api().list_repo_tree(repository)))
    except HubNotFoundError:
        entries = []
    there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    local = {path.name: path for path in files_of(Path(folder))}
    found = []
    for name, path in local.items():
        if name not in there:
            found.append(Change(name, "added", path.stat().st_size))
        elif not _is_same(path, there[name]):
            found.append(Change(name, "changed", path.stat().st_size))
    ours = [name for name in there if any(fnmatch(name, pattern) for pattern in OWN_FILES)]
    return found + [Change(name, "removed", 0) for name in sorted(ours) if name not in local]


def push_to_hub(
    folder: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
) -> Publication:
    """Publish a checkpoint folder in one commit, creating the repository if need be; repeating it changes nothing.

    Args:
        folder: a checkpoint folder.
        repository: "owner/repo".
        private: of a repository that is created.
        tag: for the commit; one that exists already must be at it.
        create_pr: open a pull request instead of committing to the main branch.
    """
    check_repository(repository)
    if tag is not None and create_pr:
        raise InputError("a pull request cannot be tagged: leave out the tag until it is merged.")
    files_of(Path(folder))  # an incomplete folder is refused before a repository is made for it
    api = _api()
    ask(repository, lambda: api.create_repo(repository, private=private, exist_ok=True))
    tags = {ref.name: ref.target_commit for ref in ask(repository, lambda: api.list_repo_refs(repository)).tags}
    if tag in tags and changes(folder, repository):
        raise HubError(f"{repository} has a tag {tag} already, for other files: choose another tag.")
    published = ask(repository, lambda: _commit(api, Path(folder), repository, create_pr))
    if tag is not None and tags.get(tag, published.commit) != published.commit:
        raise HubError(f"{repository} has a tag {tag} already, at another commit: choose another tag.")
    if tag is not None and tag not in tags:
        ask(repository, lambda: api.create_tag(repository, tag=tag, revision=published.commit, exist_ok=True))
    return published


def check_reachable(repository: str) -> None:
    """Refuse within seconds where the Hub does not answer: most questions of its client are repeated for long."""
    with suppress(HubNotFoundError):  # an answer, too
        ask(repository, lambda: _api().repo_info(repository, timeout=REACHABLE_SECONDS), attempts=1)


def check_repository(repository: str) -> None:
    """Refuse what cannot be the id of a repository."""
    if not REPOSITORY.fullmatch(repository):
        raise InputError(
            f"{repository!r} cannot be a repository: choose owner and name, as in owner/repo, of letters from a to z, "
            "digits and -_. (the name in a command by --name)."
        )


def verify_published(folder: str | os.PathLike[str], repository: str, revision: str) -> None:
    """Download all files of a checkpoint into an empty cache, and compare them with the folder."""
    from huggingface_hub import snapshot_download

    local = files_of(Path(folder))
    names = [path.name for path in local]
    with tempfile.TemporaryDirectory() as cache:
        copy = ask(
            repository,
            lambda: snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=names),
        )
        for path in local:
            there = Path(copy) / path.name
            if not there.exists() or sha256(there) != sha256(path):
                raise DamagedFileError(f"{path.name} of {repository} is not what was sent: publish again.", path.name)


def _commit(api: "HfApi", folder: Path, repository: str, create_pr: bool) -> Publication:
    """Asked again after a failure, it finds what has arrived already, and sends the rest."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    wanted = changes(folder, repository)
    if not wanted:
        return Publication(api.repo_info(repository).sha or "", [], None)
    operations = [
        CommitOperationDelete(change.file)
        if change.kind == "removed"
        else CommitOperationAdd(change.file, folder / change.file)
        for change in wanted
    ]
    message = f"Publish {folder.resolve().name} with bkn_zoo {__version__}"
    info = api.create_commit(repository, operations, commit_message=message, create_pr=create_pr)
    return Publication(info.oid, wanted, info.pr_url)


def _is_same(path: Path, there: "RepoFile") -> bool:
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(path)
    data = path.read_bytes()
    return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # as git names it


def _api(token: str | bool | None = None) -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="bkn_zoo", library_version=__version__)
