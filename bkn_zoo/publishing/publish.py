"""Publishes a checkpoint: validates the folder, sends it in one commit, and compares the published files."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from bkn_zoo.checkpoints.card import is_card, readdressed
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CARD, CONFIG, files_of
from bkn_zoo.checkpoints.folder import verify_golden
from bkn_zoo.checkpoints.hub import Change, changes, check_reachable, check_repository, push_to_hub
from bkn_zoo.errors import CheckpointError, HubError, HubUnavailableError


def validate(folder: Path) -> None:
    """Refuse a folder that does not load, has other outputs than stored, or disagrees with its card."""
    files_of(folder)
    verify_golden(folder)
    if not is_card((folder / CARD).read_text(), Config.read(folder / CONFIG)):
        raise CheckpointError(
            f"{folder / CARD} does not agree with config.json: write the card again, or publish the folder with "
            "bkn_zoo.push_to_hub."
        )


def publish(folder: Path, repository: str, *, private: bool = False, dry_run: bool = False) -> None:
    """Validate a checkpoint, show the changes and, unless it is a dry run, publish and verify it.

    Args:
        repository: "owner/repo"; the card keeps the checkpoint's name.
        private: whether a new repository is private.
    """
    check_repository(repository)
    validate(folder)
    print(f"{repository}: {folder} loads, reproduces its outputs and agrees with its card", flush=True)
    with TemporaryDirectory() as scratch:  # a card must not load a path of this machine
        copy = Path(scratch) / folder.resolve().name
        copy.mkdir()
        for path in files_of(folder):
            shutil.copyfile(path, copy / path.name)
        card = readdressed((folder / CARD).read_text(), Config.read(folder / CONFIG), repository)
        (copy / CARD).write_text(card)
        try:
            check_reachable(repository)
            planned = changes(copy, repository)
        except HubUnavailableError:
            if not dry_run:
                raise
            print(f"{repository}: the Hub cannot be reached, so all files are listed")
            planned = [Change(path.name, "to send", path.stat().st_size) for path in files_of(copy)]
        for change in planned:
            print(f"{repository}: {change.kind} {change.file} ({change.size:,} bytes)")
        if not planned:
            print(f"{repository}: nothing to change")
        if dry_run:
            return
        published = push_to_hub(copy, repository, private=private)
        for change in changes(copy, repository, published.commit):  # by the hashes that the Hub lists
            raise HubError(f"{change.file} of {repository} differs from the local file: publish again.")
    print(f"{repository}: main is {published.commit}, verified by the hashes of its files")
