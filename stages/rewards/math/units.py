"""Read and compare quantities: `12\\,\\text{cm}` is the number 12 with the unit cm.

A unit is a size times powers of base units and of unknown words: km/h is 1000/3600 m s^-1, and the unit of
`5 red balls` is red ball. A value without a unit counts as equal to the same value with any unit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from penstock.stages.rewards.math.expressions import Node, TokenReader, same_value
from penstock.stages.rewards.math.tokens import DEGREE, FUNCTIONS, WORD

_UNITS = (  # "names = size base units"
    "m meter metre = 1 m; in inch inche = 127/5000 m; ft foot feet = 381/1250 m; yd yard = 1143/1250 m; "
    "mi mile = 201168/125 m; g gram gm = 1 g; lb pound = 45359237/100000 g; oz ounce = 45359237/1600000 g; "
    "s second sec = 1 s; min minute = 60 s; h hour hr = 3600 s; day = 86400 s; week = 604800 s; "
    "month = 1 month; year yr = 12 month; Nm = 1000 g m2 s-2; Wh = 3600000 g m2 s-2; "
    "L l liter litre = 1/1000 m3; cc = 1/1000000 m3; N newton = 1000 g m s-2; J joule = 1000 g m2 s-2; "
    "W watt = 1000 g m2 s-3; Pa pascal = 1000 g m-1 s-2; Hz hertz = 1 s-1; A ampere amp = 1 A; C coulomb = 1 A s; "
    r"V volt = 1000 g m2 s-3 A-1; \Omega ohm = 1000 g m2 s-3 A-2; F farad = 1/1000 g-1 m-2 s4 A2; K kelvin = 1 K; "
    "mol mole = 1 mol; eV electronvolt = 1 eV; mph = 1397/3125 m s-1; $ dollar usd = 1 $; cent ¢ = 1/100 $; "
    "€ euro eur = 1 €; £ gbp = 1 £; ₹ rupee inr = 1 ₹; ¥ yen jpy = 1 ¥; % percent percentage pct = 1 %; "
    "° degree deg = 1 °; ' = 1/60 °; rad radian = 1 rad; celsius = 1 celsius; fahrenheit = 1 fahrenheit; "
    "unit th st nd rd of a an the = 1"
)
_PREFIXES = {
    "k": 3, "M": 6, "G": 9, "m": -3, "μ": -6, "n": -9, "p": -12, "c": -2, "d": -1, "kilo": 3, "mega": 6, "giga": 9,
    "milli": -3, "micro": -6, "nano": -9, "pico": -12, "centi": -2, "deci": -1,
}  # fmt: skip
_WITH_PREFIX = (  # symbols and words that may have a prefix
    r"m g s L l N J Wh W Pa Hz A C V \Omega F eV mol meter metre gram liter litre second newton joule watt pascal "
    "hertz ampere coulomb volt ohm farad electronvolt"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TEMPERATURES = {"c": "celsius", "f": "fahrenheit", "celsius": "celsius", "fahrenheit": "fahrenheit"}
_CURRENCIES = ("$", "€", "£", "₹", "¥", "usd", "eur", "gbp", "inr", "jpy")
_UNIT_SYMBOLS = (DEGREE, "%", "¢", r"\$", "€", "£", "₹", "¥")
_CLOSING = {"{": "}", "(": ")"}


@dataclass(frozen=True)
class Unit:
    """A unit: its size in base units, and the powers of its base units and unknown words."""

    size: Fraction = Fraction(1)
    powers: dict[str, int] = field(default_factory=dict)

    def times(self, other: Unit, power: int = 1) -> Unit:
        """Return the product of this unit and `other` to the power `power`."""
        powers = Counter(self.powers)
        for name, exponent in other.powers.items():
            powers[name] += power * exponent
        return Unit(self.size * other.size**power, {name: exponent for name, exponent in powers.items() if exponent})


def _read_table() -> dict[str, Unit]:
    table: dict[str, Unit] = {}
    for row in _UNITS.split("; "):
        names, _, definition = row.partition(" = ")
        size, *parts = definition.split()
        powers = {name: int(power or 1) for name, power in re.findall(r"([^\s\d-]+)(-?\d*)", " ".join(parts))}
        table |= dict.fromkeys(names.split(), Unit(Fraction(size), powers))
    return table


_TABLE = _read_table()
_EXPONENT = re.compile(r"\^(?:(-?\d)(?!\d)|\{(-?\d)\})")
_BASE_UNITS = {name for unit in _TABLE.values() for name in unit.powers}


@cache
def known_unit(name: str) -> Unit | None:
    """Return the unit with a symbol or word such as km, kilometers or hours, or None. Symbols are case-sensitive."""
    for spelling in (name, name.lower(), name.lower().removesuffix("s")) if len(name) > 2 else (name,):
        if spelling in _TABLE:
            return _TABLE[spelling]
        for symbol in _WITH_PREFIX.split():
            prefix = spelling.removesuffix(symbol)
            if prefix in _PREFIXES and spelling.endswith(symbol):
                return Unit(Fraction(10) ** _PREFIXES[prefix]).times(_TABLE[symbol])
    return None


class _UnitParser(TokenReader):
    """Parse unit = power (("/" | "per" | "·" | nothing) power)*, where a power is a name, a group or a fraction, with
    an exponent. With `letters`, known symbols need not be inside \\text: the m in `5 m`."""

    def __init__(self, tokens: Sequence[str], position: int, letters: bool) -> None:
        super().__init__(tokens, position)
        self.letters = letters

    def parse_unit(self) -> Unit | None:
        """Return the unit at the current position, or None."""
        unit = None
        power = 1
        while True:
            before = self.position
            if self.accept("/") or self.accept(WORD + "per"):
                power = -1
            elif self.accept(r"\cdot") or self.accept("-") or self.accept("."):
                continue
            if (factor := self.parse_power()) is None:
                self.position = before
                return unit
            unit, power = (unit or Unit()).times(factor, power), 1

    def parse_power(self) -> Unit | None:
        power = 1
        while (word := self.peek().removeprefix(WORD).lower()) in ("square", "sq", "cubic", "cu"):
            self.position += 1
            power, self.letters = _POWERS[word], True
        if (unit := self.parse_name()) is None:
            return None
        if (word := self.peek().removeprefix(WORD)) in ("squared", "cubed"):
            self.position += 1
            power = _POWERS[word]
        elif exponent := _EXPONENT.match("".join(self.tokens[self.position : self.position + 5])):
            power = int(exponent[1] or exponent[2])
            self.position += 2 + ("-" in exponent[0]) + 2 * ("{" in exponent[0])
        return Unit().times(unit, power)

    def parse_name(self) -> Unit | None:
        token, before = self.peek(), self.peek(-1)
        name = "$" if token == r"\$" else token.removeprefix(WORD)
        self.position += 1
        if token == r"\frac":
            top, bottom = self.parse_name(), self.parse_name()
            return top.times(bottom, -1) if top and bottom else None
        if token in _CLOSING:
            unit = self.parse_unit()
            return unit if unit and self.accept(_CLOSING[token]) else None
        following = self.peek().removeprefix(WORD)
        if (token == DEGREE or name.lower() in ("degree", "degrees")) and following.lower() in _TEMPERATURES:
            self.position += 1
            return _TABLE[_TEMPERATURES[following.lower()]]
        if token == r"\mu" or (following == r"\Omega" and name in _PREFIXES):
            self.position += 1
            return known_unit(("μ" if token == r"\mu" else name) + following)
        if token == "a" and before == f"{WORD}of":
            return Unit()
        if token.startswith(WORD):
            return known_unit(name) or (Unit(powers={name.lower().removesuffix("s"): 1}) if len(name) > 1 else None)
        is_symbol = token in _UNIT_SYMBOLS or (token == "'" and (before == DEGREE or before[:1].isdigit()))
        is_letter = (self.letters or before[:1] in ("/", WORD)) and (token.isalpha() or token == r"\Omega")
        return known_unit(name) if is_symbol or is_letter else None


def split_unit(tokens: Sequence[str], letters: bool = False) -> tuple[list[str], Unit | None]:
    """Split an answer into the tokens of its value and its unit (None without a unit). With `letters`, a known symbol
    may also be a letter outside \\text."""
    tokens = list(tokens)
    unit = None
    for index, token in enumerate(tokens[:2]):
        if (name := token.lstrip(WORD + "\\")).lower() in _CURRENCIES and len(tokens) > 1:
            unit = known_unit(name)
            del tokens[index]
            break
    begin = _begin_of_unit(tokens, letters)
    parser = _UnitParser(tokens, begin + (tokens[begin : begin + 1] == ["^"]), letters)
    suffix = parser.parse_unit()
    if suffix is None or parser.position < len(tokens) or not _can_have_unit(tokens[:begin], suffix):
        return tokens, unit
    return tokens[:begin], suffix if unit is None or "$" in suffix.powers else suffix.times(unit)


def join_compound(tokens: Sequence[str]) -> list[str] | None:
    """Return `2 hours 30 minutes` as the tokens of (2 + 30 · (1/60)) hours, or None if the tokens are not such a
    quantity."""
    if not any(token.startswith(WORD) or token in _UNIT_SYMBOLS or token == "'" for token in tokens):
        return None
    begin = _begin_of_unit(tokens, True)
    parser = _UnitParser(tokens, begin, True)
    unit = parser.parse_unit()
    end = parser.position
    if unit is None or not unit.powers or not _can_have_unit(tokens[:begin], unit):
        return None
    rest = list(tokens[end + (tokens[end : end + 1] in ((",",), (r"\land",))) :])
    rest = join_compound(rest) or rest
    value, small = split_unit(rest, letters=True)
    if small is None or small.powers != unit.powers or small.size >= unit.size or not rest[0][0].isdigit():
        return None
    ratio = small.size / unit.size
    factor = [r"\cdot", "(", f"{ratio.numerator}", "/", f"{ratio.denominator}", ")"]
    return ["(", *tokens[:begin], "+", "(", *value, ")", *factor, ")", *tokens[begin:end]]


def _begin_of_unit(tokens: Sequence[str], letters: bool) -> int:
    """Return the index of the first token that can begin a unit after a value, or the number of tokens. `letters`: as
    in `split_unit`."""
    for begin, token in enumerate(tokens):
        before = tokens[begin - 1] if begin else ""
        is_minute = token == "'" and (before == DEGREE or before[:1].isdigit())
        is_letter = letters and (token.isalpha() or token in (r"\Omega", r"\mu"))
        follows_value = before[:1].isdigit() or before in ("}", ")", r"\frac", "{", r"\cdot")
        if token.startswith(WORD) or token in _UNIT_SYMBOLS or is_minute or (is_letter and follows_value):
            while begin and tokens[begin - 1] in ("{", "^", r"\frac", r"\cdot", "(", r"\mu", "/"):
                begin -= 1
            return begin if begin and tokens[begin - 1] != "_" else len(tokens)
    return len(tokens)


def _can_have_unit(value: Sequence[str], unit: Unit) -> bool:
    """Return whether a value can have a unit: 5 apples, x meters, but not x apples. In \\sin 30^\\circ, the degrees
    belong to the argument of the function."""
    if value[-1:] in (["+"], ["-"]) or any(token[1:] in FUNCTIONS for token in value if token.startswith("\\")):
        return False
    has_digits = any(character.isdigit() for token in value for character in token)
    has_letters = any(token.isalpha() or token.startswith("\\") for token in value)
    return has_digits or (has_letters and set(unit.powers) <= _BASE_UNITS)


def same_quantity(left: Node, left_unit: Unit | None, right: Node, right_unit: Unit | None) -> bool:
    """Return whether two values with units are equal.

    The units must measure the same, or one value must have no unit; 50 % is equal to 50 and to 0.5, and 30° to 30 and
    to pi/6.
    """
    plain = _plain(left, left_unit), _plain(right, right_unit)
    if not (left_unit and right_unit and left_unit.powers and right_unit.powers):
        return any(same_value(*nodes) for nodes in dict.fromkeys(((left, right), (plain[0], right), (left, plain[1]))))
    if left_unit.powers == right_unit.powers:
        return same_value(_times(left, left_unit.size / right_unit.size), right)
    if _TABLE["£"] in (left_unit, right_unit) and _TABLE["pound"] in (left_unit, right_unit):
        return same_value(left, right)
    return {*left_unit.powers, *right_unit.powers} == {"°", "rad"} and same_value(*plain)


def _times(node: Node, factor: Fraction) -> Node:
    return node if factor == 1 else ("*", node, ("number", factor))


def _plain(node: Node, unit: Unit | None) -> Node:
    """Convert a quantity in percent or degrees to a plain number; return any other value unchanged."""
    if unit and unit.powers == {"%": 1}:
        return _times(node, Fraction(1, 100))
    return ("degrees", _times(node, unit.size)) if unit and unit.powers == {"°": 1} else node
