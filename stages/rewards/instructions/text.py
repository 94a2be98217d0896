"""Sentences, words and syllables of a text, by rules that need no model and no download.

The published checkers use NLTK's trained splitter and a syllable dictionary; these rules differ from them only on odd punctuation
and rare words.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable

EDGES = string.punctuation + string.whitespace
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_END = re.compile(r"(?:[.!?…]+[\"'”’)\]*_]*)(?=\s)|[。！？]+[」』”]*|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|cf|no|inc|ltd|co|corp|fig|approx|e\.g|i\.e|etc(?=\.\s+[a-z])|[a-z]|[a-z]\.[a-z])\.$", re.IGNORECASE
)  # fmt: skip
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_VOWELS = re.compile(r"[aeiouy]+")


def sentences(text: str) -> list[str]:
    """Sentences with their punctuation; an empty line ends one too."""
    out, begin = [], 0
    for end in _END.finditer(text):
        if not _is_abbreviation(text[begin : end.end()], text[end.end() :]):
            out.append(text[begin : end.end()].strip())
            begin = end.end()
    return [sentence for sentence in [*out, text[begin:].strip()] if sentence]


def _is_abbreviation(sentence: str, rest: str) -> bool:
    """Whether the period ends an abbreviation ("Dr. Who", "J. Smith") and not the sentence ("it was I. Then")."""
    found = _ABBREVIATION.search(sentence[-12:])
    return found is not None and not (found.group().strip(" (\"'") == "I." and rest.lstrip()[:1].isupper())


def words(text: str) -> list[str]:
    """Words with their inner hyphens and apostrophes, without punctuation."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    """Runs of letters and digits, so that "it's" counts as two, as in the published checkers."""
    return len(re.findall(r"\w+", text))


def bare_words(text: str) -> list[str]:
    """What spaces separate once ASCII punctuation is deleted ("it's" is "its")."""
    return text.translate(_NO_PUNCTUATION).split()


def stripped_words(text: str) -> list[str]:
    """What spaces separate, without punctuation at its edges; nothing that is punctuation alone."""
    return [bare for word in text.split() if (bare := word.strip(EDGES))]


def num_occurrences(word: str, text: str) -> int:
    """How often `word` stands in `text` as a whole, in any case; it may be several words, or have symbols at its ends (C++)."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def num_syllables(word: str) -> int:
    """Groups of vowels, less a silent e at the end."""
    word = word.lower()
    count = len(_VOWELS.findall(word))
    silent = re.search(r"(?:[^aeiouyl]e|[aeiouy]le|[^aeiouytd]ed|[^aeiouysxzhcg]es)$", word)
    return max(1, count - bool(silent))


def increases(numbers: Iterable[int]) -> bool:
    """Whether every number is greater than the one before."""
    numbers = list(numbers)
    return all(left < right for left, right in itertools.pairwise(numbers))
