"""Reward: the boxed answer is mathematically the label.

Both are read as tokens of one spelling (answer_tokens.py), then as a list, set, tuple, interval, matrix or relation of expressions
(answer_parts.py, latex.py), whose values are compared (numeric.py). Nothing is evaluated by Python or SymPy, work is bounded, and what cannot be read is
compared as text.
"""

from __future__ import annotations

import re

from stages.rewards.answer_parts import is_whole_number, same_parts
from stages.rewards.answer_tokens import WORD, readings
from stages.rewards.boxed import last_boxed
from storage.sample import Sample

_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
LONGEST = 1000  # characters of an answer that are compared other than as text


def math_answer(sample: Sample, evaluated_integers: bool = False) -> float:
    """1 if the last boxed answer of the response equals the label (boxed or plain), else 0."""
    return math_answer_of(sample.response, sample.label, evaluated_integers)


def math_answer_of(solution: str, label: str, evaluated_integers: bool = False) -> float:
    """1 if the last boxed answer of `solution` equals `label` (boxed or plain), else 0.

    With `evaluated_integers` a label that is a whole number wants a number: 391, not 17 * 23.
    """
    answer = last_boxed(solution)
    if answer is None:
        return 0.0
    boxed_label = last_boxed(label)
    return float(same_answer(answer, label if boxed_label is None else boxed_label, evaluated_integers))


def same_answer(answer: str, label: str, evaluated_integers: bool = False) -> bool:
    """Whether two answers in LaTeX or plain text are the same."""
    answer, label = answer.strip(), label.strip()
    if not label or not answer or max(len(answer), len(label)) > LONGEST:
        return bool(label) and answer == label
    answers, labels = readings(answer), readings(label)
    if evaluated_integers and any(map(is_whole_number, labels)):
        answers = [tokens for tokens in answers if is_whole_number(tokens)]
    return any(same_parts(left, right) for left in answers for right in labels)


def normalized(text: str) -> str:
    """The text without spelling differences that mean nothing; unchanged if it is longer than an answer."""
    if len(text) > LONGEST:
        return text
    text = "".join(
        _number(token) if token[0].isdigit() or token[0] == "." else token.removeprefix(WORD) for token in readings(text)[0]
    )
    return _FRACTION.sub(r"\\frac{\1}{\2}", text)


def _number(token: str) -> str:
    """1.50 as 1.5, and .5 as 0.5."""
    token = f"0{token}" if token[0] == "." else token
    return token.rstrip("0").rstrip(".") if "." in token and "e" not in token.lower() else token
