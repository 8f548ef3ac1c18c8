"""Publishes a checkpoint: validates the folder, and sends it in one commit."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from bkn_zoo.checkpoints.card import is_card, readdressed
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CARD, CONFIG, files_of
from bkn_zoo.checkpoints.folder import verify_golden
from bkn_zoo.checkpoints.hub import check_reachable, check_repository, push_to_hub
from bkn_zoo.errors import CheckpointError


def validate(folder: Path) -> None:
    """Refuse a folder that does not load, has other outputs than stored, or disagrees with its card."""
    files_of(folder)
    verify_golden(folder)
    if not is_card((folder / CARD).read_text(), Config.read(folder / CONFIG)):
        remedy = "write the card again, or publish the folder with bkn_zoo.push_to_hub"
        raise CheckpointError(f"{folder / CARD} does not agree with config.json: {remedy}.")


def publish(folder: Path, repository: str, *, private: bool = False, dry_run: bool = False) -> None:
    """Validate a checkpoint, list its files and, unless it is a dry run, publish it. Its card keeps its name."""
    check_repository(repository)
    validate(folder)
    print(f"{repository}: {folder} loads, reproduces its outputs and agrees with its card", flush=True)
    for path in files_of(folder):
        print(f"{repository}: {path.name} ({path.stat().st_size:,} bytes)")
    if dry_run:
        return
    check_reachable(repository)
    with TemporaryDirectory() as scratch:  # a card must not load a path of this machine
        copy = Path(scratch) / folder.resolve().name
        copy.mkdir()
        for path in files_of(folder):
            shutil.copyfile(path, copy / path.name)
        card = readdressed((folder / CARD).read_text(), Config.read(folder / CONFIG), repository)
        (copy / CARD).write_text(card)
        print(f"{repository}: published as {push_to_hub(copy, repository, private=private).commit}")
