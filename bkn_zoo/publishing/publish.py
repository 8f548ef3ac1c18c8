"""Publishing a checkpoint: check that it is what its card says, send it in one commit, look whether it arrived."""

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
    """Refuse a folder that does not load, gives other outputs than it did, or disagrees with its card or results."""
    files_of(folder)
    verify_golden(folder)
    config, card, run = Config.read(folder / CONFIG), (folder / CARD).read_text(), read_record(results, name)
    check_agreement(config, name, run)
    if not is_short_card(card, config) and not is_card(card, config, name, run):
        raise CheckpointError(
            f"{folder / CARD} is not what config.json and {results} say: name its results by --results, put sections "
            "of your own between Accuracy and Training, or publish the folder as it is with bkn_zoo.push_to_hub."
        )


def _own_name(folder: Path) -> str:
    """The name in a checkpoint's card and record: that of its run, or else its folder's."""
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
    """Validate a checkpoint, show what publishing it changes, and unless it is a dry run, publish and verify it.

    Args:
        folder: of the checkpoint.
        name: of the repository; the card keeps the checkpoint's own.
        namespace: the user or organization that owns it.
        results: the folder that the card's figures come from.
        tag: for the commit, if it is to have one.
        private: of a repository that is created.
        dry_run: change nothing.
    """
    repository = f"{namespace}/{name}"
    check_repository(repository)
    validate(folder, _own_name(folder), results)
    print(f"{repository}: {folder} loads, repeats its outputs and is what its card and its record say", flush=True)
    try:
        check_reachable(repository)
        planned = changes(folder, repository)
    except HubUnavailableError as error:
        if not dry_run:
            raise
        print(f"{repository}: the Hub was not asked what it has already ({str(error).rstrip('.')})")
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
