"""A small reader of mathematical answers, LaTeX or plain, as SymPy expressions. No `eval`: the text comes from a model.

sum      = product (("+" | "-") product)*
product  = sign (("*" | "/" | nothing) sign)*
sign     = ("+" | "-")* power
power    = factor "!"* ("^" argument)?
factor   = number | letter | constant | group | \\frac argument argument | \\sqrt[sum] argument | function argument
"""

from __future__ import annotations

import re

import sympy

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>\\[a-zA-Z]+|sqrt|pi|[a-zA-Z])|(?P<symbol>\*\*|[-+*/^!(){}\[\]]))")
_CONSTANTS = {"\\pi": sympy.pi, "pi": sympy.pi, "π": sympy.pi, "e": sympy.E, "i": sympy.I, "\\infty": sympy.oo}
_FUNCTIONS = {
    "\\sin": sympy.sin, "\\cos": sympy.cos, "\\tan": sympy.tan, "\\ln": sympy.log, "\\log": sympy.log, "\\exp": sympy.exp,
    "sqrt": sympy.sqrt,
}  # fmt: skip
_TIMES = ("*", "\\cdot", "\\times")
_DIVIDE = ("/", "\\div")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class NotAnExpression(ValueError):
    """The text is not in the grammar."""


def parse(text: str) -> sympy.Expr:
    """The expression that `text` spells. Raises NotAnExpression."""
    reader = _Reader(_tokens(text))
    value = reader.sum()
    if reader.next() is not None:
        raise NotAnExpression(text)
    return value


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAnExpression(text)
        tokens.append("^" if match.group().strip() == "**" else match.group().strip())
        position = match.end()
    return tokens


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def next(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def accept(self, *wanted: str) -> str | None:
        token = self.next()
        if token is None or token not in wanted:
            return None
        self.position += 1
        return token

    def sum(self) -> sympy.Expr:
        value = self.product()
        while operator := self.accept("+", "-"):
            term = self.product()
            value = value + term if operator == "+" else value - term
        return value

    def product(self) -> sympy.Expr:
        value = self.sign()
        while True:
            if self.accept(*_TIMES):
                value = value * self.sign()
            elif self.accept(*_DIVIDE):
                value = value / self.sign()
            elif self._begins_factor():
                value = value * self.power()  # 2x, 3\sqrt{2}
            else:
                return value

    def sign(self) -> sympy.Expr:
        if operator := self.accept("+", "-"):
            value = self.sign()
            return -value if operator == "-" else value
        return self.power()

    def power(self) -> sympy.Expr:
        value = self.factor()
        while self.accept("!"):
            value = sympy.factorial(value)
        return value ** self.argument() if self.accept("^") else value

    def argument(self) -> sympy.Expr:
        """What stands after ^, \\frac or a function: a group, or one sign and factor."""
        return self.sign()

    def factor(self) -> sympy.Expr:
        token = self.next()
        if token is None:
            raise NotAnExpression("ended early")
        self.position += 1
        if token[0].isdigit():
            return sympy.Rational(token)  # exact: 0.1 is 1/10
        if token in _CLOSING:
            return self._group(token)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self.factor())
        if token == "\\frac":
            return self.factor() / self.factor()
        if token == "\\sqrt":
            degree = self._group("[") if self.accept("[") else sympy.Integer(2)
            return sympy.root(self.factor(), degree)
        if len(token) == 1 and token.isalpha():
            return sympy.Symbol(token)
        raise NotAnExpression(token)

    def _group(self, opening: str) -> sympy.Expr:
        value = self.sum()
        if not self.accept(_CLOSING[opening]):
            raise NotAnExpression(f"{opening} is not closed")
        return value

    def _begins_factor(self) -> bool:
        token = self.next()
        return token is not None and (
            token[0].isalnum()
            or token in ("(", "{")
            or token in _FUNCTIONS
            or token in _CONSTANTS
            or token in ("\\frac", "\\sqrt")
        )
