"""Reward: how many words of response and label are the same, as SQuAD counts them (Rajpurkar et al., 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from stages.rewards.answer_text import without_end_tokens
from storage.sample import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_OR_NOTHING = ("yes", "no", "noanswer")


def token_f1(sample: Sample) -> float:
    """Harmonic mean of precision and recall over words, 0 to 1. `yes`, `no` and `noanswer` must be the whole answer."""
    response, label = words_of(without_end_tokens(sample.response)), words_of(sample.label)
    if response != label and any(" ".join(words) in _ALL_OR_NOTHING for words in (response, label)):
        return 0.0
    num_common = (Counter(response) & Counter(label)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(response), num_common / len(label)
    return 2 * precision * recall / (precision + recall)


def words_of(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
