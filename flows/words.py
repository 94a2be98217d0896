"""Parsing of a command's own words, which are taken out before the rest is read as options (flags.py), and text for people."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from storage.errors import OptionError, RunError
from storage.keys import MAX_RUN_NAME, RUN_NAME
from storage.secrets import redact

MAX_LINE = 390  # characters of an error message
MAX_VALUE = 80  # of a value that a message quotes


def taken(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, str], list[str]]:
    """Split the words of a command.

    Args:
        words: as typed.
        own: the command's own flags, and whether each takes a value.

    Returns:
        the words that stand alone, the own flags with their values ("" for a switch), and everything else in order.

    Raises:
        OptionError: an own flag lacks its value, has one it does not take, or is given twice.
    """
    alone: list[str] = []
    values: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(words)
    in_rest = False  # whether a plain word belongs to a flag that is not ours
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if name not in own:
            in_rest = in_rest or word.startswith("--")
            (rest if in_rest else alone).append(word)
            continue
        in_rest = False
        if name in values:
            raise OptionError(f"{name} is given twice: give it once")
        if not own[name] and equals:
            raise OptionError(f"{name} is a switch, it takes no value; found {shown(value)}")
        if own[name] and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise OptionError(f"{name} needs a value")
            value = waiting.pop(0)
        if own[name] and not value.strip():
            raise OptionError(f"{name} needs a value; found {value!r}")
        values[name] = value
    return alone, values, rest


def one_run(command: str, words: Sequence[str]) -> str:
    """Return the run that `penstock COMMAND RUN` names.

    Raises:
        OptionError: no name or several words.
        RunError: not a possible name.
    """
    if len(words) != 1:
        given = f"; found {shown(' '.join(words))}" if words else ""
        raise OptionError(f"penstock {command} needs the name of one run{given}; `penstock runs` lists them")
    return run_name(words[0])


def run_name(name: str, flag: str = "") -> str:
    """Return `name` if a run can have it.

    Raises:
        RunError: other characters than letters, digits, dot, dash, underscore, or too many.
    """
    what = f"{flag} {shown(name)}" if flag else shown(name)
    if not re.fullmatch(RUN_NAME, name):
        raise RunError(
            f"{what} is not a run name: use letters, digits, dot, dash and underscore, and begin with a letter or a digit"
        )
    if len(name) > MAX_RUN_NAME:
        raise RunError(f"{what} has {len(name)} characters: a run name has at most {MAX_RUN_NAME}")
    return name


def number(name: str, text: str) -> float:
    """Return the value of an own flag as a number that is not negative.

    Raises:
        OptionError: not a finite number from 0.
    """
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise OptionError(f"{name} takes a number from 0; found {shown(text)}")
    return value


def whole_number(name: str, text: str) -> int:
    """Return the value of an own flag as an integer from 0.

    Raises:
        OptionError: anything else.
    """
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise OptionError(f"{name} takes a whole number from 0; found {shown(text)}")
    return int(text)


def command() -> str:
    """Return how `penstock` is called from here: by its name if that finds this installation, else by its path."""
    program = Path(sys.executable).with_name("penstock")
    named = shutil.which("penstock")
    if named is not None and Path(named).resolve() == program.resolve():
        return "penstock"
    if not program.exists():
        return f"{shlex.quote(sys.executable)} -m flows.cli"
    return shlex.quote(os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program))


def size(num_bytes: int) -> str:
    """Return bytes for people: `1.5 GB`."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def shown(value: object) -> str:
    """Return `repr(value)`, a long one shortened to MAX_VALUE characters in its middle: the end of a path says most."""
    text, half = repr(value), (MAX_VALUE - 3) // 2
    return text if len(text) <= MAX_VALUE else f"{text[:half]}...{text[-half:]}"


def one_line(text: str) -> str:
    """Return a message as one printable line of at most MAX_LINE characters, without secrets; a long one is shortened in its middle."""
    words = " ".join(redact(text).split())
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    if len(plain) <= MAX_LINE:
        return plain
    kept = MAX_LINE - 5
    return f"{plain[: 2 * kept // 3]} ... {plain[len(plain) - kept // 3 :]}"
