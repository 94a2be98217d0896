"""Reward `f1`: F1 score over the words of response and label, as in SQuAD (arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from penstock.stages.rewards.builtin.answer_text import strip_end_tokens
from penstock.storage.samples.sample import Sample

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EXACT_ONLY = ("yes", "no", "noanswer")


def token_f1(sample: Sample) -> float:
    """Return the F1 score over the words of response and label. If either is `yes`, `no` or `noanswer`, both must be
    equal, else the score is 0."""
    response, label = normalized_words(strip_end_tokens(sample.response)), normalized_words(sample.label)
    if response != label and any(" ".join(words) in _EXACT_ONLY for words in (response, label)):
        return 0.0
    num_common = (Counter(response) & Counter(label)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(response), num_common / len(label)
    return 2 * precision * recall / (precision + recall)


def normalized_words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
