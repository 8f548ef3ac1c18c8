"""`bkn-zoo publish`: publishes checkpoints on the Hugging Face Hub."""

import argparse
from pathlib import Path

from bkn_zoo.publishing.publish import publish


def run(args: argparse.Namespace, folders: list[Path]) -> None:
    """Publish these folders, or show what would change."""
    options = {"tag": args.tag, "private": args.private, "dry_run": args.dry_run}
    for folder in folders:
        results = args.results or _results_of(folder.resolve())
        publish(folder, args.name or folder.resolve().name, args.namespace, results, **options)


def _results_of(folder: Path) -> Path:
    """The folder of results of a checkpoint: of its run, or of the source tree around it."""
    beside = folder.parent / "results"
    return beside if beside.is_dir() else folder.parent.parent / "results"
