"""Parse mathematical expressions from tokens (tokens.py) by recursive descent, not with Python's `eval`, which would
execute text of the model.

sum      = product (("+" | "-") product)*
product  = sign (("·" | "/" | nothing) sign)*      (nothing: 2x is 2 · x)
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
_COMMANDS = {rf"\{name}" for name in (*FUNCTIONS, "floor", "ceil")}
_CLOSING = {"(": ")", "{": "}", "[": "]", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ROUNDING = {r"\lfloor": "floor", r"\lceil": "ceil"}
_NOT_SYMBOLS = {
    r"\cdot", r"\le", r"\ge", r"\ne", r"\in", r"\cup", r"\cap", r"\pm", r"\mp", r"\to", r"\over", r"\choose",
    r"\rfloor", r"\rceil", r"\\", r"\{", r"\}", r"\$", r"\dots", r"\sum", r"\prod", r"\int", r"\lim", r"\max", r"\min",
    r"\gcd", r"\implies", r"\land", r"\lor",
    r"\mod", r"\equiv", r"\approx", r"\langle", r"\rangle", r"\setminus", r"\subset",
    r"\rightarrow", r"\circ",
}  # fmt: skip


class ExpressionError(ValueError):
    """Raised if tokens are not a valid expression, or if the value of an expression is too large to compute."""


def parse_expression(tokens: list[str]) -> Node:
    """Parse all `tokens` as one expression. Raises ExpressionError."""
    parser = _Parser(tokens)
    node = parser.parse_expression()
    if parser.peek_token() is not None:
        raise ExpressionError(f"unexpected token {parser.peek_token()!r} after the expression")
    return node


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek_token(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def accept_token(self, *accepted: str) -> str | None:
        token = self.peek_token()
        if token is None or token not in accepted:
            return None
        self.position += 1
        return token

    def next_token(self) -> str:
        token = self.peek_token()
        if token is None:
            raise ExpressionError("the expression ends where a number, symbol or group is needed")
        self.position += 1
        return token

    def parse_expression(self) -> Node:
        """Parse a sum, `a \\over b` or `n \\choose k`."""
        node = self.parse_sum()
        if operator := self.accept_token(r"\over", r"\choose"):
            return ("/" if operator == r"\over" else "binomial", node, self.parse_sum())
        return node

    def parse_sum(self) -> Node:
        node = self.parse_product()
        while operator := self.accept_token("+", "-"):
            node = (operator, node, self.parse_product())
        return node

    def parse_product(self) -> Node:
        node = self.parse_sign()
        while True:
            if self.accept_token(r"\cdot"):
                node = ("*", node, self.parse_sign())
            elif self.accept_token("/"):
                node = ("/", node, self.parse_sign())
            elif self.at_factor():
                node = self.parse_implicit_product(node)
            else:
                return node

    def parse_implicit_product(self, node: Node) -> Node:
        """Parse a factor that follows `node` without an operator: 2x is a product; 2\\frac{1}{3} and 2 1/3 are mixed
        numbers."""
        is_fraction = self.peek_token() == r"\frac"
        if self.at_number() and not self.at_plain_fraction():
            raise ExpressionError("two adjacent numbers without an operator")
        if self.at_number():
            top, _, bottom = (self.tokens[self.position + offset] for offset in range(3))
            self.position += 3
            return _mixed_number(node, ("/", ("number", Fraction(top)), ("number", Fraction(bottom))))
        factor = self.parse_power()
        whole = node[1] if node[0] == "-" and len(node) == 2 else node
        if is_fraction and whole[0] == "number" and factor[0] == "/" and factor[1][0] == factor[2][0] == "number":
            return _mixed_number(node, factor)
        return ("*", node, factor)

    def at_plain_fraction(self) -> bool:
        """Return whether the next tokens are a fraction of integers that follows an integer: 1/3 in `2 1/3`."""
        following = self.tokens[self.position : self.position + 3]
        return (
            self.tokens[self.position - 1].isdigit()
            and len(following) == 3
            and following[1] == "/"
            and following[0].isdigit()
            and following[2].isdigit()
        )

    def parse_sign(self) -> Node:
        if operator := self.accept_token("+", "-"):
            node = self.parse_sign()
            return ("-", node) if operator == "-" else node
        return self.parse_power()

    def parse_power(self) -> Node:
        node = self.parse_factor()
        while mark := self.accept_token("!", DEGREE):
            node = ("!" if mark == "!" else "degrees", node)
        if self.accept_token("^"):
            node = ("^", node, self.parse_exponent())
        while self.accept_token("!"):
            node = ("!", node)
        return node

    def parse_exponent(self) -> Node:
        return ("-", self.parse_exponent()) if self.accept_token("-") else self.parse_power()

    def parse_argument(self) -> Node:
        """Parse a command's argument: a group or one token; of a number, only the first digit (\\frac12 is 1/2)."""
        token = self.peek_token()
        if token is not None and token.isdigit() and len(token) > 1:
            self.tokens = [*self.tokens[: self.position], token[0], token[1:], *self.tokens[self.position + 1 :]]
        return self.parse_factor()

    def parse_factor(self) -> Node:
        token = self.next_token()
        if token[0].isdecimal() or token[0] == ".":
            return self.parse_number(token)
        if token in _CLOSING:
            node = self.parse_group(token)
            return (_ROUNDING[token], node) if token in _ROUNDING else node
        if token == "|":
            node = self.parse_sum()
            if not self.accept_token("|"):
                raise ExpressionError("| has no closing |")
            return ("abs", node)
        if token == r"\frac":
            braced = self.peek_token() == "{"
            top = self.parse_argument()
            return ("/", top, self.parse_factor() if braced else self.parse_argument())
        if token == r"\binom":
            return ("binomial", self.parse_argument(), self.parse_argument())
        if token == r"\sqrt":
            degree: Node = ("number", Fraction(2))
            if self.accept_token("["):
                degree = self.parse_group("[")
            return ("root", self.parse_factor(), degree)
        if token in _COMMANDS:
            return self.parse_function(token[1:])
        return self.parse_symbol(token)

    def parse_number(self, token: str) -> Node:
        if self.peek_token() == r"\overline" and "." in token:
            self.position += 1
            digits = self.read_subscript()
            if not digits.isdigit():
                raise ExpressionError(f"\\overline{{{digits}}} after {token} must contain the repeating digits")
            places = len(token) - token.index(".") - 1
            return ("number", Fraction(token + "0") + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))
        value = Fraction(token + "0" if token.endswith(".") else token)
        return ("symbol", f"{token}_{self.read_subscript()}") if self.accept_token("_") else ("number", value)

    def parse_group(self, opening: str) -> Node:
        node = self.parse_expression()
        if not self.accept_token(_CLOSING[opening]):
            raise ExpressionError(f"{opening} has no closing {_CLOSING[opening]}")
        return node

    def parse_function(self, name: str) -> Node:
        base: Node | None = None
        if name == "log" and self.accept_token("_"):
            base = self.parse_argument()
        exponent = self.parse_exponent() if self.accept_token("^") else None
        inverse = exponent == ("-", ("number", Fraction(1))) and name in _INVERSES
        is_grouped = self.peek_token() in ("(", "{", "[", "|")
        argument = self.parse_factor() if is_grouped else self.parse_bare_argument()
        node: Node = (_INVERSES[name] if inverse else name, argument)
        if base is not None:
            node = ("/", ("ln", argument), ("ln", base))
        return node if exponent is None or inverse else ("^", node, exponent)

    def parse_bare_argument(self) -> Node:
        """Parse a function's argument without brackets, such as 2x in sin 2x, up to an operator or another function."""
        if self.accept_token("-"):
            return ("-", self.parse_bare_argument())
        node = self.parse_power()
        while self.at_factor() and self.peek_token() not in _COMMANDS and self.peek_token() not in ("(", "[", "|"):
            node = self.parse_implicit_product(node)
        return node

    def parse_symbol(self, token: str) -> Node:
        """Parse a letter, an unknown command or one letter of \\mathrm as a symbol, with its subscript."""
        name = token.removeprefix(WORD)
        if not (name.isalpha() or (name.startswith("\\") and name not in _NOT_SYMBOLS)) or (
            token.startswith(WORD) and len(name) > 1
        ):
            raise ExpressionError(f"{token!r} is not a symbol of an expression")
        if token in (r"\overline", r"\vec", r"\hat", r"\overrightarrow"):
            name += self.read_subscript()
        if token.startswith((r"\begin", r"\end")):
            raise ExpressionError(f"{token!r} is not supported inside an expression")
        if self.accept_token("_"):
            name += "_" + self.read_subscript()
        return ("symbol", name)

    def read_subscript(self) -> str:
        """Return the subscript, one token or the tokens of a group, as text."""
        token = self.next_token()
        if token != "{":
            return token.removeprefix(WORD)
        parts = []
        while (token := self.next_token()) != "}":
            parts.append(token.removeprefix(WORD))
        return "".join(parts)

    def at_factor(self) -> bool:
        token = self.peek_token()
        if token is None or token in _NOT_SYMBOLS or (token.startswith(WORD) and len(token) > 2):
            return False
        return token[0].isalnum() or token[0] in ("(", "{", ".", WORD, "\\")

    def at_number(self) -> bool:
        token = self.peek_token()
        return token is not None and (token[0].isdecimal() or token[0] == ".")


def _mixed_number(whole: Node, fraction: Node) -> Node:
    """Return the node of a mixed number: 2\\frac{1}{3}, and -2\\frac{1}{3} = -(2 + 1/3)."""
    return ("-", ("+", whole[1], fraction)) if whole[0] == "-" and len(whole) == 2 else ("+", whole, fraction)
