"""Reward `math`: 1 if the boxed answer is mathematically equal to the label, else 0.

Answer and label are tokenized (math/tokens.py), parsed as a list, set, tuple, interval, matrix or relation of
expressions (math/answers.py, math/latex.py), and compared by value (math/numeric.py). Nothing is evaluated by Python or
SymPy, the work is bounded, and an answer that cannot be parsed is compared as text.
"""

from __future__ import annotations

import re

from penstock.stages.rewards.builtin.boxed import last_boxed
from penstock.stages.rewards.math.answers import equal_answers, is_evaluated_integer
from penstock.stages.rewards.math.tokens import WORD, possible_tokenizations
from penstock.storage.samples.sample import Sample

_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
MAX_LENGTH = 1000  # characters; longer answers are compared as text


def math_answer(sample: Sample, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer of the response equals the label (boxed or plain), else 0."""
    return grade_math(sample.response, sample.label, evaluated_integers)


def grade_math(solution: str, label: str, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer of `solution` equals `label` (boxed or plain), else 0.

    With `evaluated_integers`, an integer label requires a number as the answer: 391, but not 17 * 23.
    """
    answer = last_boxed(solution)
    if answer is None:
        return 0.0
    boxed_label = last_boxed(label)
    return float(same_answer(answer, label if boxed_label is None else boxed_label, evaluated_integers))


def same_answer(answer: str, label: str, evaluated_integers: bool = False) -> bool:
    """Return whether an answer equals the label, both in LaTeX or plain text. With `evaluated_integers`, an integer
    label requires a number as the answer: 391, but not 17 * 23."""
    answer, label = answer.strip(), label.strip()
    if not label or not answer or max(len(answer), len(label)) > MAX_LENGTH:
        return bool(label) and answer == label
    answers, labels = possible_tokenizations(answer), possible_tokenizations(label)
    if evaluated_integers and any(map(is_evaluated_integer, labels)):
        answers = [tokens for tokens in answers if is_evaluated_integer(tokens)]
    return any(equal_answers(left, right) for left in answers for right in labels)


def normalize_answer(text: str) -> str:
    """Return an answer in canonical LaTeX, without evaluating it; if longer than MAX_LENGTH, return it unchanged."""
    if len(text) > MAX_LENGTH:
        return text
    parts = []
    for token in possible_tokenizations(text)[0]:
        if not (token[0].isdigit() or token[0] == "."):
            parts.append(token.removeprefix(WORD))
            continue
        number = f"0{token}" if token[0] == "." else token
        has_decimals = "." in number and "e" not in number.lower()
        parts.append(number.rstrip("0").rstrip(".") if has_decimals else number)
    return _FRACTION.sub(r"\\frac{\1}{\2}", "".join(parts))
