"""A command's own few words, taken out before the rest is read as options (flags.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def taken(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], dict[str, str], list[str]]:
    """Split the words of a command.

    Args:
        words: as typed.
        own: the command's own flags, and whether each takes a value.

    Returns:
        the words that stand alone, the own flags with their values ("" for a switch), and everything else in order.

    Raises:
        ValueError: an own flag lacks its value, has one it does not take, or is given twice.
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
            raise ValueError(f"{name} is given twice")
        if not own[name] and equals:
            raise ValueError(f"{name} is a switch, it takes no value; found {value!r}")
        if own[name] and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{name} needs a value")
            value = waiting.pop(0)
        values[name] = value
    return alone, values, rest


def number(name: str, text: str) -> float:
    """The value of an own flag as a number that is not negative. Raises ValueError with a sentence."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} takes a number from 0 on; found {text!r}")
    return value


def size(num_bytes: int) -> str:
    """Bytes for people: `1.5 GB`."""
    amount, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
