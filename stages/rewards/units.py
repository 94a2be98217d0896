"""Units at the end of an answer: `12\\,\\text{cm}` is the number 12 and the unit cm. An answer without a unit has any unit."""

from __future__ import annotations

from fractions import Fraction

from stages.rewards.answer_tokens import DEGREE, WORD
from stages.rewards.latex import FUNCTIONS, Node
from stages.rewards.numeric import same_value

_ALIASES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre", "kg": "kilogram", "g": "gram gm", "mg": "milligram",
    "l": "liter litre", "ml": "milliliter millilitre cc", "s": "second sec", "min": "minute", "h": "hour hr", "ft": "foot feet", "in": "inch inche", "yd": "yard", "mi": "mile",
    "lb": "pound", "oz": "ounce", "$": "dollar usd", "€": "euro eur", "£": "gbp", "cent": "¢", "%": "percent percentage pct", DEGREE: "degree deg", "rad": "radian", "mph": "mi/h",
}  # fmt: skip
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_MEANINGLESS = ("unit", "th", "st", "nd", "rd")
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_CURRENCIES = (r"\$", "€", "£", "$")
_MARKS = (DEGREE, "%")
_JOINTS = ("/", "^", "-", r"\cdot", "{", "}", "(", ")")


def without_unit(tokens: list[str]) -> tuple[list[str], str]:
    """The tokens before the unit, and the unit in one spelling; "" if there is none, or if the words are not a unit."""
    unit = ""
    currency = next((token for token in tokens[:2] if token in _CURRENCIES), None)
    if currency is not None:
        tokens = [token for token in tokens if token not in _CURRENCIES]
        unit = currency.removeprefix("\\")
    begin = next((index for index, token in enumerate(tokens) if token.startswith(WORD) or token in _MARKS), len(tokens))
    suffix = tokens[begin:]
    if not suffix or begin == 0 or not _is_unit(suffix):
        return tokens, unit
    while begin and tokens[begin - 1] in ("{", "^"):  # 5^{\text{th}}
        begin -= 1
    value, name = tokens[:begin], _spelled(suffix)
    has_digits = any(character.isdigit() for token in value for character in token)
    if _is_angle(value) or not (has_digits or (_has_letters(value) and name.partition("^")[0] in _ALIASES)):
        return tokens, unit
    return value, name or unit


def _is_angle(tokens: list[str]) -> bool:
    """Whether a function stands before: the degrees of \\sin 30^\\circ are its argument's."""
    return any(token[1:] in FUNCTIONS for token in tokens if token.startswith("\\"))


def _has_letters(tokens: list[str]) -> bool:
    return any(token.isalpha() or token.startswith("\\") for token in tokens)


def _is_unit(suffix: list[str]) -> bool:
    """Words with exponents and slashes; `2 hours 30 minutes` is not one unit."""
    for before, token in zip(["", *suffix], suffix):
        is_exponent = token.isdigit() and (before in ("^", "-") or before == "{")
        if not (
            token.startswith(WORD) or token in _MARKS or token in _JOINTS or is_exponent or (before == "/" and token.isalpha())
        ):
            return False
    return suffix.count("{") <= suffix.count("}")


def _spelled(suffix: list[str]) -> str:
    """`square centimeters`, `cm^{2}` -> `cm^2`; `meters per second` -> `m/s`."""
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
        elif single not in _MEANINGLESS:
            parts.append(_CANONICAL.get(word, _CANONICAL.get(single, single)) + power)
            power = ""
    return "".join(parts).strip("^")


def same_quantity(left: Node, left_unit: str, right: Node, right_unit: str) -> bool:
    """Whether two values with units are the same. 50 % is 50 and 0.5; other units must be the same, or left out on one side."""
    if left_unit and right_unit and left_unit != right_unit:
        return False
    if same_value(left, right):
        return True
    hundred: Node = ("number", Fraction(100))
    if left_unit == "%" and not right_unit:
        return same_value(left, ("*", right, hundred))
    return right_unit == "%" and not left_unit and same_value(("*", left, hundred), right)
