"""Measures a checkpoint on a data set: `bkn-zoo evaluate`, for who has a checkout; bkn_zoo/cli/evaluate.py says how."""

import sys

from bkn_zoo.cli.evaluate import main
from bkn_zoo.errors import BknZooError

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BknZooError as error:
        sys.exit(f"evaluate.py: {error}")
