"""Parse mathematical expressions from tokens (tokens.py) by recursive descent, not with Python's `eval`, which would
execute text of the model.

fraction = sum (("\\over" | "\\choose") sum)*
sum      = product (("+" | "-") product)*
product  = sign (("·" | "/" | nothing) sign)*      (nothing: 2x is 2 · x)
sign     = ("+" | "-")* power
power    = factor ("!" | "!!" | "°")* ("^" exponent)? ("!" | "!!" | "°")*
factor   = number | symbol | group | |sum| | \\frac argument argument | \\binom argument argument
         | \\sqrt[sum] argument | function

A node is a tuple: ("number", Fraction), ("symbol", name), or an operation and its operands. numeric.py evaluates nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from penstock.stages.rewards.math.tokens import DEGREE, FUNCTIONS, WORD, commands

Node = tuple[Any, ...]

_LEVELS = ({r"\over": "/", r"\choose": "binomial"}, {"+": "+", "-": "-"}, {r"\cdot": "*", "/": "/"})
_POSTFIX = {"!": "!", "!!": "!!", DEGREE: "degrees"}
_GROUPS = {  # opening token: closing token and the operation of the group
    "(": (")", ""), "{": ("}", ""), "[": ("]", ""), r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil"),
    "|": ("|", "abs"),
}  # fmt: skip
_COMMANDS = {rf"\{name}" for name in FUNCTIONS} | commands("floor ceil abs")
# Other commands have a meaning that is not a product: A \subset B is not B \subset A.
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
    """Read tokens one by one; behind the end are empty tokens."""

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
        """Parse the operators of _LEVELS[level] and of the higher levels."""
        if level == len(_LEVELS):
            return self.parse_sign()
        node = self.parse(level + 1)
        while True:
            if operation := _LEVELS[level].get(self.tokens[self.position]):
                self.position += 1
                node = (operation, node, self.parse(level + 1))
            elif level == len(_LEVELS) - 1 and self.at_factor():
                node = self.parse_implicit_product(node)
            else:
                return node

    def at_factor(self) -> bool:
        token = self.tokens[self.position]
        if token == "|":
            return self.closing != "|"
        return token[:1].isalnum() or token[:1] == "." or token in _OPENING or (token[:1] == WORD and len(token) == 2)

    def parse_implicit_product(self, node: Node) -> Node:
        """Parse a factor that follows `node` without an operator: 2x is a product; 2\\frac{1}{3} and 2 1/3 are mixed
        numbers."""
        whole = node[1] if node[0] == "-" and len(node) == 2 else node
        is_fraction, is_number = self.tokens[self.position] == r"\frac", _is_number(self.tokens[self.position])
        if is_number:
            if not (
                self.peek(-1).isdigit()
                and self.peek(1) == "/"
                and self.tokens[self.position].isdigit()
                and self.peek(2).isdigit()
            ):
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
            raise ExpressionError("a product with an inverse matrix does not commute")
        return ("*", node, factor)

    def parse_sign(self) -> Node:
        if self.accept("+"):
            return self.parse_sign()
        return ("-", self.parse_sign()) if self.accept("-") else self.parse_power()

    def parse_power(self) -> Node:
        node = self.parse_postfix(self.parse_factor())
        return self.parse_postfix(("^", node, self.parse_exponent())) if self.accept("^") else node

    def parse_postfix(self, node: Node) -> Node:
        while operation := _POSTFIX.get(self.tokens[self.position]):
            self.position += 1
            node = (operation, node)
        return node

    def parse_exponent(self) -> Node:
        return ("-", self.parse_exponent()) if self.accept("-") else self.parse_power()

    def parse_argument(self) -> Node:
        """Parse a command's argument: a group or one token; of a number, only the first digit (\\frac12 is 1/2)."""
        token = self.tokens[self.position]
        if token.isdigit() and len(token) > 1:
            self.tokens = [*self.tokens[: self.position], token[0], token[1:], *self.tokens[self.position + 1 :]]
        return self.parse_factor()

    def parse_factor(self) -> Node:
        token = self.tokens[self.position]
        self.position += 1
        if _is_number(token):
            return self.parse_number(token)
        if token in _GROUPS:
            return self.parse_group(token)
        if token == r"\frac":
            braced = self.tokens[self.position] == "{"
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
        if self.tokens[self.position] == r"\dots" and token[-3:] == 3 * token[-1] and "." in token[:-3]:  # 0.333...
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
        argument = (
            self.parse_factor() if self.tokens[self.position] in ("(", "{", "[", "|") else self.parse_bare_argument()
        )
        node: Node = (name, argument) if base is None else ("/", ("ln", argument), ("ln", base))
        return node if exponent is None else ("^", node, exponent)

    def parse_bare_argument(self) -> Node:
        """Parse a function's argument without brackets, such as 2x in sin 2x, up to an operator or another function."""
        if self.accept("-"):
            return ("-", self.parse_bare_argument())
        node = self.parse_power()
        while (
            self.at_factor()
            and self.tokens[self.position] not in _COMMANDS
            and self.tokens[self.position] not in ("(", "[", "|")
        ):
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
        begin = self.position
        end = (
            begin if self.tokens[begin] != "{" else self.tokens.index("}", begin) if "}" in self.tokens[begin:] else -1
        )
        if end < 0 or not self.tokens[end]:
            raise ExpressionError("a subscript is missing or has no closing }")
        self.position = end + 1
        return "".join(token.removeprefix(WORD) for token in self.tokens[begin : end + 1] if token not in ("{", "}"))


def _is_number(token: str) -> bool:
    return token[:1].isdecimal() or token[:1] == "."


def _is_matrix(node: Node) -> bool:
    """Return whether a node is a capital letter or its inverse."""
    base = node[1] if node[0] == "^" and node[2] == ("-", ("number", Fraction(1))) else node
    return bool(base[0] == "symbol" and base[1].isupper())
