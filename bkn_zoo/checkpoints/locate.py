"""Finds checkpoints: by the path of a folder, by a name on this machine or on the Hub, or the default one."""

import logging
import os
from pathlib import Path
from typing import NamedTuple

from bkn_zoo.checkpoints.builders import is_model
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CONFIG, reading
from bkn_zoo.checkpoints.hub import REPOSITORY, download
from bkn_zoo.defaults import NETWORKS, PREFERRED_CHECKPOINT
from bkn_zoo.errors import CheckpointError, HubError, InputError, UnknownNameError, did_you_mean

log = logging.getLogger(__name__)

NAMESPACE = "bkn-zoo"
"""The owner of repositories with short names; the environment variable BKN_ZOO_NAMESPACE overrides it."""

SOURCE_TREE = Path(__file__).resolve().parents[2] / "checkpoints"
ENVIRONMENT_VARIABLE = "BKN_ZOO_CHECKPOINTS"


@reading()
def list_checkpoints() -> list[str]:
    """The names that `from_pretrained` finds in the source tree and in the folders of BKN_ZOO_CHECKPOINTS."""
    configs = [config for root in _roots() for config in root.glob(f"*/{CONFIG}")]
    return sorted({config.parent.name for config in configs if not config.parent.name.startswith(".")})


class Location(NamedTuple):
    """A checkpoint that was found: its folder, and its commit on the Hub (None for a local folder)."""

    name: str
    folder: Path
    revision: str | None


def locate(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Location:
    """Find a checkpoint, as `from_pretrained` does; one on the Hub is downloaded."""
    text = os.fspath(name)
    repository, _, named = text.partition("@")
    if revision is not None:
        if is_folder(name):
            raise InputError(f"{text} is a folder and has no revision {revision!r}: omit the revision.")
        if named not in ("", revision):
            raise InputError(f"{text} and revision={revision!r} are two different revisions: omit one of them.")
        name = text = f"{repository}@{revision}"
    unknown = ""
    if is_folder(name) or "/" not in repository:
        try:
            folder = find(name)
            if Path(text) != folder:
                log.info("%s is in %s", text, folder)
            return Location(text, folder, None)
        except UnknownNameError as error:
            repository = f"{os.environ.get('BKN_ZOO_NAMESPACE') or NAMESPACE}/{repository}"
            if not REPOSITORY.fullmatch(repository):
                raise
            unknown = str(error).rstrip(".")
    try:  # outside the handler above, so that errors of the client are not chained to that error
        folder, commit = download(repository, revision or named or None, token, cache_dir)
        log.info("%s is commit %s of %s on the Hub", text, commit, repository)
        return Location(text, folder, commit)
    except HubError as error:
        if unknown:
            raise UnknownNameError(f"{unknown}; on the Hub: {error}") from None
        if os.path.isdir(text.partition("/")[0]):
            raise type(error)(f"there is no folder {text}; on the Hub: {error}") from None
        raise


@reading()
def find(name: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint on this machine, by its path or its name; that of a run stands for the one inside."""
    text = os.fspath(name)
    names = list_checkpoints()
    available = ", ".join(names) or "(none)"
    if is_folder(name):
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {text}: correct the path, or choose from {available}.")
        of_run = folder / folder.resolve().name
        return folder if (folder / CONFIG).is_file() or not (of_run / CONFIG).is_file() else of_run
    roots = _roots()
    found = [root / text for root in roots if text and (root / text).is_dir()]
    if not found:
        places = " and ".join(map(str, roots)) or f"no folder, since {ENVIRONMENT_VARIABLE} is not set"
        close = did_you_mean(text, names)
        if text and Path("runs", text, text, CONFIG).is_file():
            close = f" (did you mean runs/{text}?)"
        raise UnknownNameError(f"unknown checkpoint {text!r}{close}: choose from {available}, which are in {places}.")
    if len(found) > 1:
        places = " and ".join(map(str, found))
        raise CheckpointError(
            f"the checkpoint {text!r} exists more than once, in {places}: remove all but one, or pass a folder's path."
        )
    return found[0]


def is_folder(name: str | os.PathLike[str]) -> bool:
    """Whether the name of a checkpoint is the path of a folder: by its form, or because the folder exists."""
    if not isinstance(name, str) or name.startswith((".", "/", "~")) or os.path.isdir(name):
        return True
    return ("/" in name or os.sep in name) and not REPOSITORY.fullmatch(name.partition("@")[0])


def _roots() -> list[Path]:
    named = os.environ.get(ENVIRONMENT_VARIABLE, "").split(os.pathsep)
    roots = [Path(name).expanduser().resolve() for name in named if name]
    return list(dict.fromkeys([*roots, *([SOURCE_TREE] if SOURCE_TREE.is_dir() else [])]))


def default_checkpoint() -> str:
    return usable_checkpoints()[0]


def usable_checkpoints() -> list[str]:
    """The names of all checkpoints that classify images, the preferred one first, then BKN networks before others."""
    ranked = []
    for name in list_checkpoints():
        try:
            config = Config.read(find(name) / CONFIG)
        except CheckpointError:  # loading it by name will say why
            continue
        network = config.architecture.rpartition("_")[0]
        if config.preprocessing is not None and (network in NETWORKS or is_model(config.architecture)):
            ranked.append((name != PREFERRED_CHECKPOINT, config.norm != "bkn", name))
    if not ranked:
        raise CheckpointError(
            "no checkpoint that classifies images was found: name a folder or owner/repo on the Hub (in a shell with "
            "--checkpoint), or set BKN_ZOO_CHECKPOINTS to a folder of checkpoints."
        )
    return [rank[-1] for rank in sorted(ranked)]
