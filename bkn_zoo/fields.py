"""Checks the fields of files that people write, by the annotations of a dataclass: names, types and ranges."""

import dataclasses
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from bkn_zoo.errors import InputError

Made = TypeVar("Made")


class Rule(NamedTuple):
    """A condition for values of the right type, and a description of valid values, in an annotation: `Count`."""

    holds: Callable[[Any], bool]
    wanted: str


def one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, f"one of {', '.join(choices)}")


Count = Annotated[int, Rule(lambda value: value >= 1, "a whole number of at least 1")]
Amount = Annotated[float, Rule(lambda value: value >= 0, "a number of at least 0")]

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}


def make(kind: type[Made], data: dict[str, Any], prefix: str = "", *, newer: str | None = None) -> Made:
    """Build a dataclass, and those inside, from the content of a file; a missing required field is an error.

    If `newer` names a file that a newer version may have written, unknown fields only cause a warning.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, field in fields.items():
        if name not in data and field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"the field {prefix}{name} is missing: add it.")
    made = {}
    for name, value in data.items():
        if name not in fields:
            if newer is None:
                raise InputError(f"the field {prefix}{name} is unknown: correct or remove it.")
            reason = "because this bkn_zoo does not know it: upgrade bkn_zoo"
            warnings.warn(f"{newer}: the field {prefix}{name[:80]} is ignored, {reason}", stacklevel=2)
            continue
        for hint in (fields[name].type, *get_args(fields[name].type)):
            if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
                value = make(hint, value, f"{prefix}{name}.", newer=newer)
        made[name] = value
    return kind(**made)


def attributes_of(kind: type) -> dict[str, str]:
    """The descriptions under "Attributes" in the docstring of a class, by name."""
    section = inspect.getdoc(kind).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}


def check_fields(settings: Any, prefix: str = "") -> None:
    """Refuse a dataclass whose fields do not fit their annotations."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        check_field(prefix + name, getattr(settings, name), hint)


def check_field(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that does not fit its annotation."""
    if _fits(value, hint):
        return
    if get_origin(hint) is dict and isinstance(value, dict):  # name the wrong entry, not the whole dict
        of_keys, of_values = get_args(hint)
        for key, inner in value.items():
            check_field(f"a key of {name}", key, of_keys)
            check_field(f"{name}.{key}", inner, of_values)
    refuse(name, value, wanted(hint))


def refuse(name: str, value: Any, wanted: str) -> NoReturn:
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    raise InputError(f"{name} is {shown}, but must be {wanted}.")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _fits(value, inner[0]) and all(rule.holds(value) for rule in inner[1:])
    if kind is tuple:  # of any length; in JSON it is a list
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if inner:  # one of several
        return any(_fits(value, option) for option in inner)
    if hint is float:
        return is_number(value)
    return hint is Any or (isinstance(value, hint) and (hint is bool or not isinstance(value, bool)))


def wanted(hint: Any) -> str:
    """A description of the valid values of an annotation."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return inner[1].wanted
    if kind is tuple:
        return f"a list of {wanted(inner[0]).removeprefix('a ')}s"
    if kind is dict:
        return "an object with strings as keys"
    if inner:
        return ", or ".join(wanted(option) for option in inner)
    return "null" if hint is NoneType else WORDS.get(hint, f"a {hint.__name__}")
