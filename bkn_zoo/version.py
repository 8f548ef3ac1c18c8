"""The version of the package. This is its only definition."""

__version__ = "0.1.0"
