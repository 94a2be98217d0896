"""Reject values that pydantic would silently convert or that no stage can use: booleans for numbers, infinities,
integers beyond 64 bits, empty text.

The stages' config.py files define the type and bounds of each option; the checks here apply to every option.
"""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from penstock.engines.backends import BACKENDS
from penstock.flows.options.argv import short_repr
from penstock.storage.errors import OptionError

MAX_INTEGER = 2**63 - 1
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32  # of nested lists and tables


def check_value(name: str, value: Any, field: FieldInfo) -> None:
    """Check the raw value of one option before pydantic validates and converts it.

    Args:
        name: flag of the option, for error messages.
        value: raw value from a flag, a TOML file, the record of a run or the parameters of a Prefect flow run.
        field: pydantic field of the option.

    Raises:
        OptionError: the value is a boolean for a number, not finite, beyond 64 bits, empty text or not valid text.
    """
    kinds = leaf_types(field.annotation)
    for item in value if isinstance(value, list) else [value]:
        if kinds & {int, float} and bool not in kinds and isinstance(item, bool):
            raise OptionError(f"{name} takes a number; found {str(item).lower()}")
    if isinstance(value, str):
        if kinds & {int, float} and str not in kinds:
            check_number_text(name, value)
        if str in kinds and not value.strip() and field.default != "":
            raise OptionError(f"{name} needs a value; found {value!r}")
    elif isinstance(value, list) and str in kinds and Any not in kinds and any(item == "" for item in value):
        raise OptionError(f"{name} has an empty value: give a value, or leave the option out")
    check_nested_values(name, value, 0)


def leaf_types(annotation: Any) -> set[Any]:
    """Return the types at the leaves of an annotation: `list[int] | None` -> {int, NoneType}. A dict counts as
    {Any}."""
    origin = typing.get_origin(annotation)
    if origin is dict:
        return {Any}
    if origin is typing.Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    if origin in (typing.Union, types.UnionType, list, tuple):
        return set().union(*(leaf_types(argument) for argument in typing.get_args(annotation)))
    return {annotation}


def check_number_text(name: str, text: str) -> None:
    """Check that a number that is given as text is finite and within 64 bits. Raises OptionError."""
    try:
        finite = math.isfinite(float(text))
    except ValueError:
        return  # pydantic reports it
    if not finite and not re.fullmatch(r"\s*[+-]?[0-9_.]+\s*", text):
        raise OptionError(f"{name} takes a finite number; found {short_repr(text)}")
    if re.fullmatch(r"\s*[+-]?[0-9_]+\s*", text) and abs(float(text)) > MAX_INTEGER:
        raise OptionError(f"{name} takes a number of at most {MAX_INTEGER}; found {short_repr(text)}")


def check_nested_values(name: str, value: Any, depth: int) -> None:
    """Check that all values in nested lists and dicts are finite numbers within 64 bits, valid texts, or booleans.
    Raises OptionError, also for a date and for more than MAX_DEPTH levels; `depth` is the level of `value`."""
    if depth > MAX_DEPTH:
        raise OptionError(f"{name} has values nested more than {MAX_DEPTH} levels deep: use fewer levels")
    if isinstance(value, dict):
        for key, item in value.items():
            check_nested_values(name, key, depth + 1)
            check_nested_values(describe_nested_flag(name, key), item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_nested_values(name, item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{name} takes a finite number; found {value}")
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise OptionError(f"{name} takes a number of at most {MAX_INTEGER}; found one with {value.bit_length()} bits")
    elif isinstance(value, str):
        check_option_text(name, value)
    elif type(value).__module__ == "datetime":
        raise OptionError(f"{name} does not take a date or a time; found {value}")


def describe_nested_flag(name: str, key: Any) -> str:
    """Return how the entry `key` of the dict option `name` is written on the command line, for error messages: as
    `--ENGINE-KEY` for an engine's or router's option, else as `--name KEY`."""
    key = short_repr(str(key))[1:-1]
    dashed = key.replace("_", "-")
    return f"{name}-{dashed}" if name.removeprefix("--") in ("router", *BACKENDS) else f"{name} {key}"


def check_option_text(name: str, text: str) -> None:
    """Check that a text has no NUL character, is valid Unicode and is not too long. Raises OptionError."""
    if "\0" in text:
        raise OptionError(f"{name} has a NUL character in {short_repr(text)}: remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(f"{name} is not valid UTF-8: {short_repr(text)}; correct its encoding")
    if len(text) > MAX_CHARACTERS:
        raise OptionError(f"{name} has {len(text)} characters: give at most {MAX_CHARACTERS}")
