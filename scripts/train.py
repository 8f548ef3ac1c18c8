"""Trains a network by a recipe: `bkn-zoo train`, for who has a checkout; bkn_zoo/cli/train.py says how."""

import sys

from bkn_zoo.cli.train import main
from bkn_zoo.errors import BknZooError

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BknZooError as error:
        sys.exit(f"train.py: {error}")
