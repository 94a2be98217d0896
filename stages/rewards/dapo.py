"""Reward: the last line `Answer: ...` is the label, a number; 1 or -1 (DAPO, 2503.14476).

The answer is compared as text, after the spelling is normalised as in Minerva (2206.14858, appendix D).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from stages.rewards.answer_text import without_end_tokens
from storage.errors import RewardError
from storage.sample import Sample

_LAST = 300  # characters of a response that are read
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INVALID = "[INVALID]"
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes", "digits", "cents",
    "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples", "sue",
)  # fmt: skip
_REPLACEMENTS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"an? ", ""),  # also at the end of a word: it comes before the spaces go
        (r"\.\$", "$"),
        (r"\\\$|\\ | ", ""),
        (r"mbox", "text"),
        (r",?\\text\{and\}", ","),
        (r"\\text\{m\}", r"\\text{}"),
        ("|".join(_UNITS), ""),
        (r"\\l?dots|\\text\{[s.\n]?s?\}(?:\^[23])?|\\mathrm\{?th\}?|\^\{?\\circ\}?|\\;|,\\!|\{,\}|\"", ""),
        (r"^.*?\$(.*?)\$.*$", r"\1"),  # the first formula, if there is one
        (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


def dapo(sample: Sample) -> dict[str, float]:
    """`score` 1 or -1, `acc` 1 or 0; so `--reward-key score` is needed. Raises RewardError if the label is not a number."""
    found = _ANSWER.findall(without_end_tokens(sample.response[-_LAST:]))
    correct = normalized(found[-1] if found else _INVALID) == normalized_label(sample.label)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


def normalized(answer: str) -> str:
    """The answer as Minerva spells it: what stands behind the last =, without units, spaces and dollars."""
    answer = answer.rpartition("=")[2]
    for pattern, by in _REPLACEMENTS:
        answer = pattern.sub(by, answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def normalized_label(label: str) -> str:
    """The label as `normalized` spells an answer; a whole number without decimals (34.0 is 34, but 3.5 is 3.5)."""
    text = normalized(label)
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value.adjusted()) > _LAST:
        raise RewardError(f"the label {label[:100]!r} is not a number, and the reward dapo needs one: use --rm-type math")
    return str(int(value)) if value == value.to_integral_value() else text
