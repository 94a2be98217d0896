"""Recursive-descent parser of mathematical expressions from tokens (tokens.py). `eval` would run the model's text.

sum      = product (("+" | "-") product)*
product  = sign (("·" | "/" | nothing) sign)*
sign     = ("+" | "-")* power
power    = factor ("!" | "°")* ("^" argument)? "!"*
factor   = number | symbol | group | |sum| | \\frac argument argument | \\binom argument argument
         | \\sqrt[sum] argument | function

A node is a tuple: ("number", Fraction), ("symbol", name), or an operation and its operands. numeric.py evaluates nodes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from penstock.stages.rewards.math.tokens import DEGREE, WORD

Node = tuple[Any, ...]

FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp",
)  # fmt: skip
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_COMMANDS = {rf"\{name}" for name in FUNCTIONS}
_CLOSING = {"(": ")", "{": "}", "[": "]", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ROUNDING = {r"\lfloor": "floor", r"\lceil": "ceil"}
_NOT_SYMBOLS = {
    r"\cdot", r"\le", r"\ge", r"\ne", r"\in", r"\cup", r"\cap", r"\pm", r"\mp", r"\to", r"\over", r"\choose",
    r"\rfloor", r"\rceil", r"\\", r"\{", r"\}", r"\$", r"\dots", r"\sum", r"\prod", r"\int", r"\lim", r"\max", r"\min",
    r"\gcd", r"\pmod", r"\bmod", r"\mod", r"\equiv", r"\approx", r"\langle", r"\rangle", r"\setminus", r"\subset",
    r"\rightarrow", r"\circ",
}  # fmt: skip


class ExpressionError(ValueError):
    """The tokens are not an expression, or its value is too large to compute."""


def parse(tokens: list[str]) -> Node:
    """Parse an expression that consists of all `tokens`. Raises ExpressionError."""
    parser = _Parser(tokens)
    node = parser.expression()
    if parser.peek() is not None:
        raise ExpressionError(parser.peek())
    return node


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def accept(self, *accepted: str) -> str | None:
        token = self.peek()
        if token is None or token not in accepted:
            return None
        self.position += 1
        return token

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise ExpressionError("unexpected end")
        self.position += 1
        return token

    def expression(self) -> Node:
        """Parse a sum, `a \\over b` or `n \\choose k`."""
        node = self.sum()
        if operator := self.accept(r"\over", r"\choose"):
            return ("/" if operator == r"\over" else "binomial", node, self.sum())
        return node

    def sum(self) -> Node:
        node = self.product()
        while operator := self.accept("+", "-"):
            node = (operator, node, self.product())
        return node

    def product(self) -> Node:
        node = self.sign()
        while True:
            if self.accept(r"\cdot"):
                node = ("*", node, self.sign())
            elif self.accept("/"):
                node = ("/", node, self.sign())
            elif self.at_factor():
                node = self.implicit_product(node)
            else:
                return node

    def implicit_product(self, node: Node) -> Node:
        """Parse a factor that follows without an operator: 2x is a product, 2\\frac{1}{3} and 2 1/3 are sums."""
        is_fraction = self.peek() == r"\frac"
        if self.at_number() and not self.at_plain_fraction():
            raise ExpressionError("two adjacent numbers")
        if self.at_number():
            top, _, bottom = (self.tokens[self.position + offset] for offset in range(3))
            self.position += 3
            return _mixed_number(node, ("/", ("number", Fraction(top)), ("number", Fraction(bottom))))
        factor = self.power()
        whole = node[1] if node[0] == "-" and len(node) == 2 else node
        if is_fraction and whole[0] == "number" and factor[0] == "/" and factor[1][0] == factor[2][0] == "number":
            return _mixed_number(node, factor)
        return ("*", node, factor)

    def at_plain_fraction(self) -> bool:
        """Return whether a fraction of integers follows an integer: `2 1/3`."""
        following = self.tokens[self.position : self.position + 3]
        return (
            self.tokens[self.position - 1].isdigit()
            and len(following) == 3
            and following[1] == "/"
            and following[0].isdigit()
            and following[2].isdigit()
        )

    def sign(self) -> Node:
        if operator := self.accept("+", "-"):
            node = self.sign()
            return ("-", node) if operator == "-" else node
        return self.power()

    def power(self) -> Node:
        node = self.factor()
        while mark := self.accept("!", DEGREE):
            node = ("!" if mark == "!" else "degrees", node)
        if self.accept("^"):
            node = ("^", node, self.exponent())
        while self.accept("!"):
            node = ("!", node)
        return node

    def exponent(self) -> Node:
        return ("-", self.exponent()) if self.accept("-") else self.power()

    def argument(self) -> Node:
        """Parse a group or one token; of a number, only the first digit: \\frac12 is 1/2."""
        token = self.peek()
        if token is not None and token.isdigit() and len(token) > 1:
            self.tokens = [*self.tokens[: self.position], token[0], token[1:], *self.tokens[self.position + 1 :]]
        return self.factor()

    def factor(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.number(token)
        if token in _CLOSING:
            node = self.group(token)
            return (_ROUNDING[token], node) if token in _ROUNDING else node
        if token == "|":
            node = self.sum()
            if not self.accept("|"):
                raise ExpressionError("| is not closed")
            return ("abs", node)
        if token == r"\frac":
            braced = self.peek() == "{"
            top = self.argument()
            return ("/", top, self.factor() if braced else self.argument())
        if token == r"\binom":
            return ("binomial", self.argument(), self.argument())
        if token == r"\sqrt":
            degree: Node = ("number", Fraction(2))
            if self.accept("["):
                degree = self.group("[")
            return ("root", self.factor(), degree)
        if token in _COMMANDS:
            return self.function(token[1:])
        return self.symbol(token)

    def number(self, token: str) -> Node:
        if self.peek() == r"\overline" and "." in token:
            self.position += 1
            digits = self.subscript()
            if not digits.isdigit():
                raise ExpressionError(digits)
            places = len(token) - token.index(".") - 1
            return ("number", Fraction(token + "0") + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))
        value = Fraction(token + "0" if token.endswith(".") else token)
        return ("symbol", f"{token}_{self.subscript()}") if self.accept("_") else ("number", value)

    def group(self, opening: str) -> Node:
        node = self.expression()
        if not self.accept(_CLOSING[opening]):
            raise ExpressionError(f"{opening} is not closed")
        return node

    def function(self, name: str) -> Node:
        base: Node | None = None
        if name == "log" and self.accept("_"):
            base = self.argument()
        exponent = self.exponent() if self.accept("^") else None
        inverse = exponent == ("-", ("number", Fraction(1))) and name in _INVERSES
        is_grouped = self.peek() in ("(", "{", "[", "|")
        argument = self.factor() if is_grouped else self.factors()
        node: Node = (_INVERSES[name] if inverse else name, argument)
        if base is not None:
            node = ("/", ("ln", argument), ("ln", base))
        return node if exponent is None or inverse else ("^", node, exponent)

    def factors(self) -> Node:
        """Parse a function's argument without brackets, up to an operator or another function: sin 2x."""
        if self.accept("-"):
            return ("-", self.factors())
        node = self.power()
        while self.at_factor() and self.peek() not in _COMMANDS and self.peek() not in ("(", "[", "|"):
            node = self.implicit_product(node)
        return node

    def symbol(self, token: str) -> Node:
        """Parse a letter, an unknown command, or one letter of \\mathrm, with its subscript."""
        name = token.removeprefix(WORD)
        if not (name.isalpha() or (name.startswith("\\") and name not in _NOT_SYMBOLS)) or (
            token.startswith(WORD) and len(name) > 1
        ):
            raise ExpressionError(token)
        if token in (r"\overline", r"\vec", r"\hat", r"\overrightarrow"):
            name += self.subscript()
        if token.startswith((r"\begin", r"\end")):
            raise ExpressionError(token)
        if self.accept("_"):
            name += "_" + self.subscript()
        return ("symbol", name)

    def subscript(self) -> str:
        """Read one token, or the tokens of a group, as text."""
        token = self.take()
        if token != "{":
            return token.removeprefix(WORD)
        parts = []
        while (token := self.take()) != "}":
            parts.append(token.removeprefix(WORD))
        return "".join(parts)

    def at_factor(self) -> bool:
        token = self.peek()
        if token is None or token in _NOT_SYMBOLS or (token.startswith(WORD) and len(token) > 2):
            return False
        return token[0].isalnum() or token[0] in ("(", "{", ".", WORD, "\\")

    def at_number(self) -> bool:
        token = self.peek()
        return token is not None and (token[0].isdigit() or token[0] == ".")


def _mixed_number(whole: Node, fraction: Node) -> Node:
    """Return the node of a mixed number: 2\\frac{1}{3}, and -2\\frac{1}{3} = -(2 + 1/3)."""
    return ("-", ("+", whole[1], fraction)) if whole[0] == "-" and len(whole) == 2 else ("+", whole, fraction)
