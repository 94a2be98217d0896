"""Reward `dapo`: 1 if the last `Answer: ...` of the response equals the label, else -1 (DAPO, arXiv 2503.14476).

The label must be a number. Answer and label are compared as text after Minerva's normalization (arXiv 2206.14858,
appendix D).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from penstock.stages.rewards.builtin.math_answer import strip_end_tokens
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample

_MAX_CHARACTERS = 300  # of a label, and at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NO_ANSWER = "[INVALID]"
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "sue",
)  # fmt: skip
_REPLACEMENTS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"an? ", ""),  # also inside words, because spaces are removed later
        (r"\.\$", "$"),
        (r"\\\$|\\ | ", ""),
        (r"mbox", "text"),
        (r",?\\text\{and\}", ","),
        (r"\\text\{m\}", r"\\text{}"),
        ("|".join(_UNITS), ""),
        (r"\\l?dots|\\text\{[s.\n]?s?\}(?:\^[23])?|\\mathrm\{?th\}?|\^\{?\\circ\}?|\\;|,\\!|\{,\}|\"", ""),
        (r"^.*?\$(.*?)\$.*$", r"\1"),  # keep the first formula only
        (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


def dapo(sample: Sample) -> dict[str, float]:
    """Return {"score": 1 or -1, "acc": 1 or 0}; `--reward-key` selects one of the two as the reward. Raises
    RewardError."""
    correct = last_answer(sample.response) == to_minerva_number(sample.label)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


def last_answer(response: str) -> str:
    """Return the last `Answer: ...` of a response in Minerva's normal form."""
    answers = _ANSWER.findall(strip_end_tokens(response[-_MAX_CHARACTERS:]))
    return to_minerva_form(answers[-1] if answers else _NO_ANSWER)


def to_minerva_form(answer: str) -> str:
    """Return the text after the last `=` of an answer in Minerva's normal form: without units, spaces and dollars."""
    answer = answer.rpartition("=")[2]
    for pattern, by in _REPLACEMENTS:
        answer = pattern.sub(by, answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def to_minerva_number(label: str) -> str:
    """Normalize a label like `to_minerva_form`, with 34.0 as 34. Raises RewardError if the label is not a number."""
    text = to_minerva_form(label) if len(label) <= _MAX_CHARACTERS else ""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value.adjusted()) > _MAX_CHARACTERS:
        raise RewardError(f"the label {label[:100]!r} is not a number, which the reward dapo needs: use --rm-type math")
    return str(int(value)) if value == value.to_integral_value() else text
