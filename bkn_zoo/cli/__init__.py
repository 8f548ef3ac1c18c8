"""The command `bkn-zoo`."""

from bkn_zoo.cli.command import main

__all__ = ["main"]
