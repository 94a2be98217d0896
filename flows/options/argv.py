"""Parse the arguments of commands other than config options (those are parsed in flags.py), and format values for
messages."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.flows.terminal.escape import escape_controls
from penstock.storage.errors import OptionError, RunError, check_rules
from penstock.storage.secrets import redact

MAX_LINE = 380  # maximum characters of an error message, so that "penstock: MESSAGE" fits 400
MAX_VALUE = 80  # maximum characters of a value quoted in a message


def split_args(
    argv: Sequence[str], own_flag_takes_value: Mapping[str, bool]
) -> tuple[list[str], dict[str, str], list[str]]:
    """Split the arguments of a command into positional arguments, the command's own flags, and all other flags.

    Args:
        argv: arguments as typed.
        own_flag_takes_value: the command's own flags: name -> whether the flag takes a value.

    Returns:
        the positional arguments, the own flags with their values ("" for a switch), and the other flags with their
        values in the order given.
    """
    positional: list[str] = []
    values: dict[str, str] = {}
    rest: list[str] = []
    remaining = list(argv)
    in_rest = False  # whether the last flag is in `rest`, so that a plain argument is its value
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if name not in own_flag_takes_value:
            in_rest = in_rest or argument.startswith("--")
            (rest if in_rest else positional).append(argument)
            continue
        in_rest = False
        takes_value = own_flag_takes_value[name]
        if takes_value and not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        check_rules(
            (
                (name in values, f"{name} is given twice: give it once"),
                (equals and not takes_value, f"{name} is a switch and takes no value; found {short_repr(value)}"),
                (takes_value and not value.strip(), f"{name} needs a value: give one after it"),
            )
        )
        values[name] = value
    return positional, values, rest


def parse_run_argument(command: str, positional: Sequence[str]) -> str:
    """Return the run name from the positional arguments of `penstock COMMAND RUN`."""
    if len(positional) != 1:
        found = f"; found {short_repr(' '.join(positional))}" if positional else ""
        raise OptionError(f"penstock {command} needs the name of one run{found}; `penstock runs` lists them")
    return check_run_name(positional[0])


def check_run_name(name: str, flag: str = "") -> str:
    """Check that `name` is a valid run name, and return it. `flag` is the flag that gave it, for the error message."""
    # Imported here, because `penstock setup` imports this module before the packages of `storage` are installed.
    from penstock.storage.commit import MAX_RUN_NAME, is_run_name

    if not is_run_name(name):
        what = f"{flag} {short_repr(name)}" if flag else short_repr(name)
        raise RunError(
            f"{what} is not a valid run name: use at most {MAX_RUN_NAME} letters, digits, dots, dashes and "
            "underscores, and begin with a letter or a digit"
        )
    return name


def parse_number(name: str, text: str) -> float:
    """Parse the value of the flag `name` as a non-negative number."""
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise OptionError(f"{name} takes a number >= 0; found {short_repr(text)}")
    return value


def parse_integer(name: str, text: str, *, minimum: int = 0) -> int:
    """Parse the value of the flag `name` as an integer of at least `minimum`, which is not negative."""
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < minimum:
        raise OptionError(f"{name} takes an integer >= {minimum}; found {short_repr(text)}")
    return int(text)


def penstock_command() -> str:
    """Return the shell command of this installation: `penstock` if PATH finds it under that name, else its path."""
    program = Path(sys.executable).with_name("penstock")
    on_path = shutil.which("penstock")
    if on_path is not None and Path(on_path).resolve() == program.resolve():
        return "penstock"
    if not program.exists():
        return f"{shlex.quote(sys.executable)} -m penstock"
    return shlex.quote(os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program))


def activate_command() -> str:
    """Return the shell command that puts the commands of this Python environment on the PATH."""
    script = Path(sys.prefix) / "bin" / "activate"
    return f"source {shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))}"


def flag_of_field(field_name: str) -> str:
    """Return the flag of a field: `rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + field_name.replace("_", "-")


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with a decimal unit: `1.5 GB`."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def short_repr(value: object, limit: int = MAX_VALUE) -> str:
    """Return `repr(value)`, shortened in the middle to `limit` characters (the end of a path is kept)."""
    text, half = repr(value), (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def to_one_line(text: str) -> str:
    """Return a message as one printable line, secrets redacted, shortened in the middle to MAX_LINE characters."""
    line = " ".join(redact(text).split())
    plain = escape_controls(line)
    if len(plain) <= MAX_LINE:
        return plain
    budget = MAX_LINE - 5
    return f"{plain[: 2 * budget // 3]} ... {plain[len(plain) - budget // 3 :]}"
