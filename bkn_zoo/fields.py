"""Checks of what people write into files: fields, types and ranges, each refused in a sentence."""

import dataclasses
import sys
from typing import Any, TypeGuard

from bkn_zoo.errors import InputError


def check_fields(cls: type, data: dict[str, Any], prefix: str = "") -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, known in fields.items():
        required = known.default is dataclasses.MISSING and known.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise InputError(f"the field {prefix}{name} is missing: add it, as save_pretrained writes it.")
    for name in data:
        if name not in fields:
            raise InputError(
                f"the field {prefix}{name} is unknown: remove it, or upgrade bkn_zoo if a newer one wrote it."
            )


def check(valid: bool, name: str, value: Any, wanted: str) -> None:
    if not valid:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InputError(f"{name} is {shown}, but must be {wanted}.")


def check_choice(name: str, value: Any, choices: list[str] | tuple[str, ...]) -> None:
    check(isinstance(value, str) and value in choices, name, value, f"one of {', '.join(choices)}")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
