"""Parse mathematical expressions from tokens (tokens.py) by recursive descent, not with Python's `eval`, which would
execute text of the model; and compare two expressions by value.

fraction = sum (("\\over" | "\\choose") sum)*
sum      = product (("+" | "-") product)*
product  = sign (("·" | "/" | nothing) sign)*      (nothing: 2x is 2 · x)
sign     = ("+" | "-")* power
power    = factor ("!" | "!!" | "°")* ("^" exponent)? ("!" | "!!" | "°")*
factor   = number | symbol | group | |sum| | \\frac argument argument | \\binom argument argument
         | \\sqrt[sum] argument | function

A node is a tuple: ("number", Fraction), ("symbol", name), or an operation and its operands.

Values are compared exactly if the values are rational, else to 50 digits.

Expressions with variables are compared at fixed rational points (Schwartz-Zippel). A point at which only one of the two
values is real is skipped, so that \\ln x^2 and 2\\ln x are equal although they differ at a negative x. The work is
bounded: an operation that would give a number of more than MAX_BITS bits raises ExpressionError.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import mpmath
import xxhash

from penstock.stages.rewards.math.tokens import DEGREE, FUNCTIONS, WORD, commands

Node = tuple[Any, ...]

_LEVELS = ({r"\over": "/", r"\choose": "binomial"}, {"+": "+", "-": "-"}, {r"\cdot": "*", "/": "/"})
_POSTFIX = {"!": "!", "!!": "!!", DEGREE: "degrees"}
_GROUPS = {  # opening token: closing token and the operation of the group
    "(": (")", ""), "{": ("}", ""), "[": ("]", ""), r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil"),
    "|": ("|", "abs"),
}  # fmt: skip
_COMMANDS = {rf"\{name}" for name in FUNCTIONS} | commands("floor ceil abs")
# Other commands are refused, because their operands do not commute like factors: A \subset B is not B \subset A.
_SYMBOLS = commands(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty hbar ell overline overrightarrow hat "
    "angle triangle integer basis mathbbR mathbbZ mathbbN mathbbQ mathbbC"
)
_APPLIED = {"f", "g", r"\Gamma", r"\zeta", r"\phi", r"\Phi"}  # names of unknown functions if a bracket follows
_OPENING = {"(", "{"} | _SYMBOLS | _COMMANDS | commands("frac binom sqrt lfloor lceil")


class ExpressionError(ValueError):
    """Raised if tokens are not a valid expression, or if the value of an expression is too large to compute."""


def parse_expression(tokens: list[str]) -> Node:
    """Parse all `tokens` as one expression. Raises ExpressionError."""
    parser = _Parser(tokens)
    node = parser.parse()
    if parser.peek():
        raise ExpressionError(f"unexpected token {parser.peek()!r} after the expression")
    return node


class TokenReader:
    """Reads tokens one by one; after the last token it returns empty tokens."""

    def __init__(self, tokens: Sequence[str], position: int = 0) -> None:
        self.tokens = [*tokens, "", "", ""]
        self.position = position

    def peek(self, offset: int = 0) -> str:
        return self.tokens[self.position + offset]

    def accept(self, token: str) -> bool:
        if self.tokens[self.position] != token:
            return False
        self.position += 1
        return True


class _Parser(TokenReader):
    closing = ""  # token that closes the innermost group

    def parse(self, level: int = 0) -> Node:
        """Parse the operators of _LEVELS[level] and of the higher levels, which bind more strongly."""
        if level == len(_LEVELS):
            return self.parse_sign()
        node = self.parse(level + 1)
        while True:
            if operation := _LEVELS[level].get(self.peek()):
                self.position += 1
                node = (operation, node, self.parse(level + 1))
            elif level == len(_LEVELS) - 1 and self.at_factor():
                node = self.parse_implicit_product(node)
            else:
                return node

    def at_factor(self) -> bool:
        token = self.peek()
        if token == "|":
            return self.closing != "|"
        return token[:1].isalnum() or token[:1] == "." or token in _OPENING or (token[:1] == WORD and len(token) == 2)

    def parse_implicit_product(self, node: Node) -> Node:
        """Parse a factor that follows `node` without an operator: 2x is a product; 2\\frac{1}{3} and 2 1/3 are mixed
        numbers."""
        whole = node[1] if node[0] == "-" and len(node) == 2 else node
        is_fraction, is_number = self.peek() == r"\frac", _is_number(self.peek())
        if is_number:
            is_mixed = (
                self.peek(-1).isdigit() and self.peek(1) == "/" and self.peek().isdigit() and self.peek(2).isdigit()
            )
            if not is_mixed:
                raise ExpressionError("two adjacent numbers without an operator")
            factor: Node = ("/", *(("number", Fraction(self.peek(offset))) for offset in (0, 2)))
            self.position += 3
        else:
            factor = self.parse_power()
        if is_number or (
            is_fraction and whole[0] == "number" and factor[0] == "/" and factor[1][0] == factor[2][0] == "number"
        ):
            return ("+", whole, factor) if whole is node else ("-", ("+", whole, factor))
        if _is_matrix(factor) and _is_matrix(node) and (node[0] == "^") + (factor[0] == "^"):
            raise ExpressionError("a matrix product with an inverse is not commutative")
        return ("*", node, factor)

    def parse_sign(self) -> Node:
        if self.accept("+"):
            return self.parse_sign()
        return ("-", self.parse_sign()) if self.accept("-") else self.parse_power()

    def parse_power(self) -> Node:
        node = self.parse_postfix(self.parse_factor())
        return self.parse_postfix(("^", node, self.parse_exponent())) if self.accept("^") else node

    def parse_postfix(self, node: Node) -> Node:
        while operation := _POSTFIX.get(self.peek()):
            self.position += 1
            node = (operation, node)
        return node

    def parse_exponent(self) -> Node:
        return ("-", self.parse_exponent()) if self.accept("-") else self.parse_power()

    def parse_argument(self) -> Node:
        """Parse a command's argument: a group or one token. A number gives only its first digit (\\frac12 is 1/2)."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens = [*self.tokens[: self.position], token[0], token[1:], *self.tokens[self.position + 1 :]]
        return self.parse_factor()

    def parse_factor(self) -> Node:
        token = self.peek()
        self.position += 1
        if _is_number(token):
            return self.parse_number(token)
        if token in _GROUPS:
            return self.parse_group(token)
        if token == r"\frac":
            braced = self.peek() == "{"
            top = self.parse_argument()
            return ("/", top, self.parse_factor() if braced else self.parse_argument())
        if token == r"\binom":
            return ("binomial", self.parse_argument(), self.parse_argument())
        if token == r"\sqrt":
            degree = self.parse_group("[") if self.accept("[") else ("number", Fraction(2))
            return ("root", self.parse_factor(), degree)
        return self.parse_function(token[1:]) if token in _COMMANDS else self.parse_symbol(token)

    def parse_number(self, token: str) -> Node:
        digits = ""
        while "." in token and self.accept(r"\overline"):  # 0.\overline{12} or 0.\dot1\dot2
            digits += self.read_subscript()
        if self.peek() == r"\dots" and token[-3:] == 3 * token[-1] and "." in token[:-3]:  # 0.333...
            self.position += 1
            digits = token[-1]
        value = Fraction(token + "0" if token[-1] == "." else token)
        if digits.isdigit():
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** (len(token) - token.index(".") - 1))
        elif digits or self.peek(-1) == "_":
            raise ExpressionError(f"\\overline{{{digits}}} after {token} must contain the repeating digits")
        return ("symbol", f"{token}_{self.read_subscript()}") if self.accept("_") else ("number", value)

    def parse_group(self, opening: str) -> Node:
        closing, operation = _GROUPS[opening]
        before, self.closing = self.closing, closing
        node = self.parse(1 if opening == "|" else 0)
        self.closing = before
        if not self.accept(closing):
            raise ExpressionError(f"{opening} has no closing {closing}")
        return (operation, node) if operation else node

    def parse_function(self, name: str) -> Node:
        base = self.parse_argument() if name == "log" and self.accept("_") else None
        exponent = self.parse_exponent() if self.accept("^") else None
        if exponent == ("-", ("number", Fraction(1))) and f"arc{name}" in FUNCTIONS:
            name, exponent = f"arc{name}", None
        argument = self.parse_factor() if self.peek() in ("(", "{", "[", "|") else self.parse_bare_argument()
        node: Node = (name, argument) if base is None else ("/", ("ln", argument), ("ln", base))
        return node if exponent is None else ("^", node, exponent)

    def parse_bare_argument(self) -> Node:
        """Parse a function's argument without brackets, such as 2x in sin 2x, up to an operator or another function."""
        if self.accept("-"):
            return ("-", self.parse_bare_argument())
        node = self.parse_power()
        while self.at_factor() and self.peek() not in _COMMANDS and self.peek() not in ("(", "[", "|"):
            node = self.parse_implicit_product(node)
        return node

    def parse_symbol(self, token: str) -> Node:
        """Parse a letter or a Greek letter with its primes and subscript as a symbol, and f(x) as an application."""
        name = token.removeprefix(WORD)
        if not (token in _SYMBOLS or (name.isalpha() and (name == token or len(name) == 1))):
            raise ExpressionError(f"{token!r} is not a symbol of an expression")
        if token in (r"\overline", r"\overrightarrow", r"\hat"):
            name += self.read_subscript()
        while self.accept("'"):
            name += "'"
        if self.accept("_"):
            name += "_" + self.read_subscript()
        is_function = name.rstrip("'") in _APPLIED
        if self.peek() == "^" and (is_function or name == "y"):  # f^{-1}(x), f^2(x) and y^{(3)} are not powers
            exponent = _Parser(self.tokens[self.position + 1 :])
            text = exponent.read_subscript()
            if text[:1] == "(" or (is_function and exponent.peek() == "("):
                name += f"^{text}"
                self.position += 1 + exponent.position
        is_call = name.isalpha() and name not in ("e", "i") and self.peek(2) == ")"  # u(x), but n(n + 1) is a product
        if (is_call or (is_function and (name[0] != "g" or "x" in self.tokens))) and self.accept("("):
            return ("apply", name, self.parse_group("("))
        return ("symbol", name)

    def read_subscript(self) -> str:
        """Return the subscript, one token or the tokens of a group, as text."""
        begin = end = self.position
        if self.tokens[begin] == "{":
            end = self.tokens.index("}", begin) if "}" in self.tokens[begin:] else -1
        if end < 0 or not self.tokens[end]:
            raise ExpressionError("a subscript is missing or has no closing }")
        self.position = end + 1
        return "".join(token.removeprefix(WORD) for token in self.tokens[begin : end + 1] if token not in ("{", "}"))


def _is_number(token: str) -> bool:
    return token[:1].isdecimal() or token[:1] == "."


def _is_matrix(node: Node) -> bool:
    """Return whether a node may be a matrix: a capital letter, or its inverse."""
    base = node[1] if node[0] == "^" and node[2] == ("-", ("number", Fraction(1))) else node
    return bool(base[0] == "symbol" and base[1].isupper())


# ---- comparison by value ---------------------------------------------------------------------------------------------

MAX_BITS = 20_000  # maximum bits of a rational number, and of the integer part of a power
_MAX_FACTORIAL = 1000
_PRECISION = 400  # bits of irrational values
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = mpmath.mpf(10) ** -50, mpmath.mpf(10) ** -90
_NUM_POINTS = 10  # number of test points for expressions with variables
_NUM_INTEGER_POINTS = 48  # more test points for expressions with \\lfloor, \\lceil or !!: consecutive integers
_INTEGER_NAMES = {"n", "m", "k", r"\integer"}  # variables that are integers inside \\lfloor or \\lceil
_MIN_POINTS = 3  # minimum number of points at which both expressions have a value
Value = Any  # Fraction, mpf or mpc


def same_value(left: Node, right: Node) -> bool:
    """Return whether two expressions are equal at all test points at which both are defined (at least _MIN_POINTS, if
    they have variables)."""
    if left == right:
        return True
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
    """Return the sign of the constant c with left = c * right, or 0 if there is none."""
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
    return 1 if mpmath.re(ratio) > 0 else -1


def is_less(left: Node, right: Node) -> bool:
    """Return whether two expressions without variables are real numbers with left < right."""
    names = variable_names(left) | variable_names(right)
    values = next(_values_at_test_points(left, right, names), None)
    if names or values is None or not all(map(_is_real, values)):
        return False
    return bool(mpmath.re(values[0]) < mpmath.re(values[1]))


def variable_names(node: Node) -> set[str]:
    """Return the names of the variables in an expression; the symbols e, i, \\pi and \\infty are constants."""
    if node[0] == "symbol":
        return set() if node[1] in _CONSTANTS else {node[1]}
    return set().union(*(variable_names(part) for part in node[1:] if isinstance(part, tuple)))


def _contains(node: Node, *operations: str) -> bool:
    return node[0] in operations or any(_contains(part, *operations) for part in node[1:] if isinstance(part, tuple))


def _values_at_test_points(left: Node, right: Node, names: set[str]) -> Iterator[tuple[Value, Value]]:
    """Yield (value of `left`, value of `right`) at each test point, except points at which `left` or `right` is
    undefined. `names` are the variables of both expressions; without variables there is only one point."""
    both = ("both", left, right)
    numbers = range(_NUM_POINTS if names else 1)
    if names and _contains(both, "floor", "ceil", "!!"):
        numbers = range(_NUM_POINTS if names <= _INTEGER_NAMES else 0, _NUM_POINTS + _NUM_INTEGER_POINTS)
    is_complex = names == {"z"} and _contains(both, "abs")
    with mpmath.workprec(_PRECISION):
        for number in numbers:
            point: dict[str, Value] = {name: _test_point_coordinate(name, number) for name in names}
            if is_complex:
                point["z"] = mpmath.mpc(_to_float(point["z"]), number + 1)
            try:
                yield evaluate(left, point), evaluate(right, point)
            except (ZeroDivisionError, ExpressionError):
                continue


@lru_cache(4096)
def _test_point_coordinate(variable: str, point_number: int) -> Fraction:
    """Return the value of the variable `variable` at test point `point_number`.

    The absolute value is below 1 at points 0 to 2, and up to 9 or 1000 at the other points; the value is negative at
    points 6 and 7, and has either sign at points 8 and 9. Later points are consecutive integers.
    """
    if point_number >= _NUM_POINTS:
        return Fraction(_hash(variable) % 97 + point_number)
    draw = _hash(f"{variable} {point_number}")
    size = Fraction(draw % 7919 + 1, 7927)
    if point_number >= 3:
        size = 1 + size * (999 if point_number in (5, 7, 9) else 8)
    return -size if point_number >= 6 and (point_number < 8 or draw >> 63) else size


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def evaluate(node: Node, point: dict[str, Value]) -> Value:
    """Return the value of an expression at a point (variable name -> value). Raises ExpressionError if the value is too
    large to compute, and ZeroDivisionError if the expression is undefined at this point."""
    operation, *operands = node
    if operation == "number":
        return operands[0]
    if operation == "symbol":
        return point[operands[0]] if operands[0] in point else _CONSTANTS[operands[0]]()
    if operation == "apply":
        argument = mpmath.nstr(_to_float(evaluate(operands[1], point)), 40)
        return Fraction(_hash(f"{operands[0]} {argument}") % 7919 + 1, 7927)  # depends on the function and its argument
    values = [evaluate(operand, point) for operand in operands]
    if len(values) == 2 and isinstance(values[0], Fraction) != isinstance(values[1], Fraction):
        values = list(map(_to_float, values))
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


def _is_real(value: Value) -> bool:
    if not isinstance(value, mpmath.mpc):
        return True
    return bool(abs(value.imag) <= max(_RELATIVE_TOLERANCE * abs(value.real), _ABSOLUTE_TOLERANCE))


def _is_zero(value: Value) -> bool:
    return value == 0 if isinstance(value, Fraction) else bool(abs(value) <= _ABSOLUTE_TOLERANCE)


def _is_close(a: Value, b: Value) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = _to_float(a), _to_float(b)
    if mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= max(_RELATIVE_TOLERANCE * max(abs(a), abs(b)), _ABSOLUTE_TOLERANCE))


# ---- operations ------------------------------------------------------------------------------------------------------


def _divide(a: Value, b: Value) -> Value:
    if _is_zero(b):
        raise ZeroDivisionError
    return a / b


def _power(base: Value, exponent: Value) -> Value:
    if _is_zero(base):
        if not _is_real(exponent) or mpmath.re(exponent) < 0:
            raise ZeroDivisionError
        return Fraction(int(_is_zero(exponent)))
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        exponent = exponent.numerator if abs(base) != 1 else exponent.numerator % 2
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    else:
        base, exponent = _to_float(base), _to_float(exponent)
        bits = abs(mpmath.log(abs(base), 2)) + 1
    if bits * abs(exponent) > MAX_BITS:
        raise ExpressionError(f"the power needs more than {MAX_BITS} bits")
    return base**exponent


def _root(value: Value, degree: Value) -> Value:
    """Return `value` to the power 1 / `degree`; for a negative value and an odd integer degree, the real root."""
    if mpmath.isint(degree) and degree % 2 == 1 and _is_real(value) and mpmath.re(value) < 0:
        return -_power(-value, 1 / degree)
    return _power(value, 1 / degree)


def _are_natural_numbers(*values: Value) -> bool:
    """Return whether the operands of a factorial or a binomial coefficient are natural numbers. Raises ExpressionError
    if one is too large."""
    if max(map(abs, values)) > _MAX_FACTORIAL:
        raise ExpressionError(f"the operand of a factorial is larger than {_MAX_FACTORIAL}")
    return all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in values)


def _factorial(value: Value, step: int = 1) -> Value:
    """Return value!, or value!! with the step 2."""
    if _are_natural_numbers(value):
        return Fraction(math.prod(range(value.numerator, 0, -step)))
    return mpmath.gamma(value + 1) if step == 1 else mpmath.fac2(value)


def _binomial(n: Value, k: Value) -> Value:
    if _are_natural_numbers(n, k):
        return Fraction(math.comb(n.numerator, k.numerator))
    return mpmath.binomial(n, k)


def _log(value: Value, base: int | None = None) -> Value:
    if _is_zero(value):
        raise ZeroDivisionError
    return mpmath.log(value) / (mpmath.log(base) if base else 1)


def _floor(value: Value) -> Value:
    if not _is_real(value) or abs(value) > 2**_PRECISION:
        raise ZeroDivisionError
    return Fraction(math.floor(value) if isinstance(value, Fraction) else int(mpmath.floor(mpmath.re(value))))


def _call_mpmath_function(name: str, value: Value) -> Value:
    """Call a function of mpmath by its LaTeX name."""
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
    **{name: partial(_call_mpmath_function, name) for name in FUNCTIONS},
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "^": _power,
    "root": _root,
    "!": _factorial,
    "!!": partial(_factorial, step=2),
    "binomial": _binomial,
    "abs": abs,
    "floor": _floor,
    "ceil": lambda value: -_floor(-value),
    "degrees": lambda value: _to_float(value) * mpmath.pi / 180,
    "ln": _log,
    "log": _log,
    "lg": partial(_log, base=10),
    "exp": lambda value: _power(+mpmath.e, value),
}
