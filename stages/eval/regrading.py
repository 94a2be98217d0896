"""Grade the stored samples of a run again, with another reward, reward key or threshold.

Nothing is generated, and existing commits do not change. The result is committed: of an evaluation as a new evaluation,
`evals/000020/<data set>@<hash of the scoring options>`, whose sample ids and metric names contain the same `@<hash>`;
of a training round as `regrades/000012/<hash>`, with the old and the new reward and advantage of each sample. A killed
command therefore continues after its last commit.

The samples of a round are read and graded batch by batch. Of each sample only its id and some numbers are kept until
the round is committed, so the memory depends neither on the number of rounds nor on the length of the samples.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.stages.eval.scores import compute_eval_metrics, group_by_prompt
from penstock.stages.plugins import hash_source
from penstock.stages.rewards.builtin import answer_text
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.outcome import Outcome
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import RewardError, RunError
from penstock.storage.samples.sample import OVERLONG_PENALTY, SCHEMA, Sample, Status, check_schema, from_table
from penstock.storage.samples.shards import read_samples, trained_mask, write_regraded, write_shards
from penstock.storage.store import Store

RIGHT_TO_WRONG, WRONG_TO_RIGHT = "right_to_wrong", "wrong_to_right"
NUM_EXAMPLES = 3  # of each kind of changed verdict, in a commit
_EXAMPLE = 200  # characters of an example's label, and of the end of its response
_BATCH = 256  # samples that are decoded at a time
_IN_FLIGHT = 512  # samples that are being graded at a time
_UNREAD = {"routed_experts", "teacher_logprobs"}  # columns that no reward gets
_TOKENS = {"token_ids", "loss_mask", "rollout_logprobs"}  # columns that only user-defined rewards get

StoredSample = tuple[Sample, int]  # a sample, and the number of its trained tokens
Detector = Callable[[Sample, int], float]
Metrics = dict[str, float]
Writer = Callable[[Path], None]  # writes the files of a commit into a directory
# (round; old and new rewards [B]; group, trajectory and number of trained tokens of each sample [B]) -> old and new
# advantages [B], metrics
CompareAdvantages = Callable[
    [int, Sequence[np.ndarray], np.ndarray, np.ndarray, np.ndarray], tuple[list[np.ndarray], Metrics]
]


@dataclass(frozen=True)
class Regrading:
    """How stored samples are graded again."""

    scoring: dict[str, Any]  # the options that determine the rewards, and which samples pass
    grader: Grader  # with these options
    max_response_len: int  # tokens; decides whether a sample whose grading failed before is TRUNCATED or COMPLETED
    code_version: str
    report: Callable[[], None]  # called for each graded sample
    compare_advantages: CompareAdvantages  # raises RunError if that is not possible
    require_pass_rate: bool = False  # raise OptionError if the rewards of an evaluation do not define pass@k
    detect: bool = False  # also compute the DETECTORS of a round

    @property
    def hash(self) -> str:
        """Return the hash that names the result: of the options, and of the file of a user-defined reward."""
        parts = [self.scoring, hash_source(self.scoring["custom_rm_path"] or "")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def regrade_stage(store: Store, keys: RunKeys, data_set: str, index: int, how: Regrading) -> Commit:
    """Grade the samples of policy version `index` on a data set again, or of training round `index` if `data_set` is
    "", and commit the result; return the existing commit if this was done before."""
    source = keys.eval_prefix(index, data_set) if data_set else keys.rollout_prefix(index)
    name = f"{data_set}@{how.hash}" if data_set else how.hash + "-detectors" * how.detect
    target = keys.eval_prefix(index, name) if data_set else keys.regrade_prefix(index, name)
    old, existing = store.committed(source), store.committed(target)
    assert old is not None, f"{source} is not committed"
    if existing is not None:
        return existing
    start = time.perf_counter()
    write, graded, summary = (_regrade_evaluation if data_set else _regrade_round)(store, old, name, how)
    end, attempt = time.perf_counter(), store.new_attempt(target)
    with store.writing(attempt) as out:
        write(out.path)
    commit = Commit(
        kind="eval" if data_set else "regrade",
        attempt=attempt,
        files=out.files,
        inputs=(old.inputs if data_set else {}) | {"samples": commit_key(source)},
        code_version=how.code_version,
        seconds={"reward": end - start, "write": time.perf_counter() - end},
        summary=summary,
        state={"scoring": how.scoring, "examples": graded.examples, "not_compared": graded.not_compared}
        | ({"data_source": old.state.get("data_source")} if data_set else {}),
        blobs=old.blobs if data_set else {},
        **old.model_dump(include={"run", "index", "policy_version", "config_hash"}),
    )
    return store.commit(target, commit)


def _regrade_evaluation(store: Store, old: Commit, name: str, how: Regrading) -> tuple[Writer, GradedSamples, Metrics]:
    """Return what writes the regraded samples of an evaluation, the samples, and the metrics."""
    samples, graded, threshold = read_samples(store, old), GradedSamples(how), how.scoring["pass_threshold"]
    graded.grade((sample, sum(sample.loss_mask)) for prompt in group_by_prompt(samples) for sample in prompt)
    before, after = (f"eval-{old.index:06d}-{data_set}-" for data_set in (name.rpartition("@")[0], name))
    for sample in samples:
        for field in ("sample_id", "group_id", "trajectory_id"):
            id = getattr(sample, field)
            assert id.startswith(before), f"id {id} does not begin with {before}"
            setattr(sample, field, after + id.removeprefix(before))
    metrics = compute_eval_metrics(samples, name, pass_threshold=threshold, require_pass_rate=how.require_pass_rate)
    means = {"old_reward": old.summary[f"eval/{name.rpartition('@')[0]}"], "reward": metrics[f"eval/{name}"]}
    return partial(write_shards, samples=samples), graded, graded.metrics(f"eval/{name}", means) | metrics


def _regrade_round(store: Store, old: Commit, name: str, how: Regrading) -> tuple[Writer, GradedSamples, Metrics]:
    """Return what writes the file of a regraded round, its samples, and the metrics."""
    graded, settings = GradedSamples(how), how.grader.settings
    graded.grade(read_stored(store, old, with_tokens=bool(settings.custom_rm_path or settings.allow_row_code)))
    rewards = np.array(graded.old), np.array(graded.new)
    groups, trajectories, tokens = (np.array(each) for each in (graded.groups, graded.trajectories, graded.tokens))
    try:
        advantages, metrics = how.compare_advantages(old.index, rewards, groups, trajectories, tokens)
    except RunError as error:
        advantages, metrics, graded.not_compared = [np.full(len(groups), np.nan)] * 2, {}, str(error)
    for detector, values in zip(DETECTORS, graded.detected if how.detect else ()):
        metrics |= detector_metrics(detector, np.array(values), rewards, groups)
    write = partial(write_regraded, columns=[graded.ids, *rewards, graded.errors, *advantages])
    return write, graded, graded.metrics(f"regrade@{name}", metrics)


class GradedSamples:
    """The old and the new rewards of samples, and examples of changed verdicts. A sample is right if its reward is at
    least the threshold, without a threshold if it is above 0."""

    def __init__(self, how: Regrading) -> None:
        self.how = how
        self.ids, self.errors = list[str](), list[str | None]()
        self.old, self.new, self.tokens = array("d"), array("d"), array("q")
        self.groups, self.trajectories = array("q"), array("q")
        self.detected = [array("d") for _ in DETECTORS]
        self.counts = Counter({"changed": 0, RIGHT_TO_WRONG: 0, WRONG_TO_RIGHT: 0, "failed": 0})
        self.examples: dict[str, list[dict[str, Any]]] = {RIGHT_TO_WRONG: [], WRONG_TO_RIGHT: []}
        self.not_compared = ""  # why the advantages of a round are not compared
        self._num_graded = 0
        self._group_numbers = defaultdict[str, int](itertools.count().__next__)
        self._trajectory_numbers = defaultdict[str, int](itertools.count().__next__)

    def grade(self, stored: Iterable[StoredSample]) -> None:
        """Grade samples again, those of a prompt together, and add them in their order. Samples without a response
        remain failed; those whose earlier grading failed are first set back to COMPLETED or TRUNCATED. Raises
        RewardError if grading fails for all samples."""
        waiting: deque[tuple[Sample, int, Future[Outcome] | None]] = deque()
        for _, prompt in itertools.groupby(stored, lambda each: each[0].group_id):
            samples = list(prompt)
            answered = [sample for sample, num_tokens in samples if num_tokens or sample.reward is not None]
            for sample, num_tokens in samples:
                if sample.status is Status.FAILED and num_tokens:
                    sample.metadata.pop("error", None)
                    is_long = num_tokens >= self.how.max_response_len
                    sample.status = Status.TRUNCATED if is_long else Status.COMPLETED
            outcomes = dict(zip(map(id, answered), self.how.grader.submit_group(answered), strict=True))
            waiting.extend((sample, num_tokens, outcomes.get(id(sample))) for sample, num_tokens in samples)
            while len(waiting) > _IN_FLIGHT:
                self._add(*waiting.popleft())
        while waiting:
            self._add(*waiting.popleft())
        if self._num_graded and self.counts["failed"] == len(self.ids):  # the others have no reward, either
            raise RewardError(
                f"grading of all {self._num_graded} samples failed, the last with {self._reason!r}; their rewards were "
                "not committed: fix the reward and run the command again"
            )

    def _add(self, sample: Sample, num_tokens: int, outcome: Future[Outcome] | None) -> None:
        """Wait for the outcome of a sample (None: it was not graded), and add the sample."""
        old, penalty = sample.reward, sample.rewards.get(OVERLONG_PENALTY, 0.0)
        if outcome is not None:
            outcome.result().apply(sample)
            sample.reward = None if sample.reward is None else sample.reward + penalty
            self._num_graded, self._reason = self._num_graded + 1, sample.metadata.get("error")
        new, error, bound = sample.reward, sample.metadata.get("error"), self.how.scoring["pass_threshold"]
        was_right, is_right = (r is not None and (r > 0 if bound is None else r >= bound) for r in (old, new))
        self.ids.append(sample.sample_id)
        self.errors.append(error)
        self.old.append(math.nan if old is None else old)
        self.new.append(math.nan if new is None else new)
        self.tokens.append(num_tokens)
        self.groups.append(self._group_numbers[sample.group_id])
        self.trajectories.append(self._trajectory_numbers[sample.trajectory_id])
        for detect, values in zip(DETECTORS.values(), self.detected) if self.how.detect else ():
            values.append(detect(sample, num_tokens))
        self.counts["changed"] += old != new
        self.counts["failed"] += new is None
        if was_right != is_right:
            kind = RIGHT_TO_WRONG if was_right else WRONG_TO_RIGHT
            self.counts[kind] += 1
            if len(self.examples[kind]) < NUM_EXAMPLES:
                text = answer_text(sample.response).strip()[-_EXAMPLE:]
                example = {"sample": sample.sample_id, "label": sample.label[:_EXAMPLE], "response": text}
                self.examples[kind].append(example | {"old_reward": old, "reward": new})
        self.how.report()

    def metrics(self, prefix: str, others: Metrics) -> Metrics:
        """Return the metrics of the rewards and other metrics, with a prefix."""
        metrics = {**self.counts, "num_samples": len(self.ids)}
        for title, rewards in (("old_reward", np.array(self.old)), ("reward", np.array(self.new))):
            metrics |= {} if np.isnan(rewards).all() else {title: np.nanmean(rewards)}
        return {f"{prefix}/{name}": float(value) for name, value in (metrics | others).items()}


def read_stored(store: Store, commit: Commit, *, with_tokens: bool) -> Iterator[StoredSample]:
    """Yield the samples of a rollout, shard by shard. Without `with_tokens`, their per-token fields are empty."""
    columns = [name for name in SCHEMA.names if name not in (_UNREAD if with_tokens else _UNREAD | _TOKENS)]
    for shard in commit.shards():
        name = Path(shard.path).relative_to(commit.attempt or "").as_posix()
        with store.reading(commit, only=[name]) as directory, pq.ParquetFile(directory / name) as file:
            check_schema(file.schema_arrow)
            for batch in file.iter_batches(_BATCH, columns=list({*columns, "loss_mask"})):
                table = pa.Table.from_batches([batch])
                offsets, mask = trained_mask(table, needs_rewards=False)
                num_tokens = np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
                yield from zip(from_table(table.select(columns)), num_tokens.tolist())


# ---- detectors of reward hacking -------------------------------------------------------------------------------------

_NO_ANSWER = re.compile(r"\\boxed\{\s*\}|<answer>\s*</answer>|(?:####|\banswer\s*:)\s*\Z", re.IGNORECASE)


def repeated_share(sample: Sample, num_tokens: int) -> float:
    """Return the share of the four-word sequences of the response that have occurred in it before."""
    words = sample.response.split()
    sequences = list(zip(words, words[1:], words[2:], words[3:]))
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def label_share(sample: Sample, num_tokens: int) -> float:
    """Return the share of the words of the response that repeat the label after its first occurrence."""
    words, label = (re.findall(r"\w+", text) for text in (answer_text(sample.response), sample.label))
    copies = f" {'  '.join(words)} ".count(f" {'  '.join(label)} ") if label else 0
    return max(copies - 1, 0) * len(label) / max(len(words), 1)


DETECTORS: dict[str, Detector] = {
    "length": lambda _, num_tokens: float(num_tokens),
    "repetition": repeated_share,
    "label_echo": label_share,
    "format_only": lambda sample, _: float(bool(_NO_ANSWER.search(answer_text(sample.response).strip()))),
}


def detector_metrics(name: str, values: np.ndarray, rewards: Sequence[np.ndarray], groups: np.ndarray) -> Metrics:
    """Return the mean of a detector's values [B] over a round, and their correlation with the old and the new rewards
    [B] within the groups (prompts). Without variation within the groups the correlation is left out."""
    metrics = {f"{name}/mean": float(values.mean())}
    for title, of_samples in zip(("old_correlation", "correlation"), rewards):
        graded = ~np.isnan(of_samples)
        index, both = groups[graded], (values[graded], of_samples[graded])
        sizes = np.maximum(np.bincount(index), 1)
        x, y = (each - (np.bincount(index, each) / sizes)[index] for each in both)
        norm = math.sqrt(float(x @ x) * float(y @ y))
        metrics |= {f"{name}/{title}": float(x @ y) / norm} if norm > 1e-12 else {}
    return metrics
