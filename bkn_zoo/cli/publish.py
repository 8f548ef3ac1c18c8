"""Publishes checkpoints on the Hugging Face Hub, each as NAMESPACE/NAME_OF_THE_FOLDER, in one commit.

    bkn-zoo publish runs/NAME/NAME --namespace me --dry-run                  # show what would change
    bkn-zoo publish runs/NAME/NAME --namespace me
    bkn-zoo publish checkpoints/* --namespace me --tag v1.2.3                # a release

Each folder is validated first: it loads, repeats its golden outputs, and agrees with results/ and with its card, unless
that is the short one of save_pretrained; `bkn_zoo.push_to_hub` publishes a folder with a card of your own. Then the Hub
is asked, which has to answer within seconds. What was published is downloaded again into an empty cache and compared.
Publishing twice changes nothing. The token is that of `hf auth login` or of HF_TOKEN.
"""

import argparse
from pathlib import Path

from bkn_zoo.checkpoints.locate import find
from bkn_zoo.publishing.publish import publish


def main(arguments: list[str], prog: str | None = None) -> None:
    parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a name or a folder")
    parser.add_argument("--namespace", required=True, help="the user or organization to publish under")
    parser.add_argument("--name", help="of the repository, for a single checkpoint; default: the folder's")
    parser.add_argument("--tag", help="for the commit, as in v1.2.3; one that is there already is never moved")
    parser.add_argument("--private", action="store_true", help="make repositories that are created private")
    parser.add_argument("--dry-run", action="store_true", help="validate and show what would change; change nothing")
    parser.add_argument("--results", type=Path, help="of the cards' figures; default: beside the checkpoint or above")
    args = parser.parse_args(arguments)
    if args.name and len(args.checkpoints) > 1:
        parser.error("--name is for a single checkpoint")
    options = {"tag": args.tag, "private": args.private, "dry_run": args.dry_run}
    for checkpoint in args.checkpoints:
        folder = find(checkpoint)
        results = args.results or _results_of(folder.resolve())
        publish(folder, args.name or folder.resolve().name, args.namespace, results, **options)


def _results_of(folder: Path) -> Path:
    """The results that a checkpoint came with: those of its run, or those of the tree that it is in."""
    beside = folder.parent / "results"
    return beside if beside.is_dir() else folder.parent.parent / "results"
