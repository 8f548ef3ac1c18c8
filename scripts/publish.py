"""Publishes checkpoints on the Hub: `bkn-zoo publish`, for who has a checkout; bkn_zoo/cli/publish.py says how."""

import sys

from bkn_zoo.cli.publish import main
from bkn_zoo.errors import BknZooError

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BknZooError as error:
        sys.exit(f"publish.py: {error}")
