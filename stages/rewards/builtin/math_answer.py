"""Extract the answer of a response, and compare it with the label by its value: rewards `math` and `deepscaler`.

Answer and label are tokenized (math/tokens.py), parsed as a list, set, tuple, interval, matrix or relation of
expressions (math/answers.py, math/latex.py), and compared by value (math/numeric.py). Nothing is evaluated by Python or
SymPy, the work is bounded, and an answer that cannot be parsed is compared as text.
"""

from __future__ import annotations

import re

from penstock.stages.rewards.math.answers import equal_answers, is_evaluated_integer
from penstock.stages.rewards.math.tokens import WORD, possible_tokenizations
from penstock.storage.samples.sample import Sample

THINK_END = "</think>"
_MAX_TOKEN_LENGTH = 44
_END_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</s>|<eos>|<end_of_turn>)$")


def strip_end_tokens(text: str) -> str:
    """Remove end tokens such as <|im_end|> or </s>, with the spaces around them, from the end of a response."""
    kept = len(text)
    end = _start_of_spaces_before(text, kept)
    while token := _END_TOKEN.search(text, max(0, end - _MAX_TOKEN_LENGTH), end):
        kept = end = _start_of_spaces_before(text, token.start())
    return text[:kept]


def _start_of_spaces_before(text: str, end: int) -> int:
    """Return the position where the white space before `end` begins."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def answer_text(response: str) -> str:
    """Return the text after the last </think> of a response (without </think>: all of it), without end tokens."""
    return strip_end_tokens(response.rpartition(THINK_END)[2])


_MARK = re.compile(r"\\boxed\s*(\{)?|[{}]")
_WORD = re.compile(r"[^\s$]+")


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{...}` (braces may nest) or `\\boxed x` in `text`, or None.

    Takes time linear in the length of the text.
    """
    open_braces: list[int] = []  # position where the content of a box begins, or -1 for other braces
    last = (-1, -1)  # begin and end of the content; the end is -1 for `\boxed x`
    for mark in _MARK.finditer(text):
        if mark[0] == "}":
            begin = open_braces.pop() if open_braces else -1
            last = max(last, (begin, mark.start()))
        elif mark[0] == "{":
            open_braces.append(-1)
        elif mark[1]:
            open_braces.append(mark.end())
        elif text[mark.end() : mark.end() + 1] not in ("", "$"):
            last = max(last, (mark.end(), -1))
    begin, end = last
    if begin < 0:
        return None
    return text[begin:end] if end >= 0 else _WORD.match(text, begin)[0].rstrip(".,")  # type: ignore[index]


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


_ALPACA_RESPONSE = "###Response"


def deepscaler(sample: Sample, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer after `</think>` is mathematically equal to the label, else 0."""
    if THINK_END in sample.response:
        solution = sample.response.rpartition(THINK_END)[2]
    elif _ALPACA_RESPONSE in sample.response:
        solution = sample.response.split(_ALPACA_RESPONSE)[1]
    else:
        return 0.0
    return grade_math(solution, sample.label, evaluated_integers)
