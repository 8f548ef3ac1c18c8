"""The version, here alone: the package, its metadata and what it writes take it from this file."""

__version__ = "0.1.0"
