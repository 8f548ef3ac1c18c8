"""Checkpoints on the Hugging Face Hub: load one by its id, publish a folder.

Downloads use huggingface_hub and its cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as usual. Nothing
from a repository is executed or unpickled.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bkn_zoo.checkpoints.builders import is_model
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, INDEX, NEEDED_FILES, WEIGHTS, files_of, no_weights, sha256
from bkn_zoo.checkpoints.hub_errors import hub_errors
from bkn_zoo.errors import CheckpointError, HubError, HubNotFoundError, InputError
from bkn_zoo.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

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
    """Download the files that loading needs into the cache; returns the folder there and the commit.

    All files are from one commit, even if the revision changes meanwhile. The arguments are those of huggingface_hub.
    """
    what = f"{repository}@{revision}" if revision else repository
    with hub_errors(what, token):
        folder = _snapshot(repository, revision, (CONFIG,), token, cache_dir)
        commit = folder.name
        if not (folder / CONFIG).exists():
            raise CheckpointError(f"{what} has no {CONFIG}, so it is not a checkpoint of bkn_zoo: correct the name.")
        # An unknown network or a newer format is refused before its weights are downloaded.
        architecture = Config.read(folder / CONFIG).architecture
        if not is_model(architecture):
            raise CheckpointError(
                f"{folder / CONFIG}: this bkn_zoo has no network {architecture!r}: upgrade it, or load another "
                "checkpoint."
            )
        _snapshot(repository, commit, NEEDED_FILES, token, cache_dir)
        if not (folder / WEIGHTS).exists() and not (folder / INDEX).exists():
            raise no_weights(what, _api(token).list_repo_files(repository, revision=commit))
    return folder, commit


def _snapshot(
    repository: str,
    revision: str | None,
    patterns: Iterable[str],
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """The folder of a commit in the cache, after downloading the files that match the patterns."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        revision=revision,
        token=token,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        allow_patterns=list(patterns),
        library_name="bkn_zoo",
        library_version=__version__,
    )
    return Path(folder)


class Change(NamedTuple):
    """The change of one file: "added", "changed" or "removed", and its new size in bytes."""

    file: str
    kind: str
    size: int


class Publication(NamedTuple):
    """The result of publishing: the commit, its changes (none if all files existed), and the pull request, if any."""

    commit: str
    changes: list[Change]
    pull_request: str | None


def changes(folder: str | os.PathLike[str], repository: str, revision: str | None = None) -> list[Change]:
    """The changes that publishing a checkpoint folder would make. Only files of weights are ever removed."""
    from huggingface_hub.hf_api import RepoFile

    there: dict[str, RepoFile] = {}
    with suppress(HubNotFoundError), hub_errors(repository):
        entries = _api().list_repo_tree(repository, revision=revision)
        there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    local = {path.name: path for path in files_of(Path(folder))}
    found = [
        Change(name, "changed" if name in there else "added", path.stat().st_size)
        for name, path in local.items()
        if name not in there or not _is_same(path, there[name])
    ]
    weights = [name for name in there if name == INDEX or fnmatch(name, "model*.safetensors")]
    return found + [Change(name, "removed", 0) for name in sorted(weights) if name not in local]


def push_to_hub(
    folder: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
) -> Publication:
    """Publish a checkpoint folder in one commit. The repository is created if needed; repeating it changes nothing.

    Args:
        folder: a checkpoint folder.
        repository: "owner/repo".
        private: whether a new repository is private.
        tag: a tag for the commit; an existing tag must already be at it.
        create_pr: open a pull request instead of committing to the main branch.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    check_repository(repository)
    if tag is not None and create_pr:
        raise InputError("a pull request cannot be tagged: leave out the tag until it is merged.")
    files_of(Path(folder))  # refuses an incomplete folder before a repository is created
    api = _api()
    with hub_errors(repository):
        api.create_repo(repository, private=private, exist_ok=True)
        tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repository).tags}
        wanted = changes(folder, repository)
        if tag in tags and wanted:
            raise HubError(f"{repository} already has a tag {tag} for other files: choose another tag.")
        if wanted:
            operations = [
                CommitOperationDelete(file) if kind == "removed" else CommitOperationAdd(file, Path(folder) / file)
                for file, kind, _ in wanted
            ]
            message = f"Publish {Path(folder).resolve().name} with bkn_zoo {__version__}"
            info = api.create_commit(repository, operations, commit_message=message, create_pr=create_pr)
            published = Publication(info.oid, wanted, info.pr_url)
        else:
            published = Publication(api.repo_info(repository).sha or "", [], None)
        if tag is not None and tags.get(tag, published.commit) != published.commit:
            raise HubError(f"{repository} already has a tag {tag} at another commit: choose another tag.")
        if tag is not None and tag not in tags:
            api.create_tag(repository, tag=tag, revision=published.commit, exist_ok=True)
    return published


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


def _is_same(path: Path, there: "RepoFile") -> bool:
    if there.lfs is not None:
        return there.lfs.sha256 == sha256(path)
    data = path.read_bytes()
    return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # git's hash of a file


def _api(token: str | bool | None = None) -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(token=token, library_name="bkn_zoo", library_version=__version__)
