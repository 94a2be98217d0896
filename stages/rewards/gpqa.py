"""Reward: the option that the response chooses is the right one, by its letter or by its text.

Metadata, all optional: `choices` (a list, or a dictionary by letter), `valid_letters`, `correct_letter`, `correct_answer` or
`answer_text`. The label is a letter, the text of a choice, or the number of one, counted from 0.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.rewards.answer_text import answer_text
from storage.sample import Sample

_LETTERS = string.ascii_uppercase[:10]  # of options, if nobody says how many there are
_MARKS = r"[\s(\[{*_$]*+"  # possessive, here and below: without it the time would grow with a power of the white space
# A letter stands alone. A small one ends its phrase too, or "the answer is a matter of taste" would choose A.
_LETTER = r"((?-i:[A-Z])(?![\w'’])|(?-i:[a-z])(?=[*_$]*+\s*+(?:[).,;:\]}]|$)))"
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        rf"\b(?:answer|option|choice)\s*+(?:is|:)?{_MARKS}(?:\\boxed\{{)?{_MARKS}{_LETTER}",
        r"(?<![\w'’])((?-i:[A-Z]))[)*\]]*+\s*+is\s*+(?:the\s*+)?correct",
    )
]
_ALONE = re.compile(r"(?<![\w'’])[A-Z](?![\w'’])")


@dataclass(frozen=True)
class _Options:
    letters: Sequence[str]
    choices: Sequence[str]  # texts in the order of the letters; may be empty
    correct: str | None  # letter


def gpqa(sample: Sample) -> float:
    """1 if the chosen letter is right, or, where no letter can be told, if the right text stands in the response; else 0."""
    options = _options_of(sample)
    text = answer_text(sample.response)
    chosen = chosen_letter(text, options.letters)
    if chosen is not None and options.correct is not None:
        return float(chosen == options.correct)
    said = f" {_plain(text)} "
    return float(any(f" {target} " in said for target in map(_plain, _right_texts(sample, options)) if target))


def has_answer(label: str, metadata: dict[str, Any]) -> bool:
    """Whether a row says which option is right, by its label or in its metadata."""
    return any(
        str(value or "").strip() for value in (label, *map(metadata.get, ("correct_letter", "correct_answer", "answer_text")))
    )


def chosen_letter(text: str, letters: Sequence[str]) -> str | None:
    """The first letter that an answer phrase names, else the last capital that stands alone; None if there is neither."""
    for pattern in _PATTERNS:
        match = pattern.search(text)
        if match and match.group(1).upper() in letters:
            return match.group(1).upper()
    return next((letter for letter in reversed(_ALONE.findall(text)) if letter in letters), None)


def _options_of(sample: Sample) -> _Options:
    metadata, label = sample.metadata, sample.label.strip()
    choices = metadata.get("choices") or []
    named = [str(name).strip().upper() for name in choices] if isinstance(choices, dict) else []
    texts = [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if not letters:
        one_letter_each = named and all(len(name) == 1 for name in named)
        letters = named if one_letter_each else list(string.ascii_uppercase[: len(texts)] or _LETTERS)
    correct = str(metadata.get("correct_letter") or "").strip().upper()
    if not correct and label.upper() in letters:
        correct = label.upper()
    if not correct:
        same = [letter for letter, text in zip(letters, texts) if _plain(text) == _plain(label)]
        by_number = [letters[int(label)]] if label.isdigit() and int(label) < len(letters) else []
        correct = next(iter(same + by_number), "")
    return _Options(letters, texts, correct or None)


def _right_texts(sample: Sample, options: _Options) -> list[str]:
    texts = [str(sample.metadata.get(key) or "") for key in ("correct_answer", "answer_text")]
    if options.correct in options.letters:
        texts += options.choices[options.letters.index(options.correct) :][:1]
    label = sample.label.strip()
    return texts if label.upper() in options.letters else [*texts, label]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
