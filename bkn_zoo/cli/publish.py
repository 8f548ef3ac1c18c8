"""`bkn-zoo publish`: checkpoints to the Hugging Face Hub, one after another."""

import argparse
from pathlib import Path

from bkn_zoo.publishing.publish import publish


def run(args: argparse.Namespace, folders: list[Path]) -> None:
    """Publish these folders, or show what that would change."""
    options = {"tag": args.tag, "private": args.private, "dry_run": args.dry_run}
    for folder in folders:
        results = args.results or _results_of(folder.resolve())
        publish(folder, args.name or folder.resolve().name, args.namespace, results, **options)


def _results_of(folder: Path) -> Path:
    """The results that a checkpoint came with: those of its run, or those of the tree that it is in."""
    beside = folder.parent / "results"
    return beside if beside.is_dir() else folder.parent.parent / "results"
