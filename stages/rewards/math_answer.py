"""Reward: the boxed answer is mathematically the label.

Two answers are equal if they are the same text after the usual differences of LaTeX spelling are removed, or else if SymPy finds
their difference to be zero. SymPy may think for a long time about hostile input, so this reward runs in a grading process
under a time limit (grading.py). Expressions are parsed by latex.py, never by `eval`: a response is not to be trusted.
"""

from __future__ import annotations

import re

from stages.rewards.boxed import last_boxed
from storage.sample import Sample

_LONGEST = 300  # characters of an answer that is still worth an algebraic comparison
_UNITS = (
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|dollar|cent|unit)(?:es|s)?"
    r"(?:\s*\^\s*\{?\d\}?)?"
)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|pi)[A-Za-z]{3,}")  # prose is compared as text: as a product, "stop" would equal "pots"
_REPLACEMENTS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr|,|!|;|:| )", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"(?<=\d)\s*million\b", r"\\cdot10^{6}"),
        (r"(?<=\d)\s*billion\b", r"\\cdot10^{9}"),
        (r"(?<=\d)\s*trillion\b", r"\\cdot10^{12}"),
        (rf"(?<=[\d}}])\s*{_UNITS}$", ""),  # 5 cm
        (r"\s+(?:and|or)\s+|\\text\{\s*(?:and|or)\s*\}", ","),  # 1 and 2
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\(?:text|mbox)\s*\{ [^{}]*\}", ""),  # 5\text{ cm}: a unit
        (r"\\(?:text|mbox|mathrm|textbf|mathbf|textit|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (r"\^\s*\{?\\circ\}?|\\degree|°", ""),
        (r"\\?[$%]", ""),
        (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?:\D|$))", ""),  # 1,234 and 1{,}234
        (r"^\s*[a-zA-Z]\s*(?:=|\\in)\s*", ""),  # x = 5
        (r"(?<![\d.^}/])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})"),  # a mixed number
        (r"(?<![\d.^}/])(\d+)\s+(\d+)\s*/\s*(\d+)", r"(\1+\\frac{\2}{\3})"),
        (r"\s+", ""),
        (r"\.$", ""),
        (r"(?<!\d)\.(?=\d)", "0."),
        (r"(\d+\.\d*?)0+(?!\d)", r"\1"),  # 1.50
        (r"(\d)\.(?!\d)", r"\1"),
    )
]


def math_answer(sample: Sample) -> float:
    """1 if the last boxed answer of the response equals the label (boxed or plain), else 0."""
    return math_answer_of(sample.response, sample.label)


def math_answer_of(solution: str, label: str) -> float:
    """1 if the last boxed answer of `solution` equals `label` (boxed or plain), else 0."""
    answer = last_boxed(solution)
    if answer is None:
        return 0.0
    return float(same_answer(answer, last_boxed(label) or label))


def same_answer(answer: str, label: str) -> bool:
    """Whether two answers in LaTeX or plain text are the same."""
    left, right = normalized(answer), normalized(label)
    if not right:
        return False
    if left == right:
        return True
    lefts, rights = _parts(left), _parts(right)
    if lefts[0] != rights[0] or len(lefts) != len(rights):
        return False
    return all(_equal(a, b) for a, b in zip(lefts[1:], rights[1:]))


def normalized(text: str) -> str:
    """The text without spelling differences that mean nothing."""
    for pattern, by in _REPLACEMENTS:
        text = pattern.sub(by, text)
    return text


def _parts(text: str) -> list[str]:
    """`(1,2]` -> ["(]", "1", "2"]; anything that is no list -> ["", text]. Intervals of other kinds differ by their brackets."""
    opening, closing = text[:1], text[-1:]
    inner = text[1:-1] if opening in "([" and closing in ")]" and len(text) > 2 else ""
    if text.startswith("\\{") and text.endswith("\\}"):
        opening, closing, inner = "{", "}", text[2:-2]
    pieces = _split_at_commas(inner) if inner else []
    if len(pieces) > 1:
        return [opening + closing, *pieces]
    pieces = _split_at_commas(text)
    return ["", *pieces]


def _split_at_commas(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _equal(left: str, right: str) -> bool:
    if left.lower() == right.lower():  # East or east, A or a: data sets mix them
        return True
    if not left or not right or max(len(left), len(right)) > _LONGEST or _WORD.search(left) or _WORD.search(right):
        return False
    import sympy  # half a second

    from stages.rewards.latex import NotAnExpression, parse

    try:
        difference = parse(left) - parse(right)
        return difference == 0 or sympy.simplify(difference) == 0
    except (NotAnExpression, TypeError, ArithmeticError, RecursionError):
        return False
