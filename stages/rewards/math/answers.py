"""Parse and compare answers: lists, sets, tuples, intervals, matrices, relations, and values with units."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from penstock.stages.rewards.math.latex import ExpressionError, parse_expression
from penstock.stages.rewards.math.numeric import is_integer, is_less, sign_of_constant_ratio
from penstock.stages.rewards.math.tokens import WORD
from penstock.stages.rewards.math.units import join_compound, same_quantity, split_unit

_BRACKETS = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle"}
_CLOSING = set(_BRACKETS.values())
_MATRICES = {rf"\begin{name}" for name in ("pmatrix", "bmatrix", "Bmatrix", "matrix", "array", "smallmatrix")}
_SYSTEMS = {rf"\begin{name}" for name in ("cases", "aligned", "align", "gathered", "rcases")}
_FLIPPED = {">": "<", r"\ge": r"\le"}
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx", r"\equiv")
_SEPARATORS = (",", r"\land", r"\lor")
# Tokens without any of these are a value.
_STRUCTURE = {
    *_RELATIONS,
    *_SEPARATORS,
    ":",
    "'",
    "|",
    r"\in",
    r"\pm",
    r"\cup",
    r"\cap",
    r"\mod",
    r"\emptyset",
    r"\sim",
}
_STRUCTURE_PREFIX = re.compile(rf"{WORD}|\\begin|\\mathbb|\\implies|^(?:\(|\[|\{{|\\\{{|\\langle)")
_NAME_SYMBOLS = ("(", ")", ",", "_", "{", "}", "'", r"\angle", r"\triangle", r"\overline")
_NOT_IN_NAMES = (r"\infty", r"\pi", r"\sqrt", r"\frac", r"\cdot", r"\emptyset")
_DERIVATIVE = re.compile(r"d[a-z]/d[a-z]|\\frac\{d[a-z]\}\{d[a-z]\}|[a-zA-Z]('+)(?:\([a-z]\))?")
_REAL_ENDS = ["-", r"\infty"], [r"\infty"]
_BEFORE_ANSWER = {
    r"\approx", r"\sim", r"\equiv", "=", *(WORD + word for word in (
        "about", "approximately", "approx", "roughly", "around", "option", "choice", "answer", "from"))
}  # fmt: skip
_ALL_REALS = ("allrealnumbers", "allreals")
_SYNONYMS = {"dne": "doesnotexist"}
_CONDITION_WORDS = {WORD + word for word in ("for", "where", "with", "if", "when", "all", "any", "is", "an", "some")}
_HALVES = (WORD + "am", WORD + "pm")
_SAME_BRACKETS = ({":", "to"}, {"to", "[]"})

Item = TypeVar("Item")


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer and its parts.

    kind: "value", "list" (unordered), "set", "tuple" (also an interval, a ratio or a clock time), "matrix", "relation",
        "complement" (all reals except the items) or "residue" (a value modulo its item).
    brackets: the brackets or separator of a tuple, the number of rows of a matrix, or "or" for a union.
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
    try:
        return _normalize(left) == _normalize(right) or _equal_parsed(_parse_all(left), _parse_all(right))
    except RecursionError:
        return False


def is_evaluated_integer(tokens: Sequence[str]) -> bool:
    """Return whether an answer (as tokens) is an integer that needs no evaluation: 391, x = -391, 391.0, 391 cm."""
    try:
        answer = _parse_all(tokens)
    except RecursionError:
        return False
    digits, _ = split_unit(answer.tokens)
    digits = [token for token in digits if token not in "{}+-()"]
    return (
        answer.kind == "value"
        and len(digits) == 1
        and digits[0].partition(".")[0].isdecimal()
        and not digits[0].partition(".")[2].strip("0")
    )


# ---- parsing ---------------------------------------------------------------------------------------------------------


def _parse_all(tokens: Sequence[str]) -> ParsedAnswer:
    """Parse an answer; a set of one value is this value."""
    answer = _parse(tuple(tokens))
    if answer.kind == "set" and len(answer.items) == 1 and answer.items[0].kind != "set":
        return replace(answer.items[0], name=answer.items[0].name or answer.name)
    return answer


def _parse(tokens: tuple[str, ...]) -> ParsedAnswer:
    if _STRUCTURE.isdisjoint(tokens) and not _STRUCTURE_PREFIX.search("".join(tokens)):
        return ParsedAnswer("value", tokens)
    if r"\implies" in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(r"\implies") :] or tokens
    lead = ""
    while len(tokens) > 1 and tokens[0].lower() in _BEFORE_ANSWER:
        lead, tokens = tokens[0].lower(), tokens[1:]
    if lead and len(tokens) > 1 and tokens[0] in (":", "."):
        tokens = tokens[1:]
    if _to_text(tokens) in _ALL_REALS:
        tokens = (r"\mathbbR",)
    for read in _READERS:
        if (answer := read(tokens)) is not None:
            from_to = lead == f"{WORD}from" and answer.brackets == "to"
            return replace(answer, brackets="[]") if from_to else answer
    return ParsedAnswer("value", tokens)


def _read_exact_side(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `5/12 \\approx 0.4167` as 5/12, but not `x \\approx 0.4167`."""
    if r"\approx" not in tokens[1:]:
        return None
    exact = _split_outside_brackets(tokens, (r"\approx",))[0]
    return None if exact == tokens or not exact or _can_name_answer(exact) else _parse(exact)


def _read_clock(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `2:30 p.m.` as the ratio 14:30 with the name pm."""
    digits = [token for token in tokens[:-1] if token not in ("{", "}")]
    hour, _, minutes = "".join(digits).partition(":")
    if tokens[-1] not in _HALVES or not hour.isdecimal() or len(hour) > 2 or not (minutes or "0").isdecimal():
        return None
    hour = f"{int(hour) % 12 + 12 * (tokens[-1] == _HALVES[1])}"
    items = tuple(ParsedAnswer("value", (number,)) for number in (hour, minutes or "0"))
    return ParsedAnswer("tuple", tokens, items, ":", name=(tokens[-1],))


def _read_compound(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    compound = join_compound(tokens)
    return None if compound is None else ParsedAnswer("value", tuple(compound))


def _read_family(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `2k\\pi, k \\in \\mathbb{Z}`, where the name k does not matter; drop a condition `x \\in \\mathbb{R}`."""
    if tokens[-1] in (f"{WORD}integer", f"{WORD}integers"):
        tokens = (*_strip(tokens[:-1], 0, _CONDITION_WORDS), r"\in", r"\mathbbZ")
    if r"\in" not in tokens[1:]:
        return None
    position = len(tokens) - 1 - tokens[::-1].index(r"\in")
    domain = [token for token in tokens[position + 1 :] if token != ")"]
    rest = _strip(tokens[: max(0, position - 1)], 0, {"(", ",", r"\land", r"\forall", *_CONDITION_WORDS})
    variable = tokens[position - 1]
    if len(domain) != 1 or not domain[0].startswith(r"\mathbb") or variable not in rest:
        return None
    if domain[0] == r"\mathbbR":
        return _parse(rest)
    renamed = tuple(r"\integer" if token == variable else token for token in rest)
    return ParsedAnswer("tuple", tokens, (_parse(renamed),), domain[0])


def _strip(tokens: tuple[str, ...], begin: int, unwanted: set[str]) -> tuple[str, ...]:
    """Remove unwanted tokens from the end."""
    end = len(tokens)
    while end > begin and tokens[end - 1] in unwanted:
        end -= 1
    return tokens[begin:end]


def _read_residues(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read `x \\equiv 1, 4 \\pmod 5`: a value without a modulus has the modulus that follows."""
    if r"\mod" not in tokens or r"\pm" in tokens:
        return _read_signs(tokens) if r"\mod" in tokens else None
    items: list[ParsedAnswer] = []
    modulus: ParsedAnswer | None = None
    for part in reversed(_split_outside_brackets(tokens, _SEPARATORS)):
        if r"\mod" in part:
            position = part.index(r"\mod")
            braced = part[position - 1] == "(" and part[-1] == ")"
            part, after = part[: position - braced], part[position + 1 : len(part) - braced]
            modulus = _parse(after) if after else None
        sides = _split_outside_brackets(part, (r"\equiv", "="))
        if modulus is None or not all(sides):
            return None
        items.append(ParsedAnswer("residue", sides[-1], (modulus,), name=_name(sides[0]) if len(sides) > 1 else ()))
    return items[0] if len(items) == 1 else ParsedAnswer("list", tokens, tuple(items))


def _read_list(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    parts = _split_outside_brackets(tokens, _SEPARATORS)
    return _make_list(tokens, parts, r"\lor" in tokens) if len(parts) > 1 else None


def _read_signs(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    if r"\pm" not in tokens:
        return None
    signs = {r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"}
    return _make_list(tokens, [tuple(sign.get(token, token) for token in tokens) for sign in signs])


def _read_relation(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    if tokens[0] == "<" and tokens[-1] == ">":
        return _parse((r"\langle", *tokens[1:-1], r"\rangle"))
    sides = _split_outside_brackets(tokens, (r"\in",))
    if len(sides) > 1:
        return replace(_parse(sides[-1]), name=_name(sides[0])) if sides[-1] else None
    return parse_relation(tokens) if len(_split_outside_brackets(tokens, _RELATIONS)) > 1 else None


def _read_ratio(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    to = f"{WORD}to"
    sides = _split_outside_brackets(tokens, (":", to))
    if len(sides) < 2 or not all(sides):
        return None
    return ParsedAnswer("tuple", tokens, tuple(map(_parse, sides)), "to" if to in tokens else ":")


def _read_union(tokens: tuple[str, ...]) -> ParsedAnswer | None:
    """Read unions, intersections of two rays, and complements in the reals."""
    if len(parts := _split_outside_brackets(tokens, (r"\cup",))) > 1:
        return _make_list(tokens, parts, True)
    if len(parts := _split_outside_brackets(tokens, (r"\cap",))) == 2 and all(parts):
        rays = tuple(_to_interval(_parse(part)) for part in parts)
        return _intersect_rays(rays)
    if tokens[0] == r"\mathbbR" and tokens[1:2] in (("-",), (r"\setminus",)) and tokens[2:]:
        removed = _parse(tokens[2:])
        return ParsedAnswer("complement", tokens, removed.items) if removed.kind == "set" else None
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
    if tokens[0] not in _BRACKETS or index_of_closing_bracket(tokens) != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    if tokens[0] == r"\{" or (tokens[0] == "{" and len(_split_outside_brackets(inner, (",",))) > 1):
        return _parse_set(tokens, inner)
    parts = [part for part in _split_outside_brackets(inner, (",",)) if part]
    if len(parts) > 1:
        brackets = "()" if tokens[0] == r"\langle" else tokens[0] + tokens[-1]
        items = tuple(map(_parse, parts))
        if brackets == "[]" and all(item.kind == "tuple" and item.brackets == "[]" for item in items):
            return ParsedAnswer("matrix", tokens, sum((item.items for item in items), ()), f"{len(items)}")
        return ParsedAnswer("tuple", tokens, items, brackets)
    if inner and (tokens[0] == "{" or (tokens[0] in ("(", "[") and inner[0] in _MATRICES)):
        return _parse(inner)
    return None


def _parse_set(tokens: tuple[str, ...], inner: tuple[str, ...]) -> ParsedAnswer:
    condition = _split_outside_brackets(inner, ("|", ":"))
    if len(condition) != 2 or not all(condition):
        parts = [part for part in _split_outside_brackets(inner, (",",)) if part]
        return ParsedAnswer("set", tokens, tuple(map(_parse, parts)))
    domain = _split_outside_brackets(condition[0], (r"\in",))[1:]
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
    rows = [row for row in _split_outside_brackets(tokens[begin + 1 : end], (r"\\",)) if row]
    before, after = tokens[:begin], tokens[end + 1 :]
    if not after and ((tokens[begin] in _SYSTEMS and not before) or before == (r"\{",)):
        return _parse_system(tokens, rows)
    if end < begin or tokens[begin] not in _MATRICES:
        return None
    factor = _strip(before, 0, {r"\cdot"}) + after[after[:1] == (r"\cdot",) :]
    factor = (*factor, "1") if factor == ("-",) else factor
    if any(token in ("+", "-") for token in factor[1:]) or any(token.startswith(r"\begin") for token in factor):
        return None
    entries = [entry for row in rows for entry in _split_outside_brackets(row, ("&",)) if entry]
    if factor:
        entries = [("(", *factor, ")", "(", *entry, ")") for entry in entries]
    return ParsedAnswer("matrix", tokens, tuple(map(_parse, entries)), f"{len(rows)}")


def _parse_system(tokens: tuple[str, ...], rows: list[tuple[str, ...]]) -> ParsedAnswer:
    """Parse rows as equations (`x &= 1`), or as the values and conditions of a piecewise function (`x & x > 0`)."""
    parts = []
    for row in rows:
        cells = [_strip(cell, 0, {",", "."}) for cell in _split_outside_brackets(row, ("&",)) if cell]
        if len(cells) == 2 and cells[0] and cells[1] and cells[1][0] not in _RELATIONS:
            value, condition = cells
            condition = tuple(token for token in condition if token not in _CONDITION_WORDS)
            parts.append(ParsedAnswer("tuple", row, (_parse(value), _parse(condition or (f"{WORD}else",))), "&"))
        elif joined := _strip(sum(cells, ()), 0, {",", "."}):
            parts.append(_parse(joined))
    return _join_items(tokens, parts)


def _make_list(tokens: tuple[str, ...], parts: Iterable[tuple[str, ...]], union: bool = False) -> ParsedAnswer:
    """Parse `parts` as a list; the items of nested lists, and of sets of a union, become its items."""
    items: list[ParsedAnswer] = []
    for part in filter(None, parts):
        if part[-2:] == (r"\in", r"\mathbbR") and len(part) < len(tokens):
            continue
        item = _parse(part)
        if item.kind == "list" or (item.kind == "set" and union):
            items += [replace(inner, name=inner.name or item.name) for inner in item.items]
        else:
            items.append(item)
    return _join_items(tokens, items, "or" if union else "")


def _join_items(tokens: tuple[str, ...], items: list[ParsedAnswer], brackets: str = "") -> ParsedAnswer:
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
    return ParsedAnswer("list", tokens, tuple(items), brackets)


def parse_relation(tokens: tuple[str, ...]) -> ParsedAnswer:
    """Parse `x = 5` as the value 5 with the name x, and every other relation (`a < b = c`) as kind "relation"."""
    sides = _split_outside_brackets(tokens, _RELATIONS)
    operators = tuple(token for depth, token in _with_bracket_depth(tokens) if depth == 0 and token in _RELATIONS)
    if not all(sides):
        return ParsedAnswer("value", tokens)
    names = [_can_name_answer(side) for side in sides]
    if set(operators) <= {"=", r"\approx"} and (names[0] or (names[-1] and len(sides) == 2)):
        name, value = (sides[0], sides[-1]) if names[0] else (sides[-1], sides[0])
        return _assign(_name(name), replace(_parse(value), operators=operators, tokens=value))
    if operators == (r"\ne",) and any(names):
        name, value = sides if names[0] else sides[::-1]
        return ParsedAnswer("complement", tokens, (_parse(value),), name=_name(name))
    return ParsedAnswer("relation", tokens, tuple(ParsedAnswer("value", side) for side in sides), operators=operators)


def _assign(name: tuple[str, ...], answer: ParsedAnswer) -> ParsedAnswer:
    """Return `answer` with a name; (y, x) = (2, 1) becomes (x, y) = (1, 2)."""
    names = _split_outside_brackets(name[1:-1], (",",))
    if name[0] != "(" or answer.kind != "tuple" or not 1 < len(names) == len(answer.items):
        return replace(answer, name=name)
    texts = ["".join(part) for part in names]
    order = sorted(range(len(texts)), key=lambda index: texts[index])
    return replace(answer, items=tuple(answer.items[index] for index in order), name=tuple(sorted(texts)))


def _name(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return the name in normal form; dy/dx, y' and f'(x) are the same name."""
    name = _normalize(tokens)
    derivative = _DERIVATIVE.fullmatch("".join(name))
    return (derivative[1] or "'",) if derivative else name


def _can_name_answer(tokens: tuple[str, ...]) -> bool:
    """Return whether the tokens can be the name in `name = answer`: x, f(x), a_n, (x, y), \\angle ABC, Area, dy/dx."""
    if tokens in (("e",), ("i",)):
        return False
    if _DERIVATIVE.fullmatch("".join(_normalize(tokens))):
        return True
    for index, token in enumerate(tokens):
        is_letter = token.removeprefix(WORD).isalpha() or (
            token[0] == "\\" and token[1:].isalpha() and token not in _NOT_IN_NAMES
        )
        is_subscript = token.isdigit() and "_" in tokens[max(0, index - 4) : index]
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
    if not any(separator in tokens for separator in separators):
        return [tuple(tokens)]
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


_READERS: tuple[Callable[[tuple[str, ...]], ParsedAnswer | None], ...] = (
    _read_exact_side, _read_clock, _read_compound, _read_family, _read_residues, _read_list, _read_signs,
    _read_relation, _read_ratio, _read_union, _read_group, _read_matrix,
)  # fmt: skip


# ---- comparison ------------------------------------------------------------------------------------------------------


def _equal_parsed(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if left.name and right.name and left.name != right.name:
        return _equal_equations(left, right)
    if left.kind == right.kind == "relation":
        return equal_relations(left, right)
    left, right = _to_interval(left), _to_interval(right)
    kinds = {left.kind, right.kind}
    if kinds <= {"list", "set"} or kinds == {"complement"}:
        return _equal_unordered(left.items, right.items, _equal_parsed)
    if "relation" in kinds:
        return _equal_equations(left, right)
    if kinds == {"value"}:
        return _equal_values(left, right) or bool(left.name and right.name and _equal_equations(left, right))
    if kinds == {"residue"}:
        return _equal_residues(left, right)
    if len(kinds) > 1:
        return _equal_across_kinds(left, right) or _equal_across_kinds(right, left)
    if left.brackets == right.brackets == ":" and bool(left.name) != bool(right.name):
        return _equal_clocks(left, right)
    same_shape = left.brackets == right.brackets or {left.brackets, right.brackets} in _SAME_BRACKETS
    return same_shape and _equal_in_order(left.items, right.items)


def _equal_in_order(left: Sequence[ParsedAnswer], right: Sequence[ParsedAnswer]) -> bool:
    return len(left) == len(right) and all(map(_equal_parsed, left, right))


def _equal_across_kinds(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether the point `x = 1, y = 2` equals the list `1, 2`, or the combinations C(5, 2) equal a number."""
    if left.kind != "tuple" or not left.name:
        return False
    if right.kind == "list":
        return _equal_in_order(left.items, right.items)
    if left.name != ("C",) or right.kind != "value" or len(left.items) != 2:
        return False
    n, k = (item.tokens for item in left.items)
    return _equal_values(ParsedAnswer("value", (r"\binom", "{", *n, "}", "{", *k, "}")), right)


def _equal_clocks(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    """Return whether two times are equal of which one has a.m. or p.m., which the other may lack: 2:30 or 14:30."""
    named, plain = (left, right) if left.name else (right, left)
    hours = int(named.items[0].tokens[0])
    twelve = ParsedAnswer("value", (f"{(hours - 1) % 12 + 1}",))
    return any(_equal_in_order((hour, *named.items[1:]), plain.items) for hour in (named.items[0], twelve))


def _equal_residues(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if not _equal_parsed(*left.items, *right.items):
        return False
    difference = ["(", *left.tokens, ")", "-", "(", *right.tokens, ")"]
    try:
        quotient = parse_expression(["(", *difference, ")", "/", "(", *left.items[0].tokens, ")"])
        return is_integer(quotient)
    except ExpressionError:
        return False


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
    return not rest


def _equal_values(left: ParsedAnswer, right: ParsedAnswer) -> bool:
    if _number_with_base(left.tokens) or _number_with_base(right.tokens):
        return _number_with_base(left.tokens) == _number_with_base(right.tokens)
    (a, unit_a), (b, unit_b) = split_unit(left.tokens), split_unit(right.tokens)
    if _is_prose(a) or _is_prose(b) or (_is_single_letter(_to_text(a)) and _is_single_letter(_to_text(b))):
        left_text, right_text = _prose_key(left.tokens), _prose_key(right.tokens)
        return (
            left_text == right_text != ""
            or _choice_letter(left.tokens) == right_text
            or left_text == _choice_letter(right.tokens)
        )
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
    """Rename the constant of integration in `x^2 + c` if `others` calls it C."""
    return [*tokens[:-1], "C"] if tokens[-2:] == ["+", "c"] and {"C", f"{WORD}C"} & set(others) else tokens


def _to_text(tokens: Sequence[str]) -> str:
    """Join the tokens to a text in lower case, without brackets and punctuation."""
    return "".join(token.removeprefix(WORD) for token in tokens if token not in "(){}[].,'").lower()


def _prose_key(tokens: Sequence[str]) -> str:
    """Return a text for comparison: without an article and the plural of a phrase, and with a number at the end."""
    words = [word for token in tokens if (word := _to_text([token]))]
    if len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    if words and words[0].isdecimal():
        words = [*words[1:], words[0]]
    text = "".join(words)
    return _SYNONYMS.get(text, text.removesuffix("s") if len(words) > 1 and len(words[-1]) > 3 else text)


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
    text = text.replace("base", "_").replace("__", "_")
    digits, underscore, base = text.partition("_")
    is_number = (
        digits.isalnum()
        and digits.upper() == digits
        and (any(map(str.isdigit, digits)) or (base.isdigit() and int(base[:3]) > 10))
    )
    return text if underscore and base.isdigit() and is_number else ""


def _to_interval(answer: ParsedAnswer) -> ParsedAnswer:
    """Convert `1 < x \\le 5` to (1, 5], and `x > 1, x < 5` to (1, 5); return anything else unchanged."""
    if answer.kind == "list":
        items = tuple(map(_to_interval, answer.items))
        merged = _merge_rays(items) or (None if answer.brackets == "or" else _intersect_rays(items))
        return merged or replace(answer, items=items)
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
    except ExpressionError:
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
