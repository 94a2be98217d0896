"""Compare two expressions by value: exactly if the values are rational, else to 50 digits.

Expressions with variables are compared at fixed rational points (Schwartz-Zippel). A point at which only one of the two
values is real is skipped, so that \\ln x^2 and 2\\ln x are equal although they differ at a negative x. The work is
bounded: an operation that would give a number of more than MAX_BITS bits raises ExpressionError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath
import xxhash

from penstock.stages.rewards.math.latex import FUNCTIONS, ExpressionError, Node

MAX_BITS = 20_000  # maximum bits of a rational number, and of the integer part of a power
_MAX_FACTORIAL = 1000
_PRECISION = 400  # bits of irrational values
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = mpmath.mpf(10) ** -50, mpmath.mpf(10) ** -90
_NUM_POINTS = 10  # number of test points for expressions with variables
_NUM_INTEGER_POINTS = 48  # more test points for expressions with \\lfloor or \\lceil: consecutive integers
_INTEGER_NAMES = {"n", "m", "k", r"\integer"}  # variables that are integers inside \\lfloor or \\lceil
_MIN_POINTS = 3  # minimum number of points at which both expressions have a value
Value = Any  # Fraction, mpf or mpc


def same_value(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal at all test points at which both are defined (at least _MIN_POINTS, if
    they have variables)."""
    names = variable_names(left) | variable_names(right)
    num_points = 0
    for a, b in _values_at_test_points(left, right, names):
        if names and _is_real(a) != _is_real(b):
            continue
        if not _is_close(a, b):
            return False
        num_points += 1
    return num_points >= (_MIN_POINTS if names else 1)


def sign_of_constant_ratio(left: Node, right: Node) -> int:
    """Return the sign of the constant c for which left = c * right, or 0 if there is no such constant."""
    ratio, num_points = None, 0
    for a, b in _values_at_test_points(left, right, variable_names(left) | variable_names(right)):
        if _is_zero(a) and _is_zero(b):
            continue
        if _is_zero(a) or _is_zero(b) or not (_is_real(a) and _is_real(b)):
            return 0
        current = a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else _to_float(a) / _to_float(b)
        if ratio is not None and not _is_close(ratio, current):
            return 0
        ratio, num_points = current, num_points + 1
    if ratio is None or num_points < _MIN_POINTS:
        return 0
    return 1 if mpmath.re(_to_float(ratio)) > 0 else -1


def is_less(left: Node, right: Node) -> bool:
    """Return whether two expressions without variables are real numbers with left < right."""
    values = (
        next(_values_at_test_points(left, right, set()), None)
        if not variable_names(left) | variable_names(right)
        else None
    )
    return (
        values is not None
        and all(map(_is_real, values))
        and mpmath.re(_to_float(values[0])) < mpmath.re(_to_float(values[1]))
    )


def is_integer(node: Node) -> bool:
    """Return whether an expression is an integer: exactly, or at all test points if it has variables."""
    return same_value(node, ("floor", node))


def variable_names(node: Node) -> set[str]:
    """Return the names of the variables in an expression; the symbols e, i, \\pi and \\infty are constants."""
    if node[0] == "symbol":
        return set() if node[1] in _CONSTANTS else {node[1]}
    return set().union(*(variable_names(part) for part in node[1:] if isinstance(part, tuple)))


def _values_at_test_points(left: Node, right: Node, names: set[str]) -> Iterator[tuple[Value, Value]]:
    """Yield (value of `left`, value of `right`) at up to _NUM_POINTS points, skipping points where one is undefined."""
    for number in _test_point_numbers(left, right, names):
        point = {name: _test_point_coordinate(name, number) for name in names}
        with mpmath.workprec(_PRECISION):
            try:
                yield evaluate(left, point), evaluate(right, point)
            except (ZeroDivisionError, ExpressionError):
                continue


def _test_point_numbers(left: Node, right: Node, names: set[str]) -> range:
    if not names or not (_has_rounding(left) or _has_rounding(right)):
        return range(_NUM_POINTS if names else 1)
    return range(_NUM_POINTS if names <= _INTEGER_NAMES else 0, _NUM_POINTS + _NUM_INTEGER_POINTS)


def _has_rounding(node: Node) -> bool:
    return node[0] in ("floor", "ceil") or any(_has_rounding(part) for part in node[1:] if isinstance(part, tuple))


def _test_point_coordinate(variable: str, point_number: int) -> Fraction:
    """Return the value of the variable `variable` at test point `point_number`.

    The absolute value is below 1 at points 0 to 2, and up to 9 or 1000 at the other points; the value is negative at
    points 6 and 7, and has either sign at points 8 and 9. Later points are consecutive integers.
    """
    if point_number >= _NUM_POINTS:
        return Fraction(xxhash.xxh3_64_intdigest(variable.encode("utf-8", "surrogatepass")) % 97 + point_number)
    draw = xxhash.xxh3_64_intdigest(f"{variable} {point_number}".encode("utf-8", "surrogatepass"))
    size = Fraction(draw % 7919 + 1, 7927)
    if point_number >= 3:
        size = 1 + size * (999 if point_number in (5, 7, 9) else 8)
    is_negative = point_number >= 6 and (point_number < 8 or draw >> 63)
    return -size if is_negative else size


def evaluate(node: Node, point: dict[str, Fraction]) -> Value:
    """Return the value of an expression at a point (variable name -> value).

    Raises:
        ExpressionError: the value is too large to compute.
        ZeroDivisionError: the expression is undefined at this point.
    """
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
        raise ExpressionError(f"the result of {operation!r} needs more than {MAX_BITS} bits")
    if not isinstance(value, Fraction) and mpmath.isnan(value):
        raise ZeroDivisionError
    return value


def _to_float(value: Value) -> Value:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _to_common_type(a: Value, b: Value) -> tuple[Value, Value]:
    """Return `a` and `b` as Fractions if both are rational, else both as floats of mpmath."""
    is_exact = isinstance(a, Fraction) and isinstance(b, Fraction)
    return (a, b) if is_exact else (_to_float(a), _to_float(b))


def _is_real(value: Value) -> bool:
    return not isinstance(value, mpmath.mpc) or abs(value.imag) <= max(
        _RELATIVE_TOLERANCE * abs(value.real), _ABSOLUTE_TOLERANCE
    )


def _is_zero(value: Value) -> bool:
    return value == 0 if isinstance(value, Fraction) else bool(abs(value) <= _ABSOLUTE_TOLERANCE)


def _is_close(a: Value, b: Value) -> bool:
    a, b = _to_common_type(a, b)
    if isinstance(a, Fraction) or mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= max(_RELATIVE_TOLERANCE * max(abs(a), abs(b)), _ABSOLUTE_TOLERANCE))


# ---- operations ------------------------------------------------------------------------------------------------------


def _apply_in_common_type(function: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    return function(*_to_common_type(a, b))


def _divide(a: Value, b: Value) -> Value:
    a, b = _to_common_type(a, b)
    if _is_zero(b):
        raise ZeroDivisionError
    return a / b


def power(base: Value, exponent: Value) -> Value:
    if _is_zero(base):
        if not _is_real(exponent) or mpmath.re(_to_float(exponent)) < 0:
            raise ZeroDivisionError
        return Fraction(int(_is_zero(exponent)))
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) if abs(base) != 1 else 0
        if bits * abs(exponent.numerator) > MAX_BITS:
            raise ExpressionError(f"the power needs more than {MAX_BITS} bits")
        return base ** (exponent.numerator if bits else exponent.numerator % 2)
    base, exponent = _to_float(base), _to_float(exponent)
    if abs(exponent) * (abs(mpmath.log(abs(base), 2)) + 1) > MAX_BITS:
        raise ExpressionError(f"the power needs more than {MAX_BITS} bits")
    return base**exponent


def root(value: Value, degree: Value) -> Value:
    """Return `value` to the power 1 / `degree`; for a negative value and an odd integer degree, the real root."""
    if _is_zero(degree):
        raise ZeroDivisionError
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree.numerator % 2 == 1
    if is_odd and _is_real(value) and mpmath.re(_to_float(value)) < 0:
        return -power(-value, 1 / degree)
    return power(value, _divide(Fraction(1), degree))


def factorial(value: Value) -> Value:
    if abs(value) > _MAX_FACTORIAL:
        raise ExpressionError(f"the operand of a factorial is larger than {_MAX_FACTORIAL}")
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        return Fraction(math.factorial(value.numerator))
    return mpmath.gamma(_to_float(value) + 1)


def binomial(n: Value, k: Value) -> Value:
    if max(abs(n), abs(k)) > _MAX_FACTORIAL:
        raise ExpressionError(f"an operand of a binomial coefficient is larger than {_MAX_FACTORIAL}")
    if all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in (n, k)):
        return Fraction(math.comb(n.numerator, k.numerator))
    return mpmath.binomial(_to_float(n), _to_float(k))


def log(value: Value) -> Value:
    if _is_zero(value):
        raise ZeroDivisionError
    return mpmath.log(_to_float(value))


def floor(value: Value) -> Value:
    if not _is_real(value) or abs(value) > 2**_PRECISION:
        raise ZeroDivisionError
    return Fraction(math.floor(value) if isinstance(value, Fraction) else int(mpmath.floor(mpmath.re(value))))


def call_mpmath_function(name: str, value: Value) -> Value:
    """Call a function of mpmath by its LaTeX name."""
    value = _to_float(value)
    if abs(value) > MAX_BITS:
        raise ExpressionError(f"the argument of {name} is larger than {MAX_BITS}")
    return getattr(mpmath, name.replace("arc", "a"))(value)


_CONSTANTS: dict[str, Callable[[], Value]] = {
    r"\pi": mpmath.mp.pi.__pos__,
    "e": mpmath.mp.e.__pos__,
    "i": lambda: mpmath.mpc(0, 1),
    r"\infty": lambda: mpmath.inf,
}
_OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": partial(_apply_in_common_type, operator.add),
    "-": partial(_apply_in_common_type, operator.sub),
    "*": partial(_apply_in_common_type, operator.mul),
    "/": _divide,
    "^": power,
    "root": root,
    "!": factorial,
    "binomial": binomial,
    "abs": abs,
    "floor": floor,
    "ceil": lambda value: -floor(-value),
    "degrees": lambda value: _to_float(value) * mpmath.pi / 180,
    "ln": log,
    "log": log,
    "exp": lambda value: power(+mpmath.e, value),
    **{name: partial(call_mpmath_function, name) for name in FUNCTIONS if name not in ("ln", "log", "exp")},
}
