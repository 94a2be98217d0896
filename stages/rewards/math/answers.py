"""Parse and compare answers: lists, sets, tuples, intervals, matrices, relations, and values with units."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.stages.rewards.math.expressions import (
    ExpressionError,
    is_less,
    parse_expression,
    same_value,
    sign_of_constant_ratio,
)
from penstock.stages.rewards.math.tokens import WORD, commands, words
from penstock.stages.rewards.math.units import join_compound, known_unit, same_quantity, split_unit

_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSING = set(_BRACKETS.values())
_MATRICES = commands("beginpmatrix beginbmatrix beginBmatrix beginmatrix beginarray beginsmallmatrix")
_SYSTEMS = commands("begincases beginaligned beginalign begingathered beginrcases")
_FLIPPED = {">": "<", r"\ge": r"\le"}
_INEQUALITIES = {"<", ">", r"\le", r"\ge", r"\ne"}
_RELATIONS = ("=", r"\approx", r"\equiv", *_INEQUALITIES)
_SEPARATORS = {",": "", r"\land": "and", r"\lor": "or"}
# An answer without any of these tokens is a value.
_STRUCTURE = {*_RELATIONS, *_SEPARATORS, ":", "'", "|"} | commands("in pm cup cap mod emptyset sim")
_STRUCTURE_PREFIX = re.compile(rf"{WORD}|\\begin|\\mathbb|\\implies|^(?:\(|\[|\{{|\\\{{|\\langle)")
_NAME_SYMBOLS = set("(),_{}'")
_NOT_IN_NAMES = commands("infty pi sqrt frac cdot emptyset")
_DERIVATIVE = re.compile(r"[a-zA-Z]('+)(?:_[a-z])?(?:\([a-z]\))?")
_REAL_ENDS = ["-", r"\infty"], [r"\infty"]

_BEFORE_ANSWER = {r"\approx", r"\sim", r"\equiv", "="} | words(
    "about approximately approx roughly around option choice answer from the final is"
)
_PHRASES = {
    **dict.fromkeys(
        ("allrealnumbers", "allreals", "allreal", "allrealx", "allrealnumbersx", "setofallrealnumbers"), r"\mathbbR"
    ),
    **dict.fromkeys(("emptyset", "nullset"), r"\emptyset"),
}
_SYNONYMS = {"dne": "doesnotexist"}
_BEFORE_CONDITION = words("for where with if when")
_CONDITION_WORDS = _BEFORE_CONDITION | words("all any every each is an some")
_INTEGERS = words("integer integers")
_NATURAL = words("positive natural nonnegative")
_QUANTIFIERS = _CONDITION_WORDS | _NATURAL | _INTEGERS | words("real number numbers value values of")
_HALVES = (WORD + "am", WORD + "pm")
_SAME_BRACKETS = ({":", "to"}, {"to", "[]"})
# The letter of a choice in a multiple-choice question, alone or followed by the text of the choice.
_CHOICE = re.compile(
    r'(\( )?"?([A-Ha-h])(?(1) \))(?:(?(1)|[ ](?:\)|(?<=[A-H] )[.:]))((?: (?:[\d"]|\\frac|\\sqrt|\\\$).*)?))?'
)

Item = TypeVar("Item")


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer and its parts.

    kind: "value", "list" (unordered), "set", "tuple" (also an interval, a ratio or a clock time), "matrix", "relation",
        "complement" (all reals except the items) or "residue" (a value modulo its item).
    brackets: the brackets or separator of a tuple, the number of rows of a matrix, or "and" or "or" for a list.
    name: tokens of the variable or function to which the answer assigns the value: x in `x = 5` and `x \\in S`.
    operators: the operators between the sides of a relation or of `x = 5`.
    condition: tokens of the condition under which the answer holds: `n \\ge 1` in `2n, n \\ge 1`.
    """

    kind: str
    tokens: tuple[str, ...]
    items: tuple[ParsedAnswer, ...] = ()
    brackets: str = ""
    name: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    condition: tuple[str, ...] = ()


def equal_answers(left: Sequence[str], right: Sequence[str]) -> bool:
    """Return whether two answers, given as tokens, are equal."""
    if not left or not right:
        return False
    try:
        return (
            _normalize(left) == _normalize(right)
            or _equal_choices(left, right)
            or _equal_parsed(_parse_all(left), _parse_all(right))
        )
    except RecursionError:
        return False


def is_evaluated_integer(tokens: Sequence[str]) -> bool:
    """Return whether an answer (as tokens) is an integer that needs no evaluation: 391, x = -391, 391.0, 391 cm."""
    try:
        answer = _parse_all(tokens)
    except RecursionError:
        return False
    digits = [token for token in split_unit(answer.tokens)[0] if token not in "{}+-()"]
    return answer.kind == "value" and len(digits) == 1 and bool(re.fullmatch(r"\d+(\.0*)?", digits[0]))


def _equal_choices(left: Sequence[str], right: Sequence[str]) -> bool:
    """Return whether two answers are the same letter of a choice; at most one of them may also have the text of the
    choice."""
    if len(left[0]) > 2 or len(right[0]) > 2:
        return False
    texts = (" ".join(token for token in tokens if token not in "{}") for tokens in (left, right))
    first, second = map(_CHOICE.fullmatch, texts)
    return bool(first and second and first[2].upper() == second[2].upper() and not (first[3] and second[3]))


# ---- parsing ---------------------------------------------------------------------------------------------------------


def _parse_all(tokens: Sequence[str]) -> ParsedAnswer:
    """Parse an answer; a set of one value is parsed as this value."""
    answer = _parse(tuple(tokens))
    if answer.kind == "set" and len(answer.items) == 1 and answer.items[0].kind != "set":
        return replace(answer.items[0], name=answer.items[0].name or answer.name)
    return answer


def _parse(tokens: tuple[str, ...]) -> ParsedAnswer:
    if _STRUCTURE.isdisjoint(tokens) and not _STRUCTURE_PREFIX.search("".join(tokens)):
        return ParsedAnswer("value", tokens)
    if r"\implies" in tokens and not set(_RELATIONS).isdisjoint(tokens[: tokens.index(r"\implies")]):
        tokens = tokens[len(tokens) - tokens[::-1].index(r"\implies") :] or tokens
    lead = ""
    while len(tokens) > 1 and tokens[0].lower() in _BEFORE_ANSWER:
        lead, tokens = tokens[0].lower(), tokens[1:]
    if lead and len(tokens) > 1 and tokens[0] in (":", "."):
        tokens = tokens[1:]
    if phrase := _PHRASES.get(_to_text(tokens)):
        tokens = (phrase,)
    for read in _READERS:
        if (answer := read(tokens)) is not None:
            return replace(answer, brackets="[]") if lead == f"{WORD}from" and answer.brackets == "to" else answer
    return ParsedAnswer("value", tokens)


def _read_exact_side(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `5/12 \\approx 0.4167` as 5/12, but not `x \\approx 0.4167`."""
    exact = _split(tokens, (r"\approx",))[0]
    return None if exact == tokens or not exact or _can_name_answer(exact) else _parse(exact)


def _read_except(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `all real numbers except 2 and 3` and `\\mathbb{R} \\setminus \\{2, 3\\}`."""
    position = next((index for index, token in enumerate(tokens) if token in (f"{WORD}except", r"\setminus", "-")), 0)
    if not position or _PHRASES.get(text := _to_text(tokens[:position]), text) not in (r"\mathbbR", r"\mathbbr"):
        return None
    removed = _parse(tokens[position + 1 :])
    if removed.kind not in ("set", "list") and tokens[position] != f"{WORD}except":
        return None
    return ParsedAnswer("complement", tokens, removed.items or (removed,))


def _read_clock(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `2:30 p.m.` as the ratio 14:30 with the name pm."""
    time = re.fullmatch(r"(\d\d?)(?::(\d+))?", "".join(token for token in tokens[:-1] if token not in ("{", "}")))
    half = tokens[-1].lower()
    if half not in _HALVES or not time:
        return None
    hour = f"{int(time[1]) % 12 + 12 * (half == _HALVES[1])}"
    items = tuple(ParsedAnswer("value", (number,)) for number in (hour, time[2] or "0"))
    return ParsedAnswer("tuple", tokens, items, ":", name=(half,))


def _read_compound(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    compound = join_compound(tokens)
    return None if compound is None else ParsedAnswer("value", tuple(compound))


def _read_condition(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `2n, n \\ge 1`, `2n (n \\ge 1)`, `2n for n \\ge 1` and `2x for all x`."""
    begin = next((index for index, token in enumerate(tokens) if index and token.lower() in _BEFORE_CONDITION), 0)
    if not begin and not _INEQUALITIES.isdisjoint(tokens):
        depths = list(_with_bracket_depth(tokens))
        marks = [index for index, pair in enumerate(depths) if index and pair == (0, "(" if tokens[-1] == ")" else ",")]
        begin = marks[-1] if marks else 0
    value = _strip(tokens[:begin], (",",))
    condition = tuple(token for token in tokens[begin + 1 :] if token not in _CONDITION_WORDS and token != ")")
    letters = [token for token in condition if len(token) == 1 and token.isalpha() and token in value]
    if not letters or not _INEQUALITIES.isdisjoint(value) or r"\in" in value or r"\begin" in "".join(value):
        return None
    if not _QUANTIFIERS.issuperset(token for token in condition if token.startswith(WORD)):
        return None
    if condition[0] in letters and condition[1:2] and condition[1] in _INEQUALITIES:
        return replace(_parse(value), condition=condition)
    is_family = not _INTEGERS.isdisjoint(condition) and _NATURAL.isdisjoint(condition)
    return _parse(value) if _QUANTIFIERS.issuperset(condition[:-1]) and not is_family else None


def _read_family(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `2k\\pi, k \\in \\mathbb{Z}`, where the name k does not matter; drop a condition `x \\in \\mathbb{R}`."""
    if tokens[-1] in _INTEGERS:
        tokens = (*_strip(tokens[:-1], _CONDITION_WORDS), r"\in", r"\mathbbZ")
    elif tokens[-2:-1] and tokens[-2] in _INTEGERS and tokens[-1].isalpha():
        tokens = (*_strip(tokens[:-2], _CONDITION_WORDS), tokens[-1], r"\in", r"\mathbbZ")
    if r"\in" not in tokens[1:]:
        return None
    position = len(tokens) - 1 - tokens[::-1].index(r"\in")
    domain = [token for token in tokens[position + 1 :] if token != ")"]
    rest = _strip(tokens[: max(0, position - 1)], {"(", ",", r"\land", r"\forall", *_CONDITION_WORDS})
    variable = tokens[position - 1]
    if len(domain) != 1 or not domain[0].startswith(r"\mathbb") or variable not in rest:
        return None
    if domain[0] == r"\mathbbR":
        return _parse(rest)
    renamed = tuple(r"\integer" if token == variable else token for token in rest)
    return ParsedAnswer("tuple", tokens, (_parse(renamed),), domain[0])


def _strip(tokens: tuple[str, ...], unwanted: Iterable[str]) -> tuple[str, ...]:
    """Remove unwanted tokens from the end."""
    while tokens and tokens[-1] in unwanted:
        tokens = tokens[:-1]
    return tokens


def _read_residues(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `x \\equiv 1, 4 \\pmod 5`: a value without a modulus has the modulus that follows."""
    if r"\mod" not in tokens or r"\pm" in tokens:
        return _read_signs(tokens) if r"\mod" in tokens else None
    items: list[ParsedAnswer] = []
    modulus: ParsedAnswer | None = None
    for part in reversed(_split(tokens, _SEPARATORS)):
        if r"\mod" in part:
            position = part.index(r"\mod")
            braced = part[position - 1] == "(" and part[-1] == ")"
            part, after = part[: position - braced], part[position + 1 : len(part) - braced]
            modulus = _parse(after) if after else None
        sides = _split(part, (r"\equiv", "="))
        if modulus is None or not all(sides):
            return None
        items.append(ParsedAnswer("residue", sides[-1], (modulus,), name=_name(sides[0]) if len(sides) > 1 else ()))
    return items[0] if len(items) == 1 else ParsedAnswer("list", tokens, tuple(items))


def _read_list(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    parts = _split(tokens, _SEPARATORS)
    kinds = [kind for token, kind in _SEPARATORS.items() if token in tokens]
    return _make_list(tokens, parts, kinds[-1]) if len(parts) > 1 else None


def _read_signs(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `1 \\pm 2` as -1, 3. Several \\pm are independent, unless there is a \\mp or there are too many."""
    if r"\pm" not in tokens or (tokens[0] == r"\{" and _index_of_closing_bracket(tokens) == len(tokens) - 1):
        return None
    num_signs = tokens.count(r"\pm")
    parts = []
    for signs in itertools.product("+-", repeat=1 if r"\mp" in tokens or num_signs > 3 else num_signs):
        following = itertools.cycle(signs)
        opposite = "-" if signs[0] == "+" else "+"
        parts.append(
            tuple(next(following) if token == r"\pm" else opposite if token == r"\mp" else token for token in tokens)
        )
    return _make_list(tokens, parts)


def _read_relation(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `x = 5` and `x \\in S` as the value or set with the name x, `x \\ne 5` as a complement, and other relations
    (`a < b = c`)."""
    if tokens[0] == "<" and tokens[-1] == ">":
        return _parse((r"\langle", *tokens[1:-1], r"\rangle"))
    sides = _split(tokens, (r"\in",))
    if len(sides) > 1:
        return replace(_parse(sides[-1]), name=_name(sides[0])) if sides[-1] else None
    sides = _split(tokens, _RELATIONS)
    if len(sides) == 1:
        return None
    operators = tuple(token for depth, token in _with_bracket_depth(tokens) if depth == 0 and token in _RELATIONS)
    if not all(sides):
        return ParsedAnswer("value", tokens)
    names = [_can_name_answer(side) for side in sides]
    if set(operators) <= {"=", r"\approx"} and not any(names[1:-1]) and (names[0] or (names[-1] and len(sides) == 2)):
        name, value = (sides[0], sides[-1]) if names[0] else (sides[-1], sides[0])
        return _assign(_name(name), replace(_parse(value), operators=operators, tokens=value))
    if operators == (r"\ne",) and any(names):
        name, value = sides if names[0] else sides[::-1]
        return ParsedAnswer("complement", tokens, (_parse(value),), name=_name(name))
    return ParsedAnswer("relation", tokens, tuple(ParsedAnswer("value", side) for side in sides), operators=operators)


def _read_ratio(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    to = f"{WORD}to"
    sides = _split(tokens, (":", to))
    if len(sides) < 2 or not all(sides):
        return None
    return ParsedAnswer("tuple", tokens, tuple(map(_parse, sides)), "to" if to in tokens else ":")


def _read_union(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read unions, and intersections of two rays."""
    if len(parts := _split(tokens, (r"\cup",))) > 1:
        return _make_list(tokens, parts, "or")
    if len(parts := _split(tokens, (r"\cap",))) == 2 and all(parts):
        return _intersect_rays(tuple(_to_interval(_parse(part)) for part in parts))
    return None


def _read_group(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read a set, a tuple or interval, or a value in brackets."""
    if tokens == (r"\emptyset",):
        return ParsedAnswer("set", tokens)
    if tokens == (r"\mathbbR",):
        return ParsedAnswer("tuple", tokens, tuple(ParsedAnswer("value", tuple(end)) for end in _REAL_ENDS), "()")
    if len(tokens) > 4 and len(tokens[0]) == 1 and tokens[0].isupper() and tokens[1] == "(":  # the point P(1, 2)
        point = _read_group(tokens[1:])
        return replace(point, name=tokens[:1]) if point and point.kind == "tuple" else None
    if tokens[0] not in _BRACKETS or _index_of_closing_bracket(tokens) != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    parts = [part for part in _split(inner, (",",)) if part]
    if tokens[0] == r"\{" or (tokens[0] == "{" and len(parts) > 1):
        return _parse_set(tokens, inner, parts)
    if len(parts) > 1:
        brackets = "()" if tokens[0] == r"\langle" else tokens[0] + tokens[-1]
        items = tuple(map(_parse, parts))
        if brackets == "[]" and all(item.kind == "tuple" and item.brackets == "[]" for item in items):
            return ParsedAnswer("matrix", tokens, sum((item.items for item in items), ()), f"{len(items)}")
        return ParsedAnswer("tuple", tokens, items, brackets)
    if inner and (tokens[0] == "{" or (tokens[0] in ("(", "[") and inner[0] in _MATRICES)):
        # Of braces in braces only the innermost pair has a meaning; a recursion for each would take quadratic time.
        while inner[:2] == ("{", "{") and _index_of_closing_bracket(inner[1:-1]) == len(inner) - 3:
            inner = inner[1:-1]
        return _parse(inner)
    return None


def _parse_set(tokens: tuple[str, ...], inner: tuple[str, ...], parts: list[tuple[str, ...]]) -> ParsedAnswer:
    condition = _split(inner, ("|", ":"))
    if len(condition) != 2 or not all(condition):
        items = [item.items if item.kind == "list" else (item,) for item in map(_parse, parts)]
        return ParsedAnswer("set", tokens, sum(items, ()))
    domain = _split(condition[0], (r"\in",))[1:]
    answer = _parse(condition[1])
    if not domain or domain[0] in ((r"\mathbbR",), ()):
        return answer
    return ParsedAnswer("tuple", tokens, (answer, _parse(domain[0])), "|")


def _read_matrix(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read a system of equations, a piecewise function, or a matrix with an optional scalar factor."""
    begin = next((index for index, token in enumerate(tokens) if token.startswith(r"\begin")), None)
    if begin is None:
        return None
    depths = _with_bracket_depth(tokens[begin:])
    end = next((begin + index for index, (depth, _) in enumerate(depths) if depth == 0 and index), -1)
    rows = [row for row in _split(tokens[begin + 1 : end], (r"\\",)) if row]
    before, after = tokens[:begin], tokens[end + 1 :]
    if not after and ((tokens[begin] in _SYSTEMS and not before) or before == (r"\{",)):
        return _parse_system(tokens, rows)
    if end < begin or tokens[begin] not in _MATRICES:
        return None
    factor = _strip(before, (r"\cdot",)) + after[after[:1] == (r"\cdot",) :]
    factor = (*factor, "1") if factor == ("-",) else factor
    if any(token in ("+", "-") for token in factor[1:]) or any(token.startswith(r"\begin") for token in factor):
        return None
    entries = [entry for row in rows for entry in _split(row, ("&",)) if entry]
    if factor:
        entries = [("(", *factor, ")", "(", *entry, ")") for entry in entries]
    return ParsedAnswer("matrix", tokens, tuple(map(_parse, entries)), f"{len(rows)}")


def _parse_system(tokens: tuple[str, ...], rows: list[tuple[str, ...]]) -> ParsedAnswer:
    """Parse rows as equations (`x &= 1`), or as the values and conditions of a piecewise function (`x & x > 0`)."""
    parts = []
    for row in rows:
        cells = [_strip(cell, (",", ".")) for cell in _split(row, ("&",)) if cell]
        if len(cells) == 2 and cells[0] and cells[1] and cells[1][0] not in _RELATIONS:
            condition = tuple(token for token in cells[1] if token not in _CONDITION_WORDS) or (f"{WORD}else",)
            parts.append(ParsedAnswer("tuple", row, (_parse(cells[0]), _parse(condition)), "&"))
        elif joined := _strip(sum(cells, ()), (",", ".")):
            parts.append(_parse(joined))
    return _join_items(tokens, parts)


def _make_list(tokens: tuple[str, ...], parts: Iterable[tuple[str, ...]], kind: str = "") -> ParsedAnswer:
    """Parse `parts` as a list; the items of nested lists, and of sets of a union, become its items."""
    items: list[ParsedAnswer] = []
    for part in filter(None, parts):
        if part[-2:] == (r"\in", r"\mathbbR") and len(part) < len(tokens):
            continue
        item = _parse(part)
        if item.kind == "list" or (item.kind == "set" and kind == "or"):
            items += [replace(inner, name=inner.name or item.name) for inner in item.items]
        else:
            items.append(item)
    return _join_items(tokens, items, kind)


def _join_items(tokens: tuple[str, ...], items: list[ParsedAnswer], kind: str = "") -> ParsedAnswer:
    """Return a single item as it is, `x = 1, y = 2` as the point (x, y) = (1, 2), and other items as a list."""
    if len(items) == 1:
        return items[0]
    names = ["".join(item.name) for item in items]
    if items and items[0].kind == "complement" and all(item.kind == "complement" or not item.name for item in items):
        removed = (item.items if item.kind == "complement" else (item,) for item in items)
        return replace(items[0], items=sum(removed, ()))
    if all(name.startswith("x_") or not name for name in names):  # x_1 = 2, x_2 = 3 are two roots
        items = [replace(item, name=item.name[:1]) for item in items]
    elif items and all(names) and len(set(names)) == len(names) and all(item.kind == "value" for item in items):
        ordered = [replace(item, name=()) for _, item in sorted(zip(names, items), key=lambda pair: pair[0])]
        return ParsedAnswer("tuple", tokens, tuple(ordered), "()", tuple(sorted(names)))
    return ParsedAnswer("list", tokens, tuple(items), kind)


def _assign(name: tuple[str, ...], answer: ParsedAnswer) -> ParsedAnswer:
    """Return `answer` with a name; (y, x) = (2, 1) becomes (x, y) = (1, 2)."""
    names = ["".join(part) for part in _split(name[1:-1], (",",))]
    if name[0] != "(" or answer.kind != "tuple" or not 1 < len(names) == len(answer.items):
        return replace(answer, name=name)
    ordered = sorted(zip(names, answer.items), key=lambda pair: pair[0])
    return replace(answer, items=tuple(item for _, item in ordered), name=tuple(sorted(names)))


def _name(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name in normal form; dy/dx, y' and f'(x) are the same name."""
    name = _normalize(tokens)
    derivative = _DERIVATIVE.fullmatch("".join(name))
    return (derivative[1],) if derivative else name


def _can_name_answer(tokens: tuple[str, ...]) -> bool:
    """Return whether the tokens can be the name in `name = answer`: x, f(x), a_n, (x, y), \\angle ABC, Area, y'."""
    if tokens in (("e",), ("i",)):
        return False
    return all(
        token in _NAME_SYMBOLS
        or token.removeprefix(WORD).isalpha()
        or (token[0] == "\\" and token[1:].isalpha() and token not in _NOT_IN_NAMES)
        or (token.isdigit() and "_" in tokens[max(0, index - 4) : index])
        for index, token in enumerate(tokens)
    )


def _with_bracket_depth(tokens: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Yield (number of brackets around the token, token) for every token."""
    depth = 0
    for token in tokens:
        closing = token in _CLOSING or token.startswith(r"\end")
        depth -= closing
        yield depth, token
        depth += token in _BRACKETS or token.startswith(r"\begin")


def _split(tokens: Sequence[str], separators: Iterable[str]) -> list[tuple[str, ...]]:
    """Split tokens at those separators that are not inside brackets."""
    if not any(separator in tokens for separator in separators):
        return [tuple(tokens)]
    parts: list[list[str]] = [[]]
    for depth, token in _with_bracket_depth(tokens):
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return [tuple(part) for part in parts]


def _index_of_closing_bracket(tokens: Sequence[str]) -> int:
    """Return the index of the bracket that closes the first token, or -1. `(` may be closed by `]`, and `[` by `)`."""
    for index, (depth, token) in enumerate(_with_bracket_depth(tokens)):
        if depth == 0 and index and token in _CLOSING:
            matching = token == _BRACKETS[tokens[0]] or {tokens[0], token} <= {"(", ")", "[", "]"}
            return index if matching else -1
    return -1


def _normalize(tokens: Sequence[str]) -> tuple[str, ...]:
    """Remove braces around a single token, and convert words that are not units to lower case."""
    out: list[str] = []
    for token in tokens:
        is_word = token.startswith(WORD) and len(token) > 2
        out.append(token.lower() if is_word and not known_unit(token[1:]) else token.removeprefix(WORD))
        if token == "}" and len(out) > 2 and out[-3] == "{":
            out[-3:] = [out[-2]]
    return tuple(out)


_READERS: tuple[Callable[[tuple[str, ...]], ParsedAnswer | None], ...] = (
    _read_except, _read_exact_side, _read_clock, _read_compound, _read_condition, _read_family, _read_residues,
    _read_list, _read_signs, _read_relation, _read_ratio, _read_union, _read_group, _read_matrix,
)  # fmt: skip


# ---- comparison ------------------------------------------------------------------------------------------------------


def _equal_parsed(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if left.condition and right.condition and not _equal_parsed(_parse(left.condition), _parse(right.condition)):
        return False
    right = _rename_argument(left, right)
    if left.kind == right.kind == "relation" or (left.name and right.name and left.name != right.name):
        return _equal_relations(left, right)
    left, right = _to_interval(left), _to_interval(right)
    kinds = {left.kind, right.kind}
    if kinds <= {"list", "set"} or kinds == {"complement"}:
        return _equal_collections(left, right)
    if "relation" in kinds:
        return _equal_relations(left, right)
    if kinds == {"value"}:
        return _equal_values(left, right) or bool(left.name and right.name and _equal_relations(left, right))
    if kinds == {"residue"}:
        return _equal_residues(left, right)
    if len(kinds) > 1:
        return _equal_across_kinds(left, right) or _equal_across_kinds(right, left)
    if left.brackets == right.brackets == ":" and (left.name + right.name) in (_HALVES[:1], _HALVES[1:]):
        return _equal_clocks(left, right)
    same_shape = left.brackets == right.brackets or {left.brackets, right.brackets} in _SAME_BRACKETS
    return (
        same_shape
        and (not left.name or not right.name or left.name == right.name)
        and _equal_in_order(left.items, right.items)
    )


def _rename_argument(left: ParsedAnswer, right: ParsedAnswer) -> ParsedAnswer:
    """Return `right` with the names of `left`: f(t) = 2t as f(x) = 2x if `left` has the name f(x), and y = 2x as
    f(x) = 2x."""
    names = left.name, right.name
    if {"".join(name) for name in names} == {"y", "f(x)"}:
        return replace(right, name=left.name)
    if names[0] == names[1] or len(names[0]) != 4 or len(names[1]) != 4 or names[0][:2] != names[1][:2]:
        return right
    new, old = names[0][2], names[1][2]
    if right.kind != "value" or names[0][1] != "(" or not (new + old).isalpha() or new in right.tokens:
        return right
    return replace(right, name=left.name, tokens=tuple(new if token == old else token for token in right.tokens))


def _equal_in_order(left: Sequence[ParsedAnswer], right: Sequence[ParsedAnswer]) -> bool:
    return len(left) == len(right) and all(map(_equal_parsed, left, right))


def _equal_collections(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Compare two lists, sets or complements. `A or B` is not `A and B`; `1 or 2` and `1 and 2` are the same roots."""
    is_logic = {left.brackets, right.brackets} == {"and", "or"}
    if is_logic and all(len(item.tokens) == 1 and item.tokens[0].removeprefix(WORD).isalpha() for item in left.items):
        return False
    if left.kind == right.kind == "set":
        return all(
            any(_equal_parsed(item, other) for other in others.items)
            for items, others in ((left, right), (right, left))
            for item in items.items
        )
    return _equal_unordered(left.items, right.items, _equal_parsed)


def _equal_across_kinds(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether the point `x = 1, y = 2` equals the list `1, 2`, the vector (2, 3) equals 2i + 3j, or the
    combinations C(5, 2) equal a number."""
    if left.kind not in ("tuple", "matrix"):
        return False
    if right.kind == "list":
        return left.kind == "tuple" and bool(left.name) and _equal_in_order(left.items, right.items)
    if right.kind != "value":
        return False
    parts = [("(", *item.tokens, ")") for item in left.items]
    if left.name == ("C",) and len(parts) == 2:
        return _equal_values(ParsedAnswer("value", (r"\binom", *parts[0], *parts[1])), right)
    if left.brackets not in ("()", "2", "3") or not 2 <= len(parts) <= 3 or not {"j", "k"} & set(right.tokens):
        return False
    basis = ((r"\basis",), ("j",), ("k",))  # not i, which is the imaginary unit
    vector = sum(((*part, r"\cdot", *unit, "+") for part, unit in zip(parts, basis)), ())[:-1]
    tokens = tuple(r"\basis" if token == "i" else token for token in right.tokens)
    return _equal_values(ParsedAnswer("value", vector), ParsedAnswer("value", tokens))


def _equal_clocks(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether two clock times are equal if only one of them has a.m. or p.m.: 2:30 p.m. equals both 2:30 and
    14:30."""
    named, plain = (left, right) if left.name else (right, left)
    hours = int(named.items[0].tokens[0])
    twelve = ParsedAnswer("value", (f"{(hours - 1) % 12 + 1}",))
    return any(_equal_in_order((hour, *named.items[1:]), plain.items) for hour in (named.items[0], twelve))


def _equal_residues(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if not _equal_parsed(*left.items, *right.items):
        return False
    try:
        left_value, right_value, modulus = (
            parse_expression(list(tokens)) for tokens in (left.tokens, right.tokens, left.items[0].tokens)
        )
    except ExpressionError:
        return False
    quotient = ("/", ("-", left_value, right_value), modulus)
    return same_value(quotient, ("floor", quotient))


def _equal_unordered(left: Sequence[Item], right: Sequence[Item], equal: Callable[[Item, Item], bool]) -> bool:
    """Return whether two lists have equal items in any order."""
    rest = list(right)
    if len(left) != len(right):
        return False
    for item in left:
        match = next((index for index, other in enumerate(rest) if equal(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _equal_values(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if _number_with_base(left.tokens) or _number_with_base(right.tokens):
        return _number_with_base(left.tokens) == _number_with_base(right.tokens)
    (a, unit_a), (b, unit_b) = split_unit(left.tokens), split_unit(right.tokens)
    if _is_prose(a) or _is_prose(b):
        return _prose_key(left.tokens) == _prose_key(right.tokens) != ""
    if unit_a and not unit_b:
        b, unit_b = split_unit(b, letters=True)
    elif unit_b and not unit_a:
        a, unit_a = split_unit(a, letters=True)
    a, b = _rename_constant(a, b), _rename_constant(b, a)
    try:
        return same_quantity(parse_expression(a), unit_a, parse_expression(b), unit_b)
    except ExpressionError:
        return False


def _rename_constant(tokens: list[str], others: list[str]) -> list[str]:
    """Rename the constant of integration c in `x^2 + c` to C if `others` has C. The c of `ax + c` stays, because it may
    be a coefficient like a."""
    letters = {token for token in tokens if len(token) == 1 and token.isalpha()} - {"e", "i", "d"}
    if len(letters) != 2 or "c" not in letters or not {"C", f"{WORD}C"} & set(others):
        return tokens
    return re.sub(r"(?<!\S)(?<![^+] )c(?= [+-]|$)", "C", " ".join(tokens)).split()


def _to_text(tokens: Sequence[str]) -> str:
    """Join the tokens to a text in lower case, without spaces, brackets and punctuation."""
    return "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}[].,").lower()


def _prose_key(tokens: Sequence[str]) -> str:
    """Return the words of an answer as one text for comparison: without a leading article and the final s of a phrase;
    a number at the beginning is moved to the end."""
    words = [token.removeprefix(WORD).lower() for token in tokens if token not in "{}."]
    if len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    if words and words[0].isdecimal():
        words = [*words[1:], words[0]]
    text = re.sub(r"(?<=[a-z]),|,(?=[a-z])", "", "".join(words))
    return _SYNONYMS.get(text, text.removesuffix("s") if len(words) > 1 and len(words[-1]) > 3 else text)


def _is_prose(tokens: Sequence[str]) -> bool:
    """Return whether the tokens must be compared as text: they contain words, or are "no" (as products of letters, "no"
    and "on" would be equal)."""
    return any(token.startswith(WORD) and len(token) > 2 for token in tokens) or tuple(tokens) == ("n", "o")


def _number_with_base(tokens: Sequence[str]) -> str:
    """Return a number with a base, such as `413_8`, as text; an empty string if the tokens are not such a number."""
    text = "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}")
    text = text.replace("base", "_").replace("__", "_")
    number = re.fullmatch(r"([0-9A-Z]+)_(\d+)", text)
    return text if number and (re.search(r"\d", number[1]) or int(number[2][:3]) > 10) else ""


def _to_interval(answer: ParsedAnswer) -> ParsedAnswer:
    """Convert `1 < x \\le 5` to (1, 5], and `x > 1, x < 5` to (1, 5); return anything else unchanged."""
    if answer.kind == "list":
        items = tuple(map(_to_interval, answer.items))
        merged = _merge_rays(items) or (None if answer.brackets == "or" else _intersect_rays(items))
        return merged or replace(answer, items=items)
    operators, sides = answer.operators, answer.items
    if answer.kind != "relation" or len(operators) > 2:
        return answer
    if set(operators) <= set(_FLIPPED):
        operators, sides = tuple(_FLIPPED[operator] for operator in operators[::-1]), sides[::-1]
    if not set(operators) <= {"<", r"\le"}:
        return answer
    closed = [operator == r"\le" for operator in operators]
    low_end, high_end = (ParsedAnswer("value", tuple(end)) for end in _REAL_ENDS)
    if len(sides) == 2:  # x < 5 is -oo < x < 5
        is_high = _can_name_answer(sides[0].tokens)
        sides, closed = ((low_end, *sides), [False, *closed]) if is_high else ((*sides, high_end), [*closed, False])
    if not _can_name_answer(sides[1].tokens):
        return answer
    brackets = "(["[closed[0]] + ")]"[closed[1]]
    return ParsedAnswer("tuple", answer.tokens, (sides[0], sides[2]), brackets, _name(sides[1].tokens))


def _rays(items: Sequence[ParsedAnswer]) -> tuple[ParsedAnswer, ParsedAnswer] | None:
    """Return (-oo, a) and (b, oo) in this order if the items are two such intervals with the same name."""
    if len(items) != 2 or any(item.kind != "tuple" or len(item.items) != 2 for item in items):
        return None
    for low, high in (items, items[::-1]):
        low_end, high_end = low.items[0].tokens, high.items[1].tokens[-1:]
        if low_end == ("-", r"\infty") and high_end == (r"\infty",) and low.name == high.name:
            return low, high
    return None


def _merge_rays(items: Sequence[ParsedAnswer]) -> ParsedAnswer | None:
    """Return (-oo, a), (a, b) and (b, oo) as the complement of a and b."""
    for parts in (items, items[::-1]):
        if not parts or any(item.kind != "tuple" or len(item.items) != 2 or item.brackets != "()" for item in parts):
            return None
        ends = [part.items[1] for part in parts[:-1]]
        if _rays((parts[0], parts[-1])) == (parts[0], parts[-1]) and all(
            _equal_values(end, part.items[0]) for end, part in zip(ends, parts[1:])
        ):
            return ParsedAnswer("complement", parts[0].tokens, tuple(ends))
    return None


def _intersect_rays(items: Sequence[ParsedAnswer]) -> ParsedAnswer | None:
    """Return the interval in which (-oo, b) and (a, oo) with a < b overlap."""
    rays = _rays(items)
    if rays is None:
        return None
    high, low = rays[0].items[1], rays[1].items[0]
    try:
        overlap = is_less(parse_expression(list(low.tokens)), parse_expression(list(high.tokens)))
    except ExpressionError:
        return None
    brackets = rays[1].brackets[0] + rays[0].brackets[1]
    return ParsedAnswer("tuple", low.tokens, (low, high), brackets, rays[0].name) if overlap else None


def _equal_relations(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether two relations have equal steps in any order: a < b < c has the steps a < b and b < c. A step is
    compared as a - b < 0, up to a constant factor: `y = 2x` is `2x - y = 0`. Congruences (\\equiv) are equal if their
    sides are equal. The equation `a + b = 7` as `left` also equals the value 7 as `right`."""
    if r"\equiv" in left.operators or r"\equiv" in right.operators:
        return left.operators == right.operators and _equal_in_order(left.items, right.items)
    left_steps, right_steps = _steps(left), _steps(right)
    if left_steps and right_steps:
        return _equal_unordered(left_steps, right_steps, _equal_steps)
    if left.kind == "relation" and right.kind == "value" and set(left.operators) <= {"=", r"\approx"}:
        return _equal_values(left.items[-1], right)
    return False


def _steps(answer: ParsedAnswer) -> list[tuple[str, list[str]]]:
    """Return (operator, tokens of the difference of the sides) for each step of a relation; a > b is read as b < a."""
    sides = [item.tokens for item in answer.items] if answer.kind == "relation" else []
    if answer.kind == "value" and answer.name and "=" in answer.operators:
        sides = [answer.name, answer.tokens]
    steps = []
    for operator, low, high in zip(answer.operators, sides, sides[1:]):
        a, b = (high, low) if operator in _FLIPPED else (low, high)
        steps.append((_FLIPPED.get(operator, operator), ["(", *a, ")", "-", "(", *b, ")"]))
    return steps


def _equal_steps(left: tuple[str, list[str]], right: tuple[str, list[str]]) -> bool:
    """Return whether two steps are equal up to a constant factor, which must be positive for an inequality."""
    if left[0] != right[0]:
        return False
    try:
        ratio = sign_of_constant_ratio(parse_expression(left[1]), parse_expression(right[1]))
    except ExpressionError:
        return False
    return ratio == 1 or (ratio == -1 and left[0] in ("=", r"\ne", r"\approx"))
