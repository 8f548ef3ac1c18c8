"""Modules of upper layers that lower layers call: imported at the first call, so that imports still lead downward."""

from importlib import import_module
from typing import Any

UPPER_MODULES: dict[str, str] = {}
"""By subject, the name of the module. `bkn_zoo/__init__.py` fills it."""


def upper(subject: str) -> Any:
    """The module of a subject."""
    return import_module(UPPER_MODULES[subject])
