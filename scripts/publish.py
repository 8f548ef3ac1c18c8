"""Publishes a checkpoint folder on the Hugging Face Hub.

    python scripts/publish.py runs/NAME/NAME me/my-network

It calls `bkn_zoo.push_to_hub`. `bkn-zoo publish` also compares the folder with its card and record.
"""

import argparse
import sys

import bkn_zoo
from bkn_zoo.cli import ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the checkpoint")
    parser.add_argument("repository", metavar="OWNER/REPO", help="is created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    args = parser.parse_args()
    published = bkn_zoo.push_to_hub(args.folder, args.repository, private=args.private)
    print(f"published as {args.repository}@{published.commit}")


if __name__ == "__main__":
    sys.exit(ended("publish.py", main))
