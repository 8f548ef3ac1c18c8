"""Publishes a checkpoint: validates the folder, sends it in one commit, and compares the published files."""

from pathlib import Path

from bkn_zoo.checkpoints.card import is_short_card
from bkn_zoo.checkpoints.config import Config
from bkn_zoo.checkpoints.files import CARD, CONFIG, files_of
from bkn_zoo.checkpoints.folder import verify_golden
from bkn_zoo.checkpoints.hub import Change, changes, check_reachable, check_repository, push_to_hub, verify_published
from bkn_zoo.errors import CheckpointError, HubUnavailableError
from bkn_zoo.publishing.cards import check_agreement, checkpoint_card, is_card, read_record


def card_of(config: Config, name: str, results: Path) -> str:
    """The card of a checkpoint, from its config and the folder of results."""
    return checkpoint_card(config, name, read_record(results, name))


def validate(folder: Path, name: str, results: Path) -> None:
    """Refuse a folder that does not load, has other outputs than stored, or disagrees with its card or results."""
    files_of(folder)
    verify_golden(folder)
    config, card, run = Config.read(folder / CONFIG), (folder / CARD).read_text(), read_record(results, name)
    check_agreement(config, name, run)
    if not is_short_card(card, config) and not is_card(card, config, name, run):
        raise CheckpointError(
            f"{folder / CARD} does not agree with config.json and {results}: pass its results with --results, put "
            "your own sections between Accuracy and Training, or publish the folder with bkn_zoo.push_to_hub."
        )


def _own_name(folder: Path) -> str:
    """The name in a checkpoint's card and record: that of its run, otherwise that of its folder."""
    name = Config.read(folder / CONFIG).training.get("name")
    return name if isinstance(name, str) else folder.resolve().name


def publish(
    folder: Path,
    name: str,
    namespace: str,
    results: Path,
    *,
    tag: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> None:
    """Validate a checkpoint, show the changes and, unless it is a dry run, publish and verify it.

    Args:
        folder: the folder of the checkpoint.
        name: name of the repository; the card keeps the checkpoint's name.
        namespace: the user or organization that owns the repository.
        results: the folder with the record of the run.
        tag: a tag for the commit, or None.
        private: whether a new repository is private.
        dry_run: whether to change nothing.
    """
    repository = f"{namespace}/{name}"
    check_repository(repository)
    validate(folder, _own_name(folder), results)
    print(f"{repository}: {folder} loads, reproduces its outputs and agrees with its card and its record", flush=True)
    try:
        check_reachable(repository)
        planned = changes(folder, repository)
    except HubUnavailableError as error:
        if not dry_run:
            raise
        print(f"{repository}: the Hub could not be asked for its files ({str(error).rstrip('.')})")
        planned = [Change(path.name, "to send", path.stat().st_size) for path in files_of(folder)]
    for change in planned:
        print(f"{repository}: {change.kind} {change.file} ({change.size:,} bytes)")
    if not planned:
        print(f"{repository}: nothing to change")
    if dry_run:
        return
    published = push_to_hub(folder, repository, private=private, tag=tag)
    verify_published(folder, repository, published.commit)
    print(f"{repository}: {tag or 'main'} is {published.commit}, verified by downloading it")
