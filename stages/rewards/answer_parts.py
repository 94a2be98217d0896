"""The parts of an answer: lists, sets, tuples and intervals, matrices, relations, and single values with their units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stages.rewards.answer_tokens import WORD
from stages.rewards.latex import NotAnExpression, parse
from stages.rewards.numeric import constant_ratio
from stages.rewards.units import same_quantity, without_unit

_OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSING = set(_OPENING.values())
_MATRICES = {rf"\begin{name}" for name in ("pmatrix", "bmatrix", "matrix", "array", "smallmatrix")}
_FLIPPED = {">": "<", r"\ge": r"\le"}
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx", r"\equiv")
_NAMES = ("(", ")", ",", "_", "{", "}", "'", r"\angle", r"\triangle", r"\overline")
_NOT_NAMES = (r"\infty", r"\pi", r"\sqrt", r"\frac", r"\cdot")
_REALS = ["-", r"\infty"], [r"\infty"]


@dataclass(frozen=True)
class Answer:
    """An answer taken apart.

    kind: "value", "list" (in no order), "tuple" (also intervals), "matrix" or "relation"; brackets: of a tuple, or how many rows a matrix has; name: of `x = 5`
    and `x \\in S`; operators: of a relation, between its items.
    """

    kind: str
    tokens: tuple[str, ...]
    items: tuple[Answer, ...] = ()
    brackets: str = ""
    name: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


def same_parts(left: Sequence[str], right: Sequence[str]) -> bool:
    """Whether two answers, given as tokens, are the same."""
    if not left or not right:
        return False
    return _plain(left) == _plain(right) or _same(_read(left), _read(right))


def is_whole_number(tokens: Sequence[str]) -> bool:
    """Whether an answer is a whole number as it stands, but for its name and unit: 391, x = -391, 391.0, 391 cm."""
    answer = _read(tokens)
    digits, _ = without_unit(list(answer.tokens))
    digits = [token for token in digits if token not in "{}+-()"]
    return (
        answer.kind == "value"
        and len(digits) == 1
        and digits[0].partition(".")[0].isdigit()
        and not digits[0].partition(".")[2].strip("0")
    )


# ---- reading -----------------------------------------------------------------------------------------------------------------


def _read(tokens: Sequence[str]) -> Answer:
    tokens = tuple(tokens)
    if r"\approx" in tokens[1:] and (exact := _exact(tokens)):
        tokens = exact
    parts = _split(tokens, (",",))
    if len(parts) > 1:
        return _listed(tokens, parts)
    if r"\pm" in tokens:
        return _listed(tokens, [_signed(tokens, "+", "-"), _signed(tokens, "-", "+")])
    for operator in (r"\in", *_RELATIONS):
        if len(sides := _split(tokens, (operator,))) > 1:
            return _relation(tokens, sides) if operator != r"\in" else replace(_read(sides[-1]), name=_plain(sides[0]))
    parts = _split(tokens, (r"\cup",))
    if len(parts) > 1:
        return _listed(tokens, parts)
    return _bracketed(tokens)


def _bracketed(tokens: tuple[str, ...]) -> Answer:
    """A set, a tuple or interval, a matrix, or a value."""
    if tokens == (r"\emptyset",):
        return Answer("list", tokens)
    if tokens == (r"\mathbbR",):
        return Answer("tuple", tokens, tuple(Answer("value", tuple(end)) for end in _REALS), "()")
    if tokens[0] in _MATRICES and tokens[-1] == tokens[0].replace("begin", "end"):
        rows = [row for row in _split(tokens[1:-1], (r"\\",)) if row]
        entries = [_read(entry) for row in rows for entry in _split(row, ("&",)) if entry]
        return Answer("matrix", tokens, tuple(entries), f"{len(rows)}")
    if tokens[0] not in _OPENING or _end_of_group(tokens) != len(tokens) - 1:
        return Answer("value", tokens)
    inner = tokens[1:-1]
    if tokens[0] == r"\{":
        condition = _split(inner, ("|", ":"))
        if len(condition) == 2:
            return _read(condition[1])
        return _listed(tokens, [part for part in _split(inner, (",",)) if part])
    parts = _split(inner, (",",))
    if len(parts) > 1:
        return Answer("tuple", tokens, tuple(_read(part) for part in parts if part), tokens[0] + tokens[-1])
    if inner and tokens[0] in ("{", "(", "[") and (tokens[0] == "{" or inner[0] in _MATRICES):
        return _read(inner)
    return Answer("value", tokens)


def _listed(tokens: tuple[str, ...], parts: Iterable[tuple[str, ...]]) -> Answer:
    """A list whose members are taken apart; lists in it are dissolved."""
    items: list[Answer] = []
    for part in parts:
        if part:
            item = _read(part)
            items += [replace(inner, name=inner.name or item.name) for inner in item.items] if item.kind == "list" else [item]
    return items[0] if len(items) == 1 else Answer("list", tokens, tuple(items))


def _relation(tokens: tuple[str, ...], sides: list[tuple[str, ...]]) -> Answer:
    """`x = 5` is the value 5 with the name x; everything else a relation between two sides and more."""
    sides = _split(tokens, _RELATIONS)
    operators = tuple(token for depth, token in _at_depth(tokens) if depth == 0 and token in _RELATIONS)
    if not all(sides):
        return Answer("value", tokens)
    if set(operators) <= {"=", r"\approx"}:
        if _is_name(sides[0]):
            return replace(_read(sides[-1]), name=_plain(sides[0]), operators=operators, tokens=sides[-1])
        if _is_name(sides[-1]) and len(sides) == 2:
            return replace(_read(sides[0]), name=_plain(sides[-1]), operators=operators, tokens=sides[0])
    return Answer("relation", tokens, tuple(Answer("value", side) for side in sides), operators=operators)


def _exact(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """What stands before \\approx, unless that is only a name."""
    before = _split(tokens, (r"\approx",))[0]
    return () if _is_name(before) else before


def _is_name(tokens: tuple[str, ...]) -> bool:
    """Whether tokens are what an answer may be called: x, f(x), a_n, (x, y), \\angle ABC, Area."""
    if tokens in (("e",), ("i",)):
        return False
    for index, token in enumerate(tokens):
        is_letter = token.removeprefix(WORD).isalpha() or (token[0] == "\\" and token[1:].isalpha() and token not in _NOT_NAMES)
        is_subscript = token.isdigit() and "_" in tokens[max(0, index - 2) : index]
        if not (is_letter or is_subscript or token in _NAMES):
            return False
    return True


def _signed(tokens: tuple[str, ...], plus_minus: str, minus_plus: str) -> tuple[str, ...]:
    return tuple({r"\pm": plus_minus, r"\mp": minus_plus}.get(token, token) for token in tokens)


def _at_depth(tokens: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Every token with the number of brackets around it."""
    depth = 0
    for token in tokens:
        closing = token in _CLOSING or token.startswith(r"\end")
        depth -= closing
        yield depth, token
        depth += token in _OPENING or token.startswith(r"\begin")


def _split(tokens: Sequence[str], separators: Sequence[str]) -> list[tuple[str, ...]]:
    """The tokens between separators that stand outside of brackets."""
    parts: list[list[str]] = [[]]
    for depth, token in _at_depth(tokens):
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return [tuple(part) for part in parts]


def _end_of_group(tokens: Sequence[str]) -> int:
    """Where the bracket that `tokens` begins with is closed, be it by ) or ]; -1 if it is not."""
    for index, (depth, token) in enumerate(_at_depth(tokens)):
        if depth == 0 and index and token in _CLOSING:
            matching = token == _OPENING[tokens[0]] or {tokens[0], token} <= {"(", ")", "[", "]"}
            return index if matching else -1
    return -1


def _plain(tokens: Sequence[str]) -> tuple[str, ...]:
    """Tokens without braces around a single one; words in lower case."""
    out: list[str] = []
    for token in tokens:
        out.append(token.lower() if token.startswith(WORD) and len(token) > 2 else token.removeprefix(WORD))
        if token == "}" and len(out) > 2 and out[-3] == "{":
            out[-3:] = [out[-2]]
    return tuple(out)


# ---- comparing ---------------------------------------------------------------------------------------------------------------


def _same(left: Answer, right: Answer) -> bool:
    if left.name and right.name and left.name != right.name:
        return _same_equation(left, right)
    if left.kind == right.kind == "relation":
        return _same_relation(left, right)
    left, right = _interval(left), _interval(right)
    if left.kind == "list" and right.kind == "list":
        return _same_members(left.items, right.items)
    if left.kind == "relation" or right.kind == "relation":
        return _same_equation(left, right)
    if left.kind != right.kind:
        return False
    if left.kind == "value":
        return _same_value(left, right) or bool(left.name and right.name and _same_equation(left, right))
    return left.brackets == right.brackets and len(left.items) == len(right.items) and all(map(_same, left.items, right.items))


def _same_members(left: Sequence[Answer], right: Sequence[Answer]) -> bool:
    """Whether two lists have the same members, in any order."""
    rest = list(right)
    for item in left:
        match = next((index for index, other in enumerate(rest) if _same(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return not rest


def _same_value(left: Answer, right: Answer) -> bool:
    (a, unit_a), (b, unit_b) = without_unit(list(left.tokens)), without_unit(list(right.tokens))
    if _is_prose(a) or _is_prose(b) or (_is_letter(_bare(a)) and _is_letter(_bare(b))):
        left_text, right_text = _bare(left.tokens), _bare(right.tokens)
        return left_text == right_text != "" or _chosen(left.tokens) == right_text or left_text == _chosen(right.tokens)
    if _based(a) or _based(b):
        return _based(a) == _based(b)
    try:
        return same_quantity(parse(a), unit_a, parse(b), unit_b)
    except (NotAnExpression, RecursionError):
        return False


def _bare(tokens: Sequence[str]) -> str:
    """Prose, or the letter of a choice: without brackets and punctuation, in lower case. Digits are told apart by their value."""
    return "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}[].,'").lower()


def _is_prose(tokens: Sequence[str]) -> bool:
    """Whether there are words, or "no", which as a product would equal "on", or the letter of a choice before its text."""
    return (
        any(token.startswith(WORD) and len(token) > 2 for token in tokens)
        or tuple(tokens) == ("n", "o")
        or _chosen(tokens) is not None
    )


def _chosen(tokens: Sequence[str]) -> str | None:
    """`a` of `\\text{(A) } 12`: a choice by its letter, with its text behind it."""
    is_choice = len(tokens) > 3 and tokens[0] == "(" and tokens[2] == ")" and tokens[1].startswith(WORD) and len(tokens[1]) == 2
    return _bare(tokens[1:2]) if is_choice else None


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()


def _based(tokens: Sequence[str]) -> str:
    """`413_8` of a number in another base."""
    text = "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}")
    digits, underscore, base = text.partition("_")
    is_number = (
        digits.isalnum()
        and digits.upper() == digits
        and (any(map(str.isdigit, digits)) or (base.isdigit() and int(base[:3]) > 10))
    )
    return text if underscore and base.isdigit() and is_number else ""


def _interval(answer: Answer) -> Answer:
    """`1 < x \\le 5` as (1, 5]; anything else as it is."""
    if answer.kind == "list":
        return replace(answer, items=tuple(map(_interval, answer.items)))
    operators = [_FLIPPED.get(operator, operator) for operator in answer.operators]
    flipped = [operator in _FLIPPED for operator in answer.operators]
    if answer.kind != "relation" or not set(operators) <= {"<", r"\le"} or len(set(flipped)) != 1 or len(operators) > 2:
        return answer
    sides = list(answer.items)
    if flipped[0]:
        sides, operators = sides[::-1], operators[::-1]
    low_end, high_end = (Answer("value", tuple(end)) for end in _REALS)
    if len(sides) == 3 and _is_name(sides[1].tokens):
        low, high, closed = sides[0], sides[2], [operator == r"\le" for operator in operators]
    elif len(sides) == 2 and _is_name(sides[0].tokens):
        low, high, closed = low_end, sides[1], [False, operators[0] == r"\le"]
    elif len(sides) == 2 and _is_name(sides[1].tokens):
        low, high, closed = sides[0], high_end, [operators[0] == r"\le", False]
    else:
        return answer
    return Answer("tuple", answer.tokens, (low, high), "(["[closed[0]] + ")]"[closed[1]])


def _same_relation(left: Answer, right: Answer) -> bool:
    """The same inequalities or equations, moved to one side and up to a factor; `x \\equiv 1` by its sides."""
    if r"\equiv" in left.operators or r"\equiv" in right.operators:
        return left.operators == right.operators and all(map(_same, left.items, right.items))
    rest = _differences(right)
    for operator, difference in _differences(left):
        match = next(
            (
                index
                for index, (other, node) in enumerate(rest)
                if other == operator and _proportional(difference, node, operator)
            ),
            None,
        )
        if match is None:
            return False
        del rest[match]
    return not rest


def _proportional(left: list[str], right: list[str], operator: str) -> bool:
    try:
        ratio = constant_ratio(parse(left), parse(right))
    except (NotAnExpression, RecursionError):
        return False
    return ratio == 1 or (ratio == -1 and operator in ("=", r"\ne", r"\approx"))


def _differences(answer: Answer) -> list[tuple[str, list[str]]]:
    """Of each step of a chain its operator, < for >, and what it compares to zero."""
    steps = []
    for operator, low, high in zip(answer.operators, answer.items, answer.items[1:]):
        a, b = (high, low) if operator in _FLIPPED else (low, high)
        steps.append((_FLIPPED.get(operator, operator), ["(", *a.tokens, ")", "-", "(", *b.tokens, ")"]))
    return steps


def _same_equation(left: Answer, right: Answer) -> bool:
    """Equations written differently, `y = 2x` and `2x - y = 0`; or one whose last side is the label: `a + b = 7` and `7`."""
    left_equation, right_equation = _equation(left), _equation(right)
    if left_equation and right_equation:
        return _proportional(left_equation, right_equation, "=")
    if left.kind == "relation" and right.kind == "value" and set(left.operators) <= {"=", r"\approx"}:
        return _same_value(left.items[-1], right)
    return False


def _equation(answer: Answer) -> list[str]:
    """What an equation says is zero; empty if it is none."""
    if answer.kind == "value" and answer.name and "=" in answer.operators:
        return ["(", *answer.name, ")", "-", "(", *answer.tokens, ")"]
    return _differences(answer)[0][1] if answer.kind == "relation" and answer.operators == ("=",) else []
