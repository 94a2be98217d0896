"""Reward `gpqa`: 1 if the response chooses the correct option of a multiple-choice question, by letter or by text.

Metadata fields, all optional: `choices` (a list, or a dictionary by letter), `valid_letters`, `correct_letter`,
`correct_answer` or `answer_text`. The label is a letter, the text of a choice, or the index of a choice from 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stages.rewards.builtin.math_answer import answer_text
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample

_LETTERS = string.ascii_uppercase[:10]  # option letters, if the row gives no choices
_MARKS = r"[\s(\[{*_$]*+"  # *+ is possessive: backtracking over white space would take polynomial time
# The letter is a whole word. A lower-case letter must also end its phrase: "the answer is a matter of taste" is not A.
_LETTER = r"((?-i:[A-Z])(?![\w'’])|(?-i:[a-z])(?=[*_$]*+\s*+(?:[).,;:\]}]|$)))"
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        rf"\b(?:answer|option|choice)\s*+(?:is|:)?{_MARKS}(?:\\boxed\{{)?{_MARKS}{_LETTER}",
        r"(?<![\w'’])((?-i:[A-Z]))[)*\]]*+\s*+is\s*+(?:the\s*+)?correct",
    )
]
_SINGLE_CAPITAL = re.compile(r"(?<![\w'’])[A-Z](?![\w'’])")


@dataclass(frozen=True)
class _Options:
    letters: Sequence[str]
    choices: Sequence[str]  # texts in the order of `letters`, or empty
    correct: str | None  # letter of the correct option


def gpqa(sample: Sample) -> float:
    """Return 1 if the response chooses the letter of the correct option or, if it chooses no letter, contains the
    text of the correct option, else 0."""
    options = _read_options(sample.label.strip(), sample.metadata)
    text = answer_text(sample.response)
    chosen = chosen_letter(text, options.letters)
    if chosen is not None and options.correct is not None:
        return float(chosen == options.correct)
    targets = [str(sample.metadata.get(key) or "") for key in ("correct_answer", "answer_text")]
    if options.correct in options.letters:
        targets += options.choices[options.letters.index(options.correct) :][:1]
    label = sample.label.strip()
    if label.upper() not in options.letters:
        targets.append(label)
    normalized = f" {_normalize(text)} "
    return float(any(f" {target} " in normalized for target in map(_normalize, targets) if target))


def check_correct_option(label: str, metadata: dict[str, Any]) -> None:
    """Check that a label which is a letter or an index names one of the row's choices. Raises RewardError."""
    options, label = _read_options(label.strip(), metadata), label.strip()
    has_text = (len(label) > 1 and not label.isdigit()) or metadata.get("correct_answer") or metadata.get("answer_text")
    if options.choices and options.correct not in options.letters and not has_text:
        raise RewardError(
            f"the label {label!r} names none of the {len(options.choices)} choices {', '.join(options.letters)}: give "
            "the letter, the text or the index of a choice, counted from 0"
        )


def specifies_correct_option(label: str, metadata: dict[str, Any]) -> bool:
    """Return whether a row specifies the correct option, in the label or in the metadata."""
    return any(
        str(value or "").strip()
        for value in (label, *map(metadata.get, ("correct_letter", "correct_answer", "answer_text")))
    )


def chosen_letter(text: str, letters: Sequence[str]) -> str | None:
    """Return the option letter that a response chooses: the letter in the first phrase such as "the answer is B", else
    the last of `letters` that occurs as an upper-case word, else None."""
    for pattern in _PATTERNS:
        match = pattern.search(text)
        if match and match.group(1).upper() in letters:
            return match.group(1).upper()
    return next((letter for letter in reversed(_SINGLE_CAPITAL.findall(text)) if letter in letters), None)


def _read_options(label: str, metadata: dict[str, Any]) -> _Options:
    choices = metadata.get("choices") or []
    names = [str(name).strip().upper() for name in choices] if isinstance(choices, dict) else []
    texts = [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if not letters:
        single_letters = names and all(len(name) == 1 for name in names)
        letters = names if single_letters else list(string.ascii_uppercase[: len(texts)] or _LETTERS)
    correct = str(metadata.get("correct_letter") or "").strip().upper()
    if not correct and label.upper() in letters:
        correct = label.upper()
    if not correct:
        by_text = [letter for letter, text in zip(letters, texts) if _normalize(text) == _normalize(label)]
        index = label.removesuffix(".0")  # columns of integers with missing values are often stored as floats
        by_index = [letters[int(index)]] if index.isdecimal() and int(index[:9]) < len(letters) else []
        correct = next(iter(by_text + by_index), "")
    return _Options(letters, texts, correct or None)


def _normalize(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
