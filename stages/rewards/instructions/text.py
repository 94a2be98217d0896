"""Split a text into sentences, words and syllables by rules, without a model or a download.

The published checkers of IFEval and IFBench use NLTK's trained splitter and a syllable dictionary; the rules here give
other results for unusual punctuation and rare words.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable

EDGES = string.punctuation + string.whitespace
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Possessive (*+) and begun only at the first mark of a run, so that a long run of marks takes linear time.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|[。！？]+[」』”]*|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|cf|no|inc|ltd|co|corp|fig|approx|e\.g|i\.e"
    r"|[a-z]|[a-z]\.[a-z])\.$",
    re.IGNORECASE,
)
_MAX_ABBREVIATION = 12  # characters, with the character before it
_NEXT_CHARACTER = re.compile(r"\s*(.)", re.DOTALL)
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_VOWELS = re.compile(r"[aeiouy]+")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text with their punctuation; an empty line also ends a sentence."""
    parts, begin = [], 0
    for end in _END.finditer(text):
        if not _ends_with_abbreviation(text, begin, end.end()):
            parts.append(text[begin : end.end()].strip())
            begin = end.end()
    return [sentence for sentence in [*parts, text[begin:].strip()] if sentence]


def _ends_with_abbreviation(text: str, begin: int, end: int) -> bool:
    """Return whether the period at the end of the sentence `text[begin:end]` ends an abbreviation ("Dr. Who",
    "J. Smith") and not a sentence ("it was I. Then")."""
    match = _ABBREVIATION.search(text[max(begin, end - _MAX_ABBREVIATION) : end])
    if match is None or match.group().strip(" (\"'") != "I.":
        return match is not None
    following = _NEXT_CHARACTER.match(text, end)
    return following is None or not following[1].isupper()


def words(text: str) -> list[str]:
    """Return the words of a text, with hyphens and apostrophes inside words but no other punctuation."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    """Return the number of words: runs of letters and digits, so "it's" counts as two, as in the published checkers."""
    return len(re.findall(r"\w+", text))


def words_without_punctuation(text: str) -> list[str]:
    """Split a text at white space after deleting ASCII punctuation ("it's" becomes "its")."""
    return text.translate(_NO_PUNCTUATION).split()


def words_stripped_at_edges(text: str) -> list[str]:
    """Split a text at white space, and strip punctuation from both ends of each word, and omit empty words."""
    return [bare for word in text.split() if (bare := word.strip(EDGES))]


def count_occurrences(word: str, text: str) -> int:
    """Return how often `word` occurs as a whole word, ignoring case; `word` may contain spaces, or end in symbols."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def count_syllables(word: str) -> int:
    """Estimate the number of syllables: groups of vowels, except for a final silent e, ed or es."""
    word = word.lower()
    count = len(_VOWELS.findall(word))
    silent = re.search(r"(?:[^aeiouyl]e|[aeiouy]le|[^aeiouytd]ed|[^aeiouysxzhcg]es)$", word)
    return max(1, count - bool(silent))


def is_increasing(numbers: Iterable[int]) -> bool:
    """Return whether every number is greater than the previous number."""
    numbers = list(numbers)
    return all(left < right for left, right in itertools.pairwise(numbers))
