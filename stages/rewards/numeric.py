"""Whether two expressions are the same: their values are, exactly where they are rational, else to 50 digits.

Expressions with letters are compared at fixed rational values of the letters (Schwartz-Zippel); where only one of the two is real, as for
\\ln x^2 and 2\\ln x at negative x, the values say nothing. Work is bounded: numbers beyond MAX_BITS are refused before they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
import xxhash

from stages.rewards.latex import FUNCTIONS, Node, NotAnExpression

MAX_BITS = 20_000  # of a rational number, and of the logarithm of a power
_MAX_FACTORIAL = 1000
_PRECISION = 400  # bits
_SAME, _ZERO = mpmath.mpf(10) ** -50, mpmath.mpf(10) ** -90
_POINTS = 10
_FEWEST_POINTS = 3  # at which both have a value
Value = Any  # Fraction, mpf or mpc


def same_value(left: Node, right: Node) -> bool:
    """Whether two expressions have the same value wherever both have one; not if one is too large to compute."""
    names = symbols(left) | symbols(right)
    num_points = 0
    for a, b in _values(left, right, names):
        if names and _is_real(a) != _is_real(b):
            continue
        if not _close(a, b):
            return False
        num_points += 1
    return num_points >= (_FEWEST_POINTS if names else 1)


def constant_ratio(left: Node, right: Node) -> int:
    """Sign of the constant c with left = c * right; 0 if there is none."""
    ratio, num_points = None, 0
    for a, b in _values(left, right, symbols(left) | symbols(right)):
        if _is_zero(a) and _is_zero(b):
            continue
        if _is_zero(a) or _is_zero(b) or not (_is_real(a) and _is_real(b)):
            return 0
        now = a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else _inexact(a) / _inexact(b)
        if ratio is not None and not _close(ratio, now):
            return 0
        ratio, num_points = now, num_points + 1
    if ratio is None or num_points < _FEWEST_POINTS:
        return 0
    return 1 if mpmath.re(_inexact(ratio)) > 0 else -1


def symbols(node: Node) -> set[str]:
    """Names of the letters in an expression, without e and i."""
    if node[0] == "symbol":
        return set() if node[1] in _CONSTANTS else {node[1]}
    return set().union(*(symbols(part) for part in node[1:] if isinstance(part, tuple)))


def _values(left: Node, right: Node, names: set[str]) -> Iterator[tuple[Value, Value]]:
    """Values of both at up to _POINTS points, where they have some."""
    for number in range(_POINTS if names else 1):
        point = {name: _coordinate(name, number) for name in names}
        with mpmath.workprec(_PRECISION):
            try:
                yield evaluate(left, point), evaluate(right, point)
            except (ZeroDivisionError, NotAnExpression):
                continue


def _coordinate(name: str, number: int) -> Fraction:
    """Value of a letter at a point: below 1 at points 0 to 2, up to 9, then up to 1000; negative at 6 and 7, either at 8 and 9."""
    draw = xxhash.xxh3_64_intdigest(f"{name} {number}".encode())
    size = Fraction(draw % 7919 + 1, 7927)
    if number >= 3:
        size = 1 + size * (999 if number in (5, 7, 9) else 8)
    negative = number >= 6 and (number < 8 or draw >> 63)
    return -size if negative else size


def evaluate(node: Node, point: dict[str, Fraction]) -> Value:
    """Value of an expression. Raises NotAnExpression if it is too large or not known, ZeroDivisionError where it has none."""
    operation, *operands = node
    if operation == "number":
        return operands[0]
    if operation == "symbol":
        name = operands[0]
        return point[name] if name in point else _CONSTANTS[name]()
    values = [evaluate(operand, point) for operand in operands]
    if operation == "-" and len(values) == 1:
        return -values[0]
    try:
        value = _OPERATIONS[operation](*values)
    except (ValueError, OverflowError, TypeError) as error:
        raise ZeroDivisionError(str(error)) from None
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotAnExpression("too large")
    if not isinstance(value, Fraction) and mpmath.isnan(value):
        raise ZeroDivisionError
    return value


def _inexact(value: Value) -> Value:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _pair(a: Value, b: Value) -> tuple[Value, Value]:
    """Both as Fractions, or both inexact."""
    exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return (a, b) if exact else (_inexact(a), _inexact(b))


def _is_real(value: Value) -> bool:
    return not isinstance(value, mpmath.mpc) or abs(value.imag) <= max(_SAME * abs(value.real), _ZERO)


def _is_zero(value: Value) -> bool:
    return value == 0 if isinstance(value, Fraction) else bool(abs(value) <= _ZERO)


def _close(a: Value, b: Value) -> bool:
    a, b = _pair(a, b)
    if isinstance(a, Fraction) or mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= max(_SAME * max(abs(a), abs(b)), _ZERO))


# ---- operations --------------------------------------------------------------------------------------------------------------


def _add(a: Value, b: Value) -> Value:
    a, b = _pair(a, b)
    return a + b


def _subtract(a: Value, b: Value) -> Value:
    a, b = _pair(a, b)
    return a - b


def _multiply(a: Value, b: Value) -> Value:
    a, b = _pair(a, b)
    return a * b


def _divide(a: Value, b: Value) -> Value:
    a, b = _pair(a, b)
    if _is_zero(b):
        raise ZeroDivisionError
    return a / b


def _power(base: Value, exponent: Value) -> Value:
    if _is_zero(base):
        if not _is_real(exponent) or mpmath.re(_inexact(exponent)) < 0:
            raise ZeroDivisionError
        return Fraction(int(_is_zero(exponent)))
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) if abs(base) != 1 else 0
        if bits * abs(exponent.numerator) > MAX_BITS:
            raise NotAnExpression("too large")
        return base ** (exponent.numerator if bits else exponent.numerator % 2)
    base, exponent = _inexact(base), _inexact(exponent)
    if abs(exponent) * (abs(mpmath.log(abs(base), 2)) + 1) > MAX_BITS:
        raise NotAnExpression("too large")
    return base**exponent


def _root(value: Value, degree: Value) -> Value:
    """The real root of a negative number, if its degree is odd."""
    if _is_zero(degree):
        raise ZeroDivisionError
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree.numerator % 2 == 1
    if is_odd and _is_real(value) and mpmath.re(_inexact(value)) < 0:
        return -_power(-value, 1 / degree)
    return _power(value, _divide(Fraction(1), degree))


def _exp(value: Value) -> Value:
    return _power(+mpmath.e, value)


def _factorial(value: Value) -> Value:
    if abs(value) > _MAX_FACTORIAL:
        raise NotAnExpression("too large")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return Fraction(math.factorial(value.numerator))
    return mpmath.gamma(_inexact(value) + 1)


def _binomial(n: Value, k: Value) -> Value:
    if max(abs(n), abs(k)) > _MAX_FACTORIAL:
        raise NotAnExpression("too large")
    if all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (n, k)):
        return Fraction(math.comb(n.numerator, k.numerator))
    return mpmath.binomial(_inexact(n), _inexact(k))


def _log(value: Value) -> Value:
    if _is_zero(value):
        raise ZeroDivisionError
    return mpmath.log(_inexact(value))


def _floor(value: Value) -> Value:
    if not _is_real(value) or abs(value) > 2**_PRECISION:
        raise ZeroDivisionError
    return Fraction(math.floor(value) if isinstance(value, Fraction) else int(mpmath.floor(mpmath.re(value))))


def _ceiling(value: Value) -> Value:
    return -_floor(-value)


def _degrees(value: Value) -> Value:
    return _inexact(value) * mpmath.pi / 180


def _function(name: str, value: Value) -> Value:
    """A function of mpmath by its name here."""
    value = _inexact(value)
    if abs(value) > MAX_BITS:
        raise NotAnExpression("too large")
    return getattr(mpmath, name.replace("arc", "a"))(value)


_CONSTANTS: dict[str, Callable[[], Value]] = {
    r"\pi": mpmath.mp.pi.__pos__, "e": mpmath.mp.e.__pos__, "i": lambda: mpmath.mpc(0, 1), r"\infty": lambda: mpmath.inf,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": _add, "-": _subtract, "*": _multiply, "/": _divide, "^": _power, "root": _root, "!": _factorial, "binomial": _binomial, "abs": abs, "floor": _floor, "ceil": _ceiling,
    "degrees": _degrees, "ln": _log, "log": _log, "exp": _exp,
    **{name: partial(_function, name) for name in FUNCTIONS if name not in ("ln", "log", "exp")},
}  # fmt: skip
