"""Split off and compare units at the end of an answer: `12\\,\\text{cm}` is the number 12 with the unit cm.

A value without a unit counts as equal to the same value with any unit.
"""

from __future__ import annotations

from fractions import Fraction

from penstock.stages.rewards.math.latex import FUNCTIONS, Node
from penstock.stages.rewards.math.numeric import same_value
from penstock.stages.rewards.math.tokens import DEGREE, WORD

_ALIASES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre",
    "kg": "kilogram", "g": "gram gm", "mg": "milligram", "l": "liter litre", "ml": "milliliter millilitre cc",
    "s": "second sec", "min": "minute", "h": "hour hr", "ft": "foot feet", "in": "inch inche", "yd": "yard",
    "mi": "mile", "lb": "pound", "oz": "ounce", "$": "dollar usd", "€": "euro eur", "£": "gbp", "cent": "¢",
    "%": "percent percentage pct", DEGREE: "degree deg", "rad": "radian", "mph": "mi/h",
}  # fmt: skip
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_IGNORED_UNITS = ("unit", "th", "st", "nd", "rd")
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_CURRENCIES = (r"\$", "€", "£", "$")
_UNIT_SYMBOLS = (DEGREE, "%")
_CONNECTORS = ("/", "^", "-", r"\cdot", "{", "}", "(", ")")


def split_unit(tokens: list[str]) -> tuple[list[str], str]:
    """Split an answer into the tokens of its value and its unit in canonical spelling ("" without a unit)."""
    unit = ""
    currency = next((token for token in tokens[:2] if token in _CURRENCIES), None)
    if currency is not None:
        tokens = [token for token in tokens if token not in _CURRENCIES]
        unit = currency.removeprefix("\\")
    begin = next(
        (index for index, token in enumerate(tokens) if token.startswith(WORD) or token in _UNIT_SYMBOLS), len(tokens)
    )
    suffix = tokens[begin:]
    if not suffix or begin == 0 or not _is_unit(suffix):
        return tokens, unit
    while begin and tokens[begin - 1] in ("{", "^"):  # 5^{\text{th}}
        begin -= 1
    value, name = tokens[:begin], _normalize_unit(suffix)
    has_digits = any(character.isdigit() for token in value for character in token)
    has_letters = any(token.isalpha() or token.startswith("\\") for token in value)
    # In \sin 30^\circ, the degrees belong to the argument of the function.
    has_function = any(token[1:] in FUNCTIONS for token in value if token.startswith("\\"))
    if has_function or not (has_digits or (has_letters and name.partition("^")[0] in _ALIASES)):
        return tokens, unit
    return value, name or unit


def _is_unit(suffix: list[str]) -> bool:
    """Return whether the tokens after a number are one unit: `cm^2` or `m/s`, but not the `hours 30 minutes` of
    `2 hours 30 minutes`."""
    for before, token in zip(["", *suffix], suffix):
        is_exponent = token.isdigit() and (before in ("^", "-") or before == "{")
        if not (
            token.startswith(WORD)
            or token in _UNIT_SYMBOLS
            or token in _CONNECTORS
            or is_exponent
            or (before == "/" and token.isalpha())
        ):
            return False
    return suffix.count("{") <= suffix.count("}")


def _normalize_unit(suffix: list[str]) -> str:
    """Return a unit's canonical spelling: cm^2 for `square centimeters` and `cm^{2}`, m/s for `meters per second`."""
    parts: list[str] = []
    power = ""
    for token in suffix:
        word = token.removeprefix(WORD)
        if not (token.startswith(WORD) or word.isalpha()):
            parts.append("" if token in ("{", "}", "(", ")", r"\cdot") else token)
            continue
        word = word if word in _ALIASES else word.lower()
        single = word if word in _ALIASES or word in _POWERS else word.removesuffix("s")
        if word in _POWERS:
            if word.endswith(("ed",)):
                parts.append(f"^{_POWERS[word]}")
            else:
                power = f"^{_POWERS[word]}"
        elif word == "per":
            parts.append("/")
        elif single not in _IGNORED_UNITS:
            parts.append(_CANONICAL.get(word, _CANONICAL.get(single, single)) + power)
            power = ""
    return "".join(parts).strip("^")


def same_quantity(left: Node, left_unit: str, right: Node, right_unit: str) -> bool:
    """Return whether two values with units are equal.

    The units must be the same, or one value must have no unit; 50 % is equal to 50 and to 0.5.
    """
    if left_unit and right_unit and left_unit != right_unit:
        return False
    if same_value(left, right):
        return True
    hundred: Node = ("number", Fraction(100))
    if left_unit == "%" and not right_unit:
        return same_value(left, ("*", right, hundred))
    return right_unit == "%" and not left_unit and same_value(("*", left, hundred), right)
