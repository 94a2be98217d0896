r"""Compute the metrics of an evaluation from its graded samples, which the committed shards contain; compare
evaluations, and decide on promotions.

A sample whose grader timed out or raised counts as reward 0 and as not passed; `failed_ratio` is their fraction.

Confidence intervals of means are computed by the percentile bootstrap over prompts (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13). Prompts are resampled with all of their samples: the samples of a
prompt are correlated, so resampling single samples would make the intervals too narrow. The seed is fixed, so equal
values give equal intervals.

majority@k: the pass rate of the most common answer among k samples of a prompt (arXiv 2203.11171).

A sample votes for its answer, which is the first of these that exists:

    rewards["answer"]               a number that the reward function returned in addition to the reward
    metadata["extracted_answer"]    text that a custom generate function has stored
    the last \boxed{...} of the response
    the text after the last "Answer:" or "answer is" on its line; if the label is a number, the first number there
    the last number of the response, if the label is a number
    the response itself, if it is a single line

Responses are read after the last </think>, without end tokens. Answers are compared as text, after normalizing LaTeX
spelling, white space, case and a final full stop. A sample without an answer does not vote. The result of a vote is the
fraction of passing samples among the samples with the most common answer; if several answers are equally common, it is
the mean over these answers.

`compare_rewards` is a paired comparison on the same prompts: the mean difference with its bootstrap interval. The
bootstrap resamples the prompts' differences. The difficulty of a prompt cancels in its difference, so the interval is
narrower than the intervals of the two evaluations suggest. `gate_conditions` uses it to decide on a promotion: the
candidate must be better than the champion on one data set, and not worse on others.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.stages.rewards.builtin import answer_text, last_boxed, normalize_answer
from penstock.storage.champions import Condition
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError, OptionError
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_table
from penstock.storage.store import Store

NUM_RESAMPLES = 1000
LEVEL = 0.95
_SEED = 0
_MAX_COUNTS = 1 << 22  # maximum number of resampling counts in memory at a time (32 MB)
LOW, HIGH = "-ci_low", "-ci_high"  # suffixes of the metrics with the bounds of an interval


def bootstrap_intervals(sums: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds, [metrics] each, of the 95% confidence intervals of several metrics. Each
    metric is a mean over the values of all prompts: `sums` [prompts, metrics] has the sum of each prompt's values,
    `weights` [prompts, metrics] their number (None: 1)."""
    num_prompts = len(sums)
    weights = np.ones_like(sums) if weights is None else weights
    random = np.random.default_rng(_SEED)
    means = []
    step = max(1, _MAX_COUNTS // num_prompts)
    for start in range(0, NUM_RESAMPLES, step):
        size = min(step, NUM_RESAMPLES - start)
        counts = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size)  # [size, prompts]
        means.append((counts @ sums) / (counts @ weights))
    tail = (1 - LEVEL) / 2
    lower, upper = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return lower, upper


def compute_eval_metrics(
    samples: Sequence[Sample], name: str, *, pass_threshold: float | None = None, require_pass_rate: bool = False
) -> dict[str, float]:
    """Return the metrics of an evaluation on one data set.

    Args:
        samples: all samples of the data set, graded.
        name: name of the data set.
        pass_threshold: a response passes if its reward is at least this; None = see `decide_passes`.
        require_pass_rate: raise an error if the rewards do not define pass@k.

    Returns:
        `eval/<name>` (mean reward), `eval/<name>-truncated_ratio`, `eval/<name>-failed_ratio`,
        `eval/<name>/response_len/...`, `eval/<name>/rewards/<part>` for each number of a reward that is a dictionary;
        if passing is defined, also `eval/<name>-pass@k` for k = 1, 2, 4, ... and
        `eval/<name>-majority@k` for k = 4, 8, ... up to the samples per prompt. With at least two prompts, the mean,
        pass@k and majority@k have confidence intervals.
    """
    groups = group_by_prompt(samples)
    lengths = [sum(sample.loss_mask) for sample in samples]
    rewards = [[sample.reward or 0.0 for sample in group] for group in groups]  # 0 for a failed sample
    plain = {
        f"eval/{name}-truncated_ratio": statistics.fmean(sample.status is Status.TRUNCATED for sample in samples),
        f"eval/{name}-failed_ratio": statistics.fmean(sample.status is Status.FAILED for sample in samples),
        f"eval/{name}/response_len/mean": statistics.fmean(lengths),
        f"eval/{name}/response_len/median": float(statistics.median(lengths)),
        f"eval/{name}/response_len/max": float(max(lengths)),
        f"eval/{name}/num_samples": float(len(samples)),
        f"eval/{name}/num_prompts": float(len(groups)),
    }
    for part in sorted({part for sample in samples for part in sample.rewards}):
        values = [s.rewards.get(part, 0.0) for s in samples if part in s.rewards or s.reward is None]
        plain[f"eval/{name}/rewards/{part}"] = statistics.fmean(values)
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    sums, weights = {f"eval/{name}": np.array([sum(group) for group in rewards])}, {f"eval/{name}": sizes}
    passes = decide_passes(groups, pass_threshold)
    if passes is None and require_pass_rate:
        other = next(reward for group in rewards for reward in group if reward not in (0.0, 1.0))
        raise OptionError(
            f"data set {name} has the reward {other:g}, but pass@k needs rewards of 0 and 1: set --pass-threshold to "
            "the lowest passing reward, select a reward of 0 or 1 with --eval-reward-key, or omit --log-passrate"
        )
    if passes is not None:
        votes = [[(voted_answer(s), ok) for s, ok in zip(group, oks)] for group, oks in zip(groups, passes)]
        sums |= {f"eval/{name}-pass@{k}": rates for k, rates in pass_rates(passes).items()}
        sums |= {f"eval/{name}-majority@{k}": rates for k, rates in majority_rates(votes).items()}
    return _means_with_intervals(sums, weights) | plain


def group_by_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group samples by prompt, both sorted by id, so that metrics do not depend on the order of `samples`."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        groups[sample.group_id].append(sample)
    return [groups[group_id] for group_id in sorted(groups)]


def decide_passes(groups: Sequence[Sequence[Sample]], threshold: float | None) -> list[list[bool]] | None:
    """Return for each sample of each group whether it passes, or None if the rewards do not define this.

    The criterion is the first of these that applies: the reward is at least `threshold`, if given; `rewards["correct"]`
    is 1, if it is 0 or 1 in all graded samples; the reward is 1, if it is 0 or 1 in all graded samples. A failed sample
    does not pass.
    """
    graded = [sample for group in groups for sample in group if sample.reward is not None]
    if threshold is not None:
        passes = lambda sample: sample.reward >= threshold
    elif graded and all(sample.rewards.get("correct") in (0.0, 1.0) for sample in graded):
        passes = lambda sample: sample.rewards["correct"] == 1.0
    elif all(sample.reward in (0.0, 1.0) for sample in graded):
        passes = lambda sample: sample.reward == 1.0
    else:
        return None
    return [[sample.reward is not None and passes(sample) for sample in group] for group in groups]


def pass_rates(groups: Sequence[Sequence[bool]]) -> dict[int, np.ndarray]:
    """Return k -> pass@k of each prompt, [prompts], for k = 1, 2, 4, ... up to the smallest number of samples of a
    prompt. `groups` holds, for each prompt, whether each of its samples passes.

    pass@k is the probability that at least one of k samples, drawn from n without replacement, is among the c that
    pass: 1 - C(n-c, k) / C(n, k), the unbiased estimator of arXiv 2107.03374.
    """
    counts = [(len(group), sum(group)) for group in groups]  # n, c
    ks = [2**power for power in range(min(n for n, _ in counts).bit_length())]
    return {k: np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts]) for k in ks}


def _means_with_intervals(sums: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the mean of each metric and, with at least two prompts, the bounds of its confidence interval.

    `sums` holds the sum of each prompt's values, [prompts]; `weights` their number, [prompts] (default: 1).
    """
    values = np.stack(list(sums.values()), axis=1)  # [prompts, quantities]
    counts = np.stack([weights.get(name, np.ones(len(values))) for name in sums], axis=1)
    means = values.sum(0) / counts.sum(0)
    if len(values) < 2:
        return {name: float(mean) for name, mean in zip(sums, means)}
    out: dict[str, float] = {}
    for name, mean, low, high in zip(sums, means, *bootstrap_intervals(values, counts)):
        out |= {name: float(mean), f"{name}{LOW}": float(low), f"{name}{HIGH}": float(high)}
    return out


# ---- majority@k ------------------------------------------------------------------------------------------------------

MAX_SUBSETS = 200  # maximum number of subsets of k samples that vote; if there are more, they are chosen at random
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


# ---- comparisons and promotions --------------------------------------------------------------------------------------

Evaluations = Mapping[str, Commit]  # name of a data set -> commit of a policy's evaluation on it


@dataclass(frozen=True)
class Comparison:
    """Evaluation B compared with evaluation A on their common prompts. A prompt's reward is the mean over its
    samples."""

    num_prompts: int
    mean_a: float
    mean_b: float
    low: float  # bounds of the 95% confidence interval of mean_b - mean_a
    high: float
    wins: int  # prompts on which B is better
    losses: int  # prompts on which A is better
    ties: int

    @property
    def difference(self) -> float:
        return self.mean_b - self.mean_a


def compare_rewards(a: Mapping[int, float], b: Mapping[int, float]) -> Comparison:
    """Compare two evaluations, given as prompt number -> mean reward, on their common prompts (at least one)."""
    common = sorted(a.keys() & b.keys())
    assert common, "the evaluations have no common prompt"
    differences = np.array([b[prompt] - a[prompt] for prompt in common])  # [prompts]
    lower, upper = bootstrap_intervals(differences[:, None])
    return Comparison(
        num_prompts=len(common),
        mean_a=statistics.fmean(a[prompt] for prompt in common),
        mean_b=statistics.fmean(b[prompt] for prompt in common),
        low=float(lower[0]),
        high=float(upper[0]),
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        ties=int((differences == 0).sum()),
    )


def rewards_by_prompt(store: Store, commit: Commit) -> dict[int, float]:
    """Return the mean reward of each prompt, by the prompt's number in the data set; a failed sample counts as 0."""
    rows = read_table(store, commit).select(["sample_id", "group_id", "reward"]).to_pylist()
    samples = [Sample(row["sample_id"], row["group_id"], "", commit.index, reward=row["reward"]) for row in rows]
    return {
        int(group[0].group_id.rpartition("-")[2]): statistics.fmean(sample.reward or 0.0 for sample in group)
        for group in group_by_prompt(samples)
    }


def check_same_data(name: str, a: Commit, b: Commit) -> None:
    """Check that two evaluations on the data set `name` used the same prompts. Raises DataError."""
    segments_a, segments_b = ((commit.state.get("data_source") or {}).get("segments", []) for commit in (a, b))
    content_a, content_b = ([(s["rows"], s["digest"]) for s in segments] for segments in (segments_a, segments_b))
    if content_a != content_b:
        rows_a, rows_b = (sum(rows for rows, _ in content) for content in (content_a, content_b))
        raise DataError(
            f"the data set {name} had {rows_a} rows in the first evaluation, and {rows_b} rows with different content "
            "in the second, but a comparison needs the same prompts: repeat one evaluation with the file of the other"
        )


@dataclass(frozen=True)
class Gate:
    """The conditions of a promotion."""

    data_set: str
    margin: float = 0.0  # the candidate must be better by more than this: lower bound of the difference's 95 % interval
    guards: Mapping[str, float] = field(default_factory=dict)  # data set -> amount by which the candidate may be worse
    min_reward: float | None = None  # the mean reward of the first champion must be above this


def gate_conditions(store: Store, gate: Gate, candidate: Evaluations, champion: Evaluations | None) -> list[Condition]:
    """Return every condition of a promotion with the measured numbers and whether it is met. `champion`: None if the
    model has no champion yet; then only `gate.min_reward` applies."""
    required = {gate.data_set: gate.margin} | {name: -tolerance for name, tolerance in gate.guards.items()}
    for title, evaluations in (("candidate", candidate), ("champion", champion)):
        if evaluations is not None and (missing := [name for name in required if name not in evaluations]):
            raise DataError(
                f"the {title} was evaluated on {', '.join(evaluations) or 'nothing'}, not on {', '.join(missing)}: "
                "evaluate both on the data sets of the conditions"
            )
    if champion is None:
        mean = candidate[gate.data_set].summary[f"eval/{gate.data_set}"]
        holds = gate.min_reward is None or mean > gate.min_reward
        return [Condition(data_set=gate.data_set, required=gate.min_reward, holds=holds, candidate_mean=mean)]
    conditions = []
    for name, least in required.items():
        check_same_data(name, champion[name], candidate[name])
        comparison = compare_rewards(*(rewards_by_prompt(store, commit[name]) for commit in (champion, candidate)))
        conditions.append(
            Condition(
                data_set=name,
                required=least,
                holds=comparison.low > least,
                candidate_mean=comparison.mean_b,
                champion_mean=comparison.mean_a,
                low=comparison.low,
                high=comparison.high,
                num_prompts=comparison.num_prompts,
            )
        )
    return conditions
