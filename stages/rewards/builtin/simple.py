"""Rewards `exact_number`, `f1`, `random` and `zero`."""

from __future__ import annotations

import re
import string
from collections import Counter

import xxhash

from penstock.stages.rewards.builtin.math_answer import strip_end_tokens
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample

_INTEGER = re.compile(r"-?\d+")
_WHOLE_NUMBER = re.compile(r"\s*\+?(-?\d{1,300})(?:\.0*)?\s*")


def exact_number(sample: Sample) -> float:
    """Return 1 if the last integer of the response equals the label digit by digit, else 0.

    Raises:
        RewardError: there is a label, but it is not an integer, so that no response could equal it.
    """
    numbers = _INTEGER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == (sample.label and to_integer(sample.label)))


def to_integer(label: str) -> str:
    """Return the digits of a label, with 2.00 as 2. Raises RewardError if the label is not an integer."""
    match = _WHOLE_NUMBER.fullmatch(label)
    if match is None:
        raise RewardError(
            f"the label {label[:100]!r} is not an integer, and no response can equal it with the reward exact_number: "
            "write the label in digits only, or use --rm-type math"
        )
    return match[1]


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


def random_reward(sample: Sample) -> float:
    """Return 0 or 1, derived from a hash of the sample id, so that grading again gives the same reward."""
    return float(xxhash.xxh3_64_intdigest(sample.sample_id.encode()) & 1)


def zero_reward(sample: Sample) -> float:
    """Return 0."""
    return 0.0
