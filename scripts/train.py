"""Trains a network by a recipe: `bkn-zoo train`, for who has a checkout; bkn_zoo/cli/train.py says how."""

import sys

from bkn_zoo.errors import BknZooError

if __name__ == "__main__":
    try:
        from bkn_zoo.cli.train import main  # here, since PyTorch comes with it, and Ctrl-C may come before that has

        main(sys.argv[1:])
    except BknZooError as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
