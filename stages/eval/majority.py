"""What the most common answer of a prompt's samples is worth: majority@k (self-consistency, 2203.11171).

A sample votes for its answer, which is the first of these that it has:

    rewards["answer"]               a number that the reward function returned beside the reward
    metadata["extracted_answer"]    text that the generating function has left there
    the last \\boxed{...} of the response
    what follows the last "Answer:" or "answer is" on its line; if the label is a number, the first number there
    the last number of the response, if the label is a number
    the response itself, if it is a single line

Responses count from the last </think> on, without end tokens. Two answers are the same if they are equal as text after the spelling
differences of LaTeX, white space, upper and lower case and a full stop at the end are taken away. A sample without an answer does not
vote. A vote is worth the share of passing samples among those that gave the winning answer; the winners of a tie share its worth.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from stages.rewards.answer_text import answer_text
from stages.rewards.boxed import last_boxed
from stages.rewards.math_answer import normalized
from storage.sample import Sample

MOST_DRAWS = 200  # if there are more sets of k samples than that, so many are drawn
_SEED = 0
_LAST = 20_000  # characters of a response that are read
_LONGEST = 300  # characters of an answer that are compared
_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
_SAID = re.compile(r"(?:\banswer\s*:|\banswer\s+is\b:?)[ \t*]*([^\n]+)", re.IGNORECASE)

Vote = tuple[str | None, bool]  # answer, whether the sample passes


def answer_of(sample: Sample) -> str | None:
    """What a sample votes for, normalised; None if it has no answer."""
    if "answer" in sample.rewards:
        return repr(sample.rewards["answer"])
    found = sample.metadata.get("extracted_answer")
    if found is None:
        text = answer_text(sample.response)[-_LAST:].strip()
        found = _from_text(text, sample.label)
    return None if found is None else (_comparable(str(found)) or None)


def majority_rates(groups: Sequence[Sequence[Vote]]) -> dict[int, np.ndarray]:
    """k -> majority@k of each prompt, [prompts], for k = 4, 8, ... up to the smallest group (two votes or one are pass@1).

    The mean over all sets of k samples of the prompt, or over MOST_DRAWS of them, drawn with a fixed seed; empty if nobody votes.
    """
    if not any(answer is not None for group in groups for answer, _ in group):
        return {}
    smallest = min(len(group) for group in groups)
    ks = [2**power for power in range(2, smallest.bit_length())]
    draws = {(n, k): _draws(n, k) for k in ks for n in {len(group) for group in groups}}
    return {
        k: np.array([np.mean([winner_passes([group[i] for i in one]) for one in draws[len(group), k]]) for group in groups])
        for k in ks
    }


def winner_passes(votes: Sequence[Vote]) -> float:
    """How much of the most common answer passes, 0 to 1; 0 if nobody votes."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for answer, passes in votes:
        if answer is not None:
            passed[answer].append(passes)
    if not passed:
        return 0.0
    most = max(map(len, passed.values()))
    winners = [of_answer for of_answer in passed.values() if len(of_answer) == most]
    return sum(sum(of_answer) / most for of_answer in winners) / len(winners)


def _draws(n: int, k: int) -> list[tuple[int, ...]]:
    if math.comb(n, k) <= MOST_DRAWS:
        return list(itertools.combinations(range(n), k))
    random = np.random.default_rng([_SEED, n, k])
    return [tuple(random.choice(n, k, replace=False).tolist()) for _ in range(MOST_DRAWS)]


def _from_text(text: str, label: str) -> str | None:
    if (boxed := last_boxed(text)) is not None:
        return boxed
    said = _SAID.findall(text)
    if _NUMBER.fullmatch(label.strip()):
        numbers = _NUMBER.findall(said[-1])[:1] if said else []
        return next(iter(numbers or _NUMBER.findall(text)[-1:]), None)
    if said:
        return str(said[-1])
    return text if "\n" not in text else None


def _comparable(answer: str) -> str:
    text = answer.strip()[:_LONGEST].lstrip("*").rstrip("*. ")  # Markdown, and the end of a sentence
    return re.sub(r"\s+", "", normalized(text)).casefold()
