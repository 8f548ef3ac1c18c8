"""Publishes checkpoints on the Hub: `bkn-zoo publish`, for who has a checkout; bkn_zoo/cli/publish.py says how."""

import sys

from bkn_zoo.cli import ended
from bkn_zoo.cli.publish import main

if __name__ == "__main__":
    sys.exit(ended("publish.py", lambda: main(sys.argv[1:])))
