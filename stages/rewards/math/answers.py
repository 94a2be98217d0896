"""Parse and compare answers: lists, sets, tuples, intervals, matrices, relations, and values with units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.stages.rewards.math.latex import ExpressionError, parse_expression
from penstock.stages.rewards.math.numeric import sign_of_constant_ratio
from penstock.stages.rewards.math.tokens import WORD
from penstock.stages.rewards.math.units import same_quantity, split_unit

_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSING = set(_BRACKETS.values())
_MATRICES = {rf"\begin{name}" for name in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix")}
_FLIPPED = {">": "<", r"\ge": r"\le"}
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx", r"\equiv")
_NAME_SYMBOLS = ("(", ")", ",", "_", "{", "}", "'", r"\angle", r"\triangle", r"\overline")
_NOT_IN_NAMES = (r"\infty", r"\pi", r"\sqrt", r"\frac", r"\cdot")
_REAL_ENDS = ["-", r"\infty"], [r"\infty"]

Item = TypeVar("Item")


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer and its parts.

    kind: "value", "list" (unordered, also a set), "tuple" (also an interval), "matrix" or "relation".
    brackets: the brackets of a tuple, or the number of rows of a matrix.
    name: tokens of the variable or function to which the answer assigns the value: x in `x = 5` and `x \\in S`.
    operators: the operators between the sides of a relation or of `x = 5`.
    """

    kind: str
    tokens: tuple[str, ...]
    items: tuple[ParsedAnswer, ...] = ()
    brackets: str = ""
    name: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


def equal_answers(left: Sequence[str], right: Sequence[str]) -> bool:
    """Return whether two answers, given as tokens, are equal."""
    if not left or not right:
        return False
    return _normalize(left) == _normalize(right) or _equal_parsed(_parse(left), _parse(right))


def is_evaluated_integer(tokens: Sequence[str]) -> bool:
    """Return whether an answer (as tokens) is an integer that needs no evaluation: 391, x = -391, 391.0, 391 cm."""
    answer = _parse(tokens)
    digits, _ = split_unit(list(answer.tokens))
    digits = [token for token in digits if token not in "{}+-()"]
    return (
        answer.kind == "value"
        and len(digits) == 1
        and digits[0].partition(".")[0].isdigit()
        and not digits[0].partition(".")[2].strip("0")
    )


# ---- parsing ---------------------------------------------------------------------------------------------------------


def _parse(tokens: Sequence[str]) -> ParsedAnswer:
    tokens = tuple(tokens)
    if r"\approx" in tokens[1:]:
        exact = _split_outside_brackets(tokens, (r"\approx",))[0]
        tokens = tokens if _can_name_answer(exact) else exact
    parts = _split_outside_brackets(tokens, (",",))
    if len(parts) > 1:
        return _make_list(tokens, parts)
    if r"\pm" in tokens:
        signs = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
        return _make_list(tokens, [tuple(sign.get(token, token) for token in tokens) for sign in signs])
    for operator in (r"\in", *_RELATIONS):
        if len(sides := _split_outside_brackets(tokens, (operator,))) > 1:
            return (
                parse_relation(tokens) if operator != r"\in" else replace(_parse(sides[-1]), name=_normalize(sides[0]))
            )
    parts = _split_outside_brackets(tokens, (r"\cup",))
    if len(parts) > 1:
        return _make_list(tokens, parts)
    return parse_group(tokens)


def parse_group(tokens: tuple[str, ...]) -> ParsedAnswer:
    """Parse a set, a tuple or interval, a matrix, or a value."""
    if tokens == (r"\emptyset",):
        return ParsedAnswer("list", tokens)
    if tokens == (r"\mathbbR",):
        return ParsedAnswer("tuple", tokens, tuple(ParsedAnswer("value", tuple(end)) for end in _REAL_ENDS), "()")
    if tokens[0] in _MATRICES and tokens[-1] == tokens[0].replace("begin", "end"):
        rows = [row for row in _split_outside_brackets(tokens[1:-1], (r"\\",)) if row]
        entries = [_parse(entry) for row in rows for entry in _split_outside_brackets(row, ("&",)) if entry]
        return ParsedAnswer("matrix", tokens, tuple(entries), f"{len(rows)}")
    if tokens[0] not in _BRACKETS or index_of_closing_bracket(tokens) != len(tokens) - 1:
        return ParsedAnswer("value", tokens)
    inner = tokens[1:-1]
    if tokens[0] == r"\{":
        condition = _split_outside_brackets(inner, ("|", ":"))
        if len(condition) == 2:
            return _parse(condition[1])
        return _make_list(tokens, [part for part in _split_outside_brackets(inner, (",",)) if part])
    parts = _split_outside_brackets(inner, (",",))
    if len(parts) > 1:
        return ParsedAnswer("tuple", tokens, tuple(_parse(part) for part in parts if part), tokens[0] + tokens[-1])
    if inner and tokens[0] in ("{", "(", "[") and (tokens[0] == "{" or inner[0] in _MATRICES):
        return _parse(inner)
    return ParsedAnswer("value", tokens)


def _make_list(tokens: tuple[str, ...], parts: Iterable[tuple[str, ...]]) -> ParsedAnswer:
    """Parse `parts` and return them as an answer of kind "list", with nested lists flattened; a single item is returned
    without a list around it."""
    items: list[ParsedAnswer] = []
    for part in parts:
        if part:
            item = _parse(part)
            if item.kind == "list":
                items += [replace(inner, name=inner.name or item.name) for inner in item.items]
            else:
                items.append(item)
    return items[0] if len(items) == 1 else ParsedAnswer("list", tokens, tuple(items))


def parse_relation(tokens: tuple[str, ...]) -> ParsedAnswer:
    """Parse `x = 5` as the value 5 with the name x, and every other relation (`a < b = c`) as kind "relation"."""
    sides = _split_outside_brackets(tokens, _RELATIONS)
    operators = tuple(token for depth, token in _with_bracket_depth(tokens) if depth == 0 and token in _RELATIONS)
    if not all(sides):
        return ParsedAnswer("value", tokens)
    if set(operators) <= {"=", r"\approx"}:
        if _can_name_answer(sides[0]):
            return replace(_parse(sides[-1]), name=_normalize(sides[0]), operators=operators, tokens=sides[-1])
        if _can_name_answer(sides[-1]) and len(sides) == 2:
            return replace(_parse(sides[0]), name=_normalize(sides[-1]), operators=operators, tokens=sides[0])
    return ParsedAnswer("relation", tokens, tuple(ParsedAnswer("value", side) for side in sides), operators=operators)


def _can_name_answer(tokens: tuple[str, ...]) -> bool:
    """Return whether the tokens can be the name in `name = answer`: x, f(x), a_n, (x, y), \\angle ABC, Area."""
    if tokens in (("e",), ("i",)):
        return False
    for index, token in enumerate(tokens):
        is_letter = token.removeprefix(WORD).isalpha() or (
            token[0] == "\\" and token[1:].isalpha() and token not in _NOT_IN_NAMES
        )
        is_subscript = token.isdigit() and "_" in tokens[max(0, index - 2) : index]
        if not (is_letter or is_subscript or token in _NAME_SYMBOLS):
            return False
    return True


def _with_bracket_depth(tokens: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Yield (number of brackets around the token, token) for every token."""
    depth = 0
    for token in tokens:
        closing = token in _CLOSING or token.startswith(r"\end")
        depth -= closing
        yield depth, token
        depth += token in _BRACKETS or token.startswith(r"\begin")


def _split_outside_brackets(tokens: Sequence[str], separators: Sequence[str]) -> list[tuple[str, ...]]:
    """Split tokens at those separators that are not inside brackets."""
    parts: list[list[str]] = [[]]
    for depth, token in _with_bracket_depth(tokens):
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return [tuple(part) for part in parts]


def index_of_closing_bracket(tokens: Sequence[str]) -> int:
    """Return the index of the bracket that closes the first token, or -1. `(` may be closed by `]`, and `[` by `)`."""
    for index, (depth, token) in enumerate(_with_bracket_depth(tokens)):
        if depth == 0 and index and token in _CLOSING:
            matching = token == _BRACKETS[tokens[0]] or {tokens[0], token} <= {"(", ")", "[", "]"}
            return index if matching else -1
    return -1


def _normalize(tokens: Sequence[str]) -> tuple[str, ...]:
    """Remove braces around a single token, and convert words to lower case."""
    out: list[str] = []
    for token in tokens:
        out.append(token.lower() if token.startswith(WORD) and len(token) > 2 else token.removeprefix(WORD))
        if token == "}" and len(out) > 2 and out[-3] == "{":
            out[-3:] = [out[-2]]
    return tuple(out)


# ---- comparison ------------------------------------------------------------------------------------------------------


def _equal_parsed(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if left.name and right.name and left.name != right.name:
        return _equal_equations(left, right)
    if left.kind == right.kind == "relation":
        return equal_relations(left, right)
    left, right = _to_interval(left), _to_interval(right)
    if left.kind == "list" and right.kind == "list":
        return _equal_unordered(left.items, right.items, _equal_parsed)
    if left.kind == "relation" or right.kind == "relation":
        return _equal_equations(left, right)
    if left.kind != right.kind:
        return False
    if left.kind == "value":
        return _equal_values(left, right) or bool(left.name and right.name and _equal_equations(left, right))
    return (
        left.brackets == right.brackets
        and len(left.items) == len(right.items)
        and all(map(_equal_parsed, left.items, right.items))
    )


def _equal_unordered(left: Sequence[Item], right: Sequence[Item], equal: Callable[[Item, Item], bool]) -> bool:
    """Return whether two lists have equal items in any order."""
    rest = list(right)
    for item in left:
        match = next((index for index, other in enumerate(rest) if equal(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _equal_values(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    (a, unit_a), (b, unit_b) = split_unit(list(left.tokens)), split_unit(list(right.tokens))
    if _is_prose(a) or _is_prose(b) or (_is_single_letter(_to_text(a)) and _is_single_letter(_to_text(b))):
        left_text, right_text = _to_text(left.tokens), _to_text(right.tokens)
        return (
            left_text == right_text != ""
            or _choice_letter(left.tokens) == right_text
            or left_text == _choice_letter(right.tokens)
        )
    if _number_with_base(a) or _number_with_base(b):
        return _number_with_base(a) == _number_with_base(b)
    try:
        return same_quantity(parse_expression(a), unit_a, parse_expression(b), unit_b)
    except (ExpressionError, RecursionError):
        return False


def _to_text(tokens: Sequence[str]) -> str:
    """Join the tokens to a text in lower case, without brackets and punctuation."""
    return "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}[].,'").lower()


def _is_prose(tokens: Sequence[str]) -> bool:
    """Return whether the tokens must be compared as text: they contain words, are "no" (as products of letters, "no"
    and "on" would be equal), or are the letter of a choice followed by the choice's text."""
    return (
        any(token.startswith(WORD) and len(token) > 2 for token in tokens)
        or tuple(tokens) == ("n", "o")
        or _choice_letter(tokens) is not None
    )


def _choice_letter(tokens: Sequence[str]) -> str | None:
    """Return the letter of a multiple-choice option followed by its text (`a` for `\\text{(A) } 12`), else None."""
    is_choice = (
        len(tokens) > 3 and tokens[0] == "(" and tokens[2] == ")" and tokens[1].startswith(WORD) and len(tokens[1]) == 2
    )
    return _to_text(tokens[1:2]) if is_choice else None


def _is_single_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()


def _number_with_base(tokens: Sequence[str]) -> str:
    """Return a number with a base, such as `413_8`, as text; an empty string if the tokens are not such a number."""
    text = "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}")
    digits, underscore, base = text.partition("_")
    is_number = (
        digits.isalnum()
        and digits.upper() == digits
        and (any(map(str.isdigit, digits)) or (base.isdigit() and int(base[:3]) > 10))
    )
    return text if underscore and base.isdigit() and is_number else ""


def _to_interval(answer: ParsedAnswer) -> ParsedAnswer:
    """Convert `1 < x \\le 5` to (1, 5]; return anything else unchanged."""
    if answer.kind == "list":
        return replace(answer, items=tuple(map(_to_interval, answer.items)))
    operators = [_FLIPPED.get(operator, operator) for operator in answer.operators]
    flipped = [operator in _FLIPPED for operator in answer.operators]
    if answer.kind != "relation" or not set(operators) <= {"<", r"\le"} or len(set(flipped)) != 1 or len(operators) > 2:
        return answer
    sides = list(answer.items)
    if flipped[0]:
        sides, operators = sides[::-1], operators[::-1]
    low_end, high_end = (ParsedAnswer("value", tuple(end)) for end in _REAL_ENDS)
    if len(sides) == 3 and _can_name_answer(sides[1].tokens):
        low, high, closed = sides[0], sides[2], [operator == r"\le" for operator in operators]
    elif len(sides) == 2 and _can_name_answer(sides[0].tokens):
        low, high, closed = low_end, sides[1], [False, operators[0] == r"\le"]
    elif len(sides) == 2 and _can_name_answer(sides[1].tokens):
        low, high, closed = sides[0], high_end, [operators[0] == r"\le", False]
    else:
        return answer
    return ParsedAnswer("tuple", answer.tokens, (low, high), "(["[closed[0]] + ")]"[closed[1]])


def equal_relations(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether two relations have equal steps in any order: a < b < c has the steps a < b and b < c. A step is
    compared as a - b < 0, up to a constant factor. Congruences (\\equiv) are equal if their sides are equal."""
    if r"\equiv" in left.operators or r"\equiv" in right.operators:
        return left.operators == right.operators and all(map(_equal_parsed, left.items, right.items))
    return _equal_unordered(
        _differences_of_relation_steps(left),
        _differences_of_relation_steps(right),
        lambda a, b: a[0] == b[0] and _equal_up_to_factor(a[1], b[1], a[0]),
    )


def _equal_up_to_factor(left: list[str], right: list[str], operator: str) -> bool:
    """Return whether two expressions are equal up to a constant factor, which must be positive for an inequality."""
    try:
        ratio = sign_of_constant_ratio(parse_expression(left), parse_expression(right))
    except (ExpressionError, RecursionError):
        return False
    return ratio == 1 or (ratio == -1 and operator in ("=", r"\ne", r"\approx"))


def _differences_of_relation_steps(answer: ParsedAnswer) -> list[tuple[str, list[str]]]:
    """Return (operator, tokens of the difference) for each step of a relation: a < b < c gives ("<", a - b) and
    ("<", b - c). A step a > b is read as b < a."""
    steps = []
    for operator, low, high in zip(answer.operators, answer.items, answer.items[1:]):
        a, b = (high, low) if operator in _FLIPPED else (low, high)
        steps.append((_FLIPPED.get(operator, operator), ["(", *a.tokens, ")", "-", "(", *b.tokens, ")"]))
    return steps


def _equal_equations(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether two equations are equal up to a constant factor, such as `y = 2x` and `2x - y = 0`, or whether the
    last side of the equation `left` equals the value `right`, such as `a + b = 7` and `7`.
    """
    left_equation, right_equation = _difference_of_equation_sides(left), _difference_of_equation_sides(right)
    if left_equation and right_equation:
        return _equal_up_to_factor(left_equation, right_equation, "=")
    if left.kind == "relation" and right.kind == "value" and set(left.operators) <= {"=", r"\approx"}:
        return _equal_values(left.items[-1], right)
    return False


def _difference_of_equation_sides(answer: ParsedAnswer) -> list[str]:
    """Return the tokens of `left side - right side` of an equation; [] if the answer is not an equation."""
    if answer.kind == "value" and answer.name and "=" in answer.operators:
        return ["(", *answer.name, ")", "-", "(", *answer.tokens, ")"]
    return (
        _differences_of_relation_steps(answer)[0][1] if answer.kind == "relation" and answer.operators == ("=",) else []
    )
