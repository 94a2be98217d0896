"""Values that pydantic would convert, or that no stage can use: switches for numbers, infinities, integers beyond 64 bits, empty text.

Bounds and types of single options are in the stages' config.py; this file has the rules that hold for every option.
"""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any

from pydantic.fields import FieldInfo

from flows.words import shown
from storage.errors import OptionError

MAX_INTEGER = 2**63 - 1
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32  # of nested lists and tables


def check_value(name: str, value: Any, field: FieldInfo) -> None:
    """Check one option before pydantic reads it.

    Args:
        name: the flag, for messages.
        value: from a flag, a TOML file, a record or Prefect.
        field: of the option.

    Raises:
        OptionError: see the module's docstring.
    """
    kinds = leaf_types(field.annotation)
    for item in value if isinstance(value, list) else [value]:
        if kinds & {int, float} and bool not in kinds and isinstance(item, bool):
            raise OptionError(f"{name} takes a number; found {str(item).lower()}")
    if isinstance(value, str):
        if kinds & {int, float} and str not in kinds:
            _check_number_text(name, value)
        if str in kinds and not value.strip() and field.default != "":
            raise OptionError(f"{name} needs a value; found {value!r}")
    elif isinstance(value, list) and str in kinds and Any not in kinds and any(item == "" for item in value):
        raise OptionError(f"{name} has an empty text among its values: leave it out")
    _check_leaves(name, value, 0)


def leaf_types(annotation: Any) -> set[Any]:
    """Return the types at the leaves of an annotation: `list[int] | None` -> {int, NoneType}. Tables count as {Any}."""
    origin = typing.get_origin(annotation)
    if origin is dict:
        return {Any}
    if origin is typing.Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    if origin in (typing.Union, types.UnionType, list, tuple):
        return set().union(*(leaf_types(argument) for argument in typing.get_args(annotation)))
    return {annotation}


def _check_number_text(name: str, text: str) -> None:
    try:
        finite = math.isfinite(float(text))
    except ValueError:
        return  # pydantic says which number is needed
    if not finite and not re.fullmatch(r"\s*[+-]?[0-9_.]+\s*", text):
        raise OptionError(f"{name} takes a finite number; found {shown(text)}")
    if re.fullmatch(r"\s*[+-]?[0-9_]+\s*", text) and abs(float(text)) > MAX_INTEGER:
        raise OptionError(f"{name} takes a number of at most {MAX_INTEGER}; found {shown(text)}")


def _check_leaves(name: str, value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise OptionError(f"{name} has lists or tables nested more than {MAX_DEPTH} deep: use fewer levels")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_leaves(name, key, depth + 1)
            _check_leaves(_nested(name, key), item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_leaves(name, item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise OptionError(f"{name} takes a finite number; found {value}")
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise OptionError(f"{name} takes a number of at most {MAX_INTEGER}; found one with {value.bit_length()} bits")
    elif isinstance(value, str):
        _check_text(name, value)
    elif type(value).__module__ == "datetime":
        raise OptionError(f"{name} does not take a date or a time; found {value}")


def _nested(name: str, key: Any) -> str:
    """Return the flag that sets one entry of a table."""
    key = shown(str(key))[1:-1]
    dashed = key.replace("_", "-")
    return {"--megatron": f"--{dashed}", "--sglang": f"--sglang-{dashed}", "--router": f"--router-{dashed}"}.get(
        name, f"{name} {key}"
    )


def _check_text(name: str, text: str) -> None:
    if "\0" in text:
        raise OptionError(f"{name} has a NUL character in {shown(text)}: remove it")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise OptionError(f"{name} is not valid UTF-8: {shown(text)}")
    if len(text) > MAX_CHARACTERS:
        raise OptionError(f"{name} has {len(text)} characters: give at most {MAX_CHARACTERS}")
