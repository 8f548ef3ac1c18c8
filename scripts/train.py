"""Trains a network by a recipe: `bkn-zoo train`, for who has a checkout; bkn_zoo/cli/train.py says how."""

import sys

from bkn_zoo.cli import ended


def train() -> None:
    from bkn_zoo.cli.train import main  # here, since PyTorch comes with it, and Ctrl-C may come before that has

    main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(ended("train.py", train))
