"""Measures a checkpoint on a data set: `bkn-zoo evaluate`, for who has a checkout; bkn_zoo/cli/evaluate.py says how."""

import sys

from bkn_zoo.cli import ended
from bkn_zoo.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(ended("evaluate.py", lambda: main(sys.argv[1:])))
