"""majority@k: the pass rate of the most common answer among k samples of a prompt (arXiv 2203.11171).

A sample votes for its answer, which is the first of these that exists:

    rewards["answer"]               a number that the reward function returned in addition to the reward
    metadata["extracted_answer"]    text that a custom generate function has stored
    the last \\boxed{...} of the response
    the text after the last "Answer:" or "answer is" on its line; if the label is a number, the first number there
    the last number of the response, if the label is a number
    the response itself, if it is a single line

Responses are read after the last </think>, without end tokens. Answers are compared as text, after normalizing LaTeX
spelling, white space, case and a final full stop. A sample without an answer does not vote. The result of a vote is the
fraction of passing samples among the samples with the most common answer; if several answers are equally common, it is
the mean over these answers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from penstock.stages.rewards.builtin.math_answer import answer_text, last_boxed, normalize_answer
from penstock.storage.samples.sample import Sample

MAX_SUBSETS = 200  # maximum number of subsets of k samples that vote; if there are more, a random choice of them
_SEED = 0
_MAX_RESPONSE = 20_000  # characters at the end of a response that are read
_MAX_ANSWER = 300  # characters of an answer that are compared
_NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
_ANSWER = re.compile(r"(?:\banswer\s*:|\banswer\s+is\b:?)[ \t*]*([^\n]+)", re.IGNORECASE)

Vote = tuple[str | None, bool]  # answer, whether the sample passes


def voted_answer(sample: Sample) -> str | None:
    """Return the normalized answer with which a sample votes in majority@k, or None if the sample has no answer."""
    if "answer" in sample.rewards:
        return repr(sample.rewards["answer"])
    answer = sample.metadata.get("extracted_answer")
    if answer is None:
        answer = _extract_answer(answer_text(sample.response)[-_MAX_RESPONSE:].strip(), sample.label)
    if answer is None:
        return None
    text = str(answer).strip()[:_MAX_ANSWER].lstrip("*").rstrip("*. ")  # without Markdown and the final full stop
    return re.sub(r"\s+", "", normalize_answer(text)).casefold() or None


def majority_rates(groups: Sequence[Sequence[Vote]]) -> dict[int, np.ndarray]:
    """Return k -> majority@k of each prompt, [prompts], for k = 4, 8, ... up to the size of the smallest group.

    k starts at 4 because majority@1 and majority@2 equal pass@1. majority@k is the mean over all subsets of k samples,
    or over MAX_SUBSETS of them, drawn with a fixed seed. The result is empty if no sample has an answer.
    """
    if not any(answer is not None for group in groups for answer, _ in group):
        return {}

    def subsets(n: int, k: int) -> list[tuple[int, ...]]:
        if math.comb(n, k) <= MAX_SUBSETS:
            return list(itertools.combinations(range(n), k))
        random = np.random.default_rng([_SEED, n, k])
        return [tuple(random.choice(n, k, replace=False).tolist()) for _ in range(MAX_SUBSETS)]

    sizes = {len(group) for group in groups}
    rates: dict[int, np.ndarray] = {}
    for k in (2**power for power in range(2, min(sizes).bit_length())):
        of_size = {n: subsets(n, k) for n in sizes}
        rates[k] = np.array(
            [
                np.mean([majority_pass_rate([group[i] for i in chosen]) for chosen in of_size[len(group)]])
                for group in groups
            ]
        )
    return rates


def majority_pass_rate(votes: Sequence[Vote]) -> float:
    """Return the fraction of samples that pass among those with the most common answer (with a tie, the mean over the
    tied answers), or 0 if no sample has an answer."""
    passed: dict[str, list[bool]] = defaultdict(list)
    for answer, passes in votes:
        if answer is not None:
            passed[answer].append(passes)
    if not passed:
        return 0.0
    most = max(map(len, passed.values()))
    winners = [samples for samples in passed.values() if len(samples) == most]
    return sum(sum(samples) / most for samples in winners) / len(winners)


def _extract_answer(text: str, label: str) -> str | None:
    if (boxed := last_boxed(text)) is not None:
        return boxed
    answers = _ANSWER.findall(text)
    if _NUMBER.fullmatch(label.strip()):
        numbers = _NUMBER.findall(answers[-1])[:1] if answers else []
        return next(iter(numbers or _NUMBER.findall(text)[-1:]), None)
    if answers:
        return str(answers[-1])
    return text if "\n" not in text else None
