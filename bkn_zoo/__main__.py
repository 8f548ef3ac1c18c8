"""The command `bkn-zoo`, as `python -m bkn_zoo`."""

import sys

from bkn_zoo.cli import main

if __name__ == "__main__":
    sys.exit(main())
