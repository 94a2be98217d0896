"""Reject values that pydantic would silently convert or that no stage can use: booleans for numbers, infinities,
integers beyond 64 bits, empty text.

The stages' config.py files define the type and bounds of each option; the checks here apply to every option.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic.fields import FieldInfo

from penstock.engines.backends import BACKENDS
from penstock.flows.options.argv import short_repr
from penstock.storage.errors import check_rules

MAX_INTEGER = 2**63 - 1
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 32  # of nested lists and tables


def check_value(name: str, value: Any, field: FieldInfo) -> None:
    """Check the raw value of the option with the flag `name`, from whatever source, before pydantic validates and
    converts it. Raises OptionError if it is a boolean for a number, not finite, beyond 64 bits, empty text or not valid
    text."""
    kinds = leaf_types(field.annotation)
    takes_number, takes_text = bool(kinds & {int, float}), str in kinds
    problem = ""
    for item in value if isinstance(value, list) else [value]:
        if takes_number and bool not in kinds and isinstance(item, bool):
            problem = f"takes a number; found {str(item).lower()}"
    if isinstance(value, str) and takes_number and not takes_text:
        problem = describe_number_problem(value)
    elif isinstance(value, str) and takes_text and not value.strip() and field.default != "":
        problem = f"needs a value; found {value!r}"
    elif isinstance(value, list) and takes_text and Any not in kinds and "" in value:
        problem = "has an empty value: give a value, or leave the option out"
    problems: Iterable[str] = [f"{name} {problem}"] if problem else nested_problems(name, value)
    check_rules((True, message) for message in problems)


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


def describe_number_problem(text: str) -> str:
    """Return what is wrong with a number that is given as text: not finite, or beyond 64 bits; "" if it is neither.
    Pydantic reports a text that is not a number."""
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number) and not re.fullmatch(r"\s*[+-]?[0-9_.]+\s*", text):
        return f"takes a finite number; found {short_repr(text)}"
    if re.fullmatch(r"\s*[+-]?[0-9_]+\s*", text) and abs(number) > MAX_INTEGER:
        return f"takes a number of at most {MAX_INTEGER}; found {short_repr(text)}"
    return ""


def nested_problems(name: str, value: Any, depth: int = 0) -> Iterator[str]:
    """Yield an error message for each value in nested lists and dicts that is not a finite number within 64 bits, a
    valid text, or a boolean, also for a date and for more than MAX_DEPTH levels; `depth` is the level of `value`."""
    problem = describe_problem(value)
    if depth > MAX_DEPTH:
        problem = f"has values nested more than {MAX_DEPTH} levels deep: use fewer levels"
    if problem:
        yield f"{name} {problem}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from nested_problems(name, key, depth + 1)
            # An engine's or router's option is written `--ENGINE-KEY`, an entry of another option `--name KEY`.
            shown = short_repr(str(key))[1:-1]
            of_program = name.removeprefix("--") in ("router", *BACKENDS)
            flag = f"{name}-{shown.replace('_', '-')}" if of_program else f"{name} {shown}"
            yield from nested_problems(flag, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nested_problems(name, item, depth + 1)


def describe_problem(value: Any) -> str:
    """Return why no option can have a number or text as its value, or in its value; "" if one can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"takes a finite number; found {value}"
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return f"takes a number of at most {MAX_INTEGER}; found one with {value.bit_length()} bits"
    if isinstance(value, str) and "\0" in value:
        return f"has a NUL character in {short_repr(value)}: remove it"
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        return f"is not valid UTF-8: {short_repr(value)}; correct its encoding"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"has {len(value)} characters: give at most {MAX_CHARACTERS}"
    if type(value).__module__ == "datetime":
        return f"does not take a date or a time; found {value}"
    return ""
