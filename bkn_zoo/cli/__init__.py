"""The command `bkn-zoo`."""

from bkn_zoo.cli.command import ended, main

__all__ = ["ended", "main"]
