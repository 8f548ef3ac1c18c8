"""The subcommands of scripts/benchmark.py, a file each."""
