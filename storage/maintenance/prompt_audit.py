"""Check that a run has used every prompt exactly once per epoch, by comparing its samples with the data source's state.

Every commit of a rollout contains the state of the data source after the round. Only the columns in _COLUMNS and the
loss masks are read, shard by shard; a hash and two flags per sample and a few numbers per prompt are kept in memory.
The order of prompts is defined in stages/rollout/prompts/source.py; these checks hold for any order.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from penstock.storage.commit import BUFFER, TRAINED, Commit, commit_key
from penstock.storage.errors import StoreError
from penstock.storage.samples.sample import Status, check_schema
from penstock.storage.samples.shards import StoredGroup, choose_replayed, trained_mask
from penstock.storage.store import Store

_BATCH = 4096  # samples per read
_COLUMNS = [
    "sample_id",
    "group_id",
    "trajectory_id",
    "rollout_id",
    "policy_versions",
    "metadata",
    "reward",
    "status",
    "images",
]
_NO_FILE = -1  # file index of prompts that a custom data source has created
_MAX_PROBLEMS = 10  # per round; further ones are not reported

Source = tuple[int, int, int]  # origin of a prompt: epoch, file index, row index


@dataclass
class ServedRound:
    """The prompts and samples of a rollout or an evaluation."""

    problems: list[str]
    ids: np.ndarray  # [samples] uint64, hashes of the sample ids
    # Prompts with samples: number of the prompt in the order in which the run issued its prompts -> source.
    served: dict[int, Source]
    buffered: dict[int, Source] = field(default_factory=dict)  # the same for prompts in the buffer for a later round
    dropped: dict[int, Source] = field(default_factory=dict)  # the same for prompts that dynamic sampling dropped
    has_tokens: np.ndarray = field(
        default_factory=lambda: np.empty(0, bool)
    )  # [samples] whether a token can be trained
    is_graded: np.ndarray = field(default_factory=lambda: np.empty(0, bool))  # [samples] whether there is a reward
    issues: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [samples] number of the prompt
    oldest_versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # [samples] of the first token

    def stored_groups(self, rollout_id: int) -> list[StoredGroup]:
        """Return the groups of the round as `choose_replayed` gets them, in the order of their first samples."""
        oldest: dict[int, int] = {}
        for issue, version in zip(self.issues.tolist(), self.oldest_versions.tolist()):
            oldest[issue] = min(version, oldest.get(issue, version))
        return [StoredGroup(rollout_id, f"{issue:09d}", version) for issue, version in oldest.items()]


def read_round(store: Store, prefix: str, commit: Commit) -> ServedRound:
    """Read the samples of a rollout or evaluation, and check what can be checked without other commits: sample ids,
    group sizes, policy versions and metrics."""
    problems: list[str] = []
    ids: list[str] = []
    served: dict[int, Source] = {}
    buffered: dict[int, Source] = {}
    siblings: dict[int, set[str]] = defaultdict(set)
    images: dict[str, str] = {}  # digest -> id of a sample that refers to it
    rewards: list[float | None] = []
    has_tokens: list[bool] = []
    issues: list[tuple[int, int]] = []  # of each sample, with its oldest policy version
    statuses: Counter[str] = Counter()
    group_prefix = f"eval-{commit.index:06d}-{re.escape(prefix.split('/')[-1])}-" if commit.kind == "eval" else ""
    issue_number = re.compile(group_prefix + r"(\d{9,})")
    try:
        with store.reading(commit) as directory:
            for row in _read_rows(directory, commit, TRAINED):
                ids.append(row["sample_id"])
                images |= dict.fromkeys(row["images"], row["sample_id"])
                rewards.append(row["reward"])
                has_tokens.append(row["has_tokens"])
                statuses[row["status"]] += 1
                match = issue_number.fullmatch(row["group_id"])
                if match is None:
                    problems.append(
                        f"{prefix}: sample {row['sample_id']} has the group_id {row['group_id']!r}, which is not a "
                        "prompt number (at least 9 digits; in an evaluation after 'eval-<policy version>-<data set>-')"
                    )
                    continue
                issue, metadata = int(match[1]), json.loads(row["metadata"])
                if not matches_commit(row, metadata, commit):
                    problems.append(
                        f"{prefix}: sample {row['sample_id']} has rollout_id {row['rollout_id']} and policy_versions "
                        f"{row['policy_versions']}; its commit has rollout_id {commit.index} and policy version "
                        f"{commit.policy_version}"
                    )
                siblings[issue].add(row["trajectory_id"])
                issues.append((issue, row["policy_versions"][0]))
                if served.setdefault(issue, _prompt_origin(metadata)) != _prompt_origin(metadata):
                    problems.append(f"{prefix}: the samples of group {row['group_id']} have different prompts")
            for row in _read_rows(directory, commit, BUFFER):
                buffered[int(row["group_id"])] = _prompt_origin(json.loads(row["metadata"]))
                images |= dict.fromkeys(row["images"], row["sample_id"])
    except (StoreError, ValueError, OSError) as error:
        problems.append(f"{prefix}: {str(error).partition(chr(10))[0]}")
    if unlisted := images.keys() - commit.blobs.keys():
        problems.append(
            f"{commit_key(prefix)} does not list the image {min(unlisted)} of sample {images[min(unlisted)]} in `blobs`"
        )
    if repeated := [sample_id for sample_id, count in Counter(ids).items() if count > 1]:
        problems.append(f"{prefix}: {len(repeated)} sample ids are not unique, first {repeated[0]}")
    if len(sizes := {len(members) for members in siblings.values()}) > 1:
        problems.append(f"{prefix}: groups have {min(sizes)} to {max(sizes)} samples; all must have the same number")
    if not problems and len(ids) != commit.num_samples():
        problems.append(f"{prefix} has {len(ids)} samples, but {commit.num_samples()} were committed")
    if not problems:
        problems += describe_summary_problems(prefix, commit, rewards, statuses)
    hashes = np.array([xxhash.xxh3_64_intdigest(sample_id.encode()) for sample_id in ids], dtype=np.uint64)
    dropped = {int(group["group_id"]): _prompt_origin(group) for group in commit.state.get("dropped", [])}
    is_graded = np.array([reward is not None and not math.isnan(reward) for reward in rewards], bool)
    flags, numbers = (np.array(has_tokens, bool), is_graded), np.array(issues, np.int64).reshape(-1, 2).T
    return ServedRound(problems[:_MAX_PROBLEMS], hashes, served, buffered, dropped, *flags, *numbers)


def _read_rows(directory: Path, commit: Commit, name: str) -> Iterable[dict[str, Any]]:
    """Yield the rows of the shards with a name, with the columns in _COLUMNS and `has_tokens`: whether the loss mask
    lets the trainer train on a token."""
    for record in commit.shards(name):
        with pq.ParquetFile(directory / Path(record.path).relative_to(commit.attempt or "")) as shard:
            check_schema(shard.schema_arrow)
            for batch in shard.iter_batches(_BATCH, columns=[*_COLUMNS, "loss_mask"]):
                offsets, mask = trained_mask(batch, needs_rewards=False)
                has_tokens = np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets]) > 0
                for row, trainable in zip(batch.select(_COLUMNS).to_pylist(), has_tokens.tolist(), strict=True):
                    yield row | {"has_tokens": trainable}


def _prompt_origin(metadata: dict[str, Any]) -> Source:
    """Return the origin of a prompt that the metadata of its samples record. A missing file index becomes -2, since -1
    (_NO_FILE) is that of a prompt from a custom data source."""
    source = metadata.get("source") or {}
    return source.get("epoch", -1), source.get("file", -2), source.get("row", -1)


def matches_commit(row: dict[str, Any], metadata: dict[str, Any], commit: Commit) -> bool:
    """Return whether the round and policy versions of a sample match its commit. A sample that was started in an
    earlier round may begin with an older policy version."""
    first, last = row["policy_versions"]
    limit = max_staleness(commit)
    if limit:
        oldest = commit.index - limit
    elif metadata.get("start_rollout_id") is not None:
        oldest = 0
    else:
        oldest = commit.policy_version
    return bool(row["rollout_id"] == commit.index and oldest <= first <= last <= commit.policy_version)


def max_staleness(commit: Commit) -> int:
    """Return the recorded bound of a rollout's staleness: by how many policy versions its samples may be older than the
    policy that is trained on them."""
    return int(commit.state.get("max_staleness", 0))


def describe_summary_problems(
    prefix: str, commit: Commit, rewards: list[float | None], statuses: Counter[str]
) -> list[str]:
    """Return a problem for every metric of a commit that differs from the value computed from its samples. In the mean
    reward of an evaluation, a sample without a reward counts as 0; in the mean reward of a rollout, it is left out."""
    graded = [reward for reward in rewards if reward is not None]
    name, num_samples = prefix.rpartition("/")[2], max(len(rewards), 1)
    ratios = {
        "truncated_ratio": statuses[Status.TRUNCATED] / num_samples,
        "failed_ratio": statuses[Status.FAILED] / num_samples,
    }
    if commit.kind == "eval":
        expected = {f"eval/{name}": sum(graded) / num_samples, f"eval/{name}/num_samples": float(len(rewards))}
        expected |= {f"eval/{name}-{ratio}": value for ratio, value in ratios.items()}
    else:
        expected = {"rollout/raw_reward": sum(graded) / max(len(graded), 1), "rollout/num_samples": float(len(rewards))}
        expected |= {f"rollout/{ratio}": value for ratio, value in ratios.items()}
    tolerance = 1e-9 * max([1.0, *map(abs, graded)])
    return [
        f"{commit_key(prefix)} has {metric} {value:g}, but its samples give {expected[metric]:g}"
        for metric, value in commit.summary.items()
        if metric in expected
        and not math.isclose(value, expected[metric], rel_tol=0.0, abs_tol=tolerance)
        and not (math.isnan(value) and math.isnan(expected[metric]))
    ]


def describe_use_problems(
    key: str, step: Commit, round: ServedRound, train: dict[str, Any], earlier: Mapping[int, ServedRound]
) -> list[str]:
    """Check how often the commit of a step (at `key`) says that each sample of its round, and of the groups that were
    replayed from `earlier` rounds, was trained. Return the problem.

    Every sample with a token to train on and, unless the loss is that of demonstrations, with a reward must be trained
    once per epoch of --ppo-epochs. A user-defined function may mask samples. `train`: the recorded options of the
    trainer. The replayed groups must be those that --replay-share chooses.
    """
    try:
        recorded = {(rollout, group): uses for rollout, group, uses in step.state.get("replayed", [])}
    except (TypeError, ValueError):
        return [f"{key} does not say how often each replayed sample was trained (`state.replayed`)"]
    chosen: list[StoredGroup] = []
    if train.get("replay"):
        groups = [group for index, stored in sorted(earlier.items()) for group in stored.stored_groups(index)]
        chosen = choose_replayed(groups, len(round.served), train, step.index)
    if wrong := recorded.keys() ^ {(group.rollout_id, group.group_id) for group in chosen}:
        has, (index, group_id) = "lacks" if min(wrong) not in recorded else "has", min(wrong)
        return [
            f"{key} {has} group {group_id} of round {index} among the replayed groups; it must have the "
            f"{len(chosen)} groups that --replay-share chooses"
        ]
    inputs = {name for name in step.inputs if name.startswith("replayed/")}
    if inputs != {f"replayed/{index}" for index, _ in recorded}:
        return [f"{key} has other rollouts as inputs than those of its replayed groups (`inputs`, `state.replayed`)"]
    for group in chosen:
        stored = earlier[group.rollout_id]
        rows = stored.issues == int(group.group_id)
        part = replace(stored, has_tokens=stored.has_tokens[rows], is_graded=stored.is_graded[rows])
        uses = recorded[group.rollout_id, group.group_id]
        where = f"its replayed group {group.group_id} of round {group.rollout_id}"
        if problems := _describe_wrong_uses(key, uses, part, train, where):
            return problems
    return _describe_wrong_uses(key, step.state.get("sample_uses"), round, train, "its rollout")


def _describe_wrong_uses(key: str, runs: Any, round: ServedRound, train: dict[str, Any], where: str) -> list[str]:
    """Compare how often samples were trained, as `encode_runs` encodes it, with how often they must be."""
    try:
        values, numbers = np.array(runs, np.int64).reshape(-1, 2).T
    except (TypeError, ValueError, OverflowError):
        return [f"{key} does not say how often each sample was trained (`state.sample_uses`)"]
    if (numbers < 1).any() or numbers.sum() != len(round.has_tokens):
        return [f"{key} says how often {numbers.sum()} samples were trained; {where} has {len(round.has_tokens)}"]
    uses = np.repeat(values, numbers)
    needed = train["ppo_epochs"] * (round.has_tokens & (round.is_graded | (train["loss_type"] == "sft_loss")))
    wrong = uses != needed
    if train["rollout_data_postprocess_path"] is not None:
        wrong &= uses != 0
    return [
        f"{key} says that sample {row} of {where} was trained {uses[row]} times; it must be {needed[row]} times"
        for row in np.flatnonzero(wrong)[:1]
    ]


@dataclass
class EpochCursor:
    """A run's position in its prompt data: one position for all files together, or with --prompt-data-weights one per
    file, since each file then has its own epochs."""

    epoch: int = 0
    cursor: int = 0  # prompts of this epoch that were issued or skipped
    rows: set[tuple[int, int]] = field(default_factory=set)  # (file, row) of the prompts issued in this epoch
    skipped: int = 0  # prompts of this epoch that were skipped as too long


class PromptAudit:
    """Checks the rounds of a run in order: compares the prompts of each round with the data source's state that the
    round's commit records."""

    def __init__(self, restarts: set[int]) -> None:
        self.restarts = restarts  # rounds at which a fork restarted the data from the beginning
        self.num_epochs = 0  # started epochs, including epochs before a restart of the data
        self._past_epochs = 0
        self._before: dict[str, Any] = {"issued": 0, "segments": []}
        self._cursors: dict[int, EpochCursor] = {}  # by file index if files are weighted, else one with key 0
        self._buffered: set[int] = set()  # issue numbers of the buffered prompts after the last round
        self._num_skipped = 0  # prompts that the current round has skipped, according to its samples

    def audit_round(self, prefix: str, commit: Commit, round: ServedRound, *, one_epoch: bool = False) -> list[str]:
        """Check the prompts of the next round, and return the problems. With `one_epoch` (evaluations), the round must
        use each prompt once."""
        after = commit.state.get("data_source")
        if after is None:
            return [f"{commit_key(prefix)} has no data source state"]
        if commit.index in self.restarts and not one_epoch:
            self._before = {"issued": self._before["issued"], "segments": []}
            self._cursors, self._buffered = {}, set()
            self._past_epochs = self.num_epochs
        before, self._before = self._before, after
        issues = range(before["issued"], after["issued"])
        expected, self._buffered = {*issues, *self._buffered}, set(round.buffered)
        arrived = Counter([*round.served, *round.buffered, *round.dropped])
        if repeated := [issue for issue, count in arrived.items() if count > 1]:
            return [f"{prefix}: prompt {min(repeated)} was used twice; it must be trained on, buffered or dropped once"]
        if wrong := arrived.keys() ^ expected:
            problem = "missing" if min(wrong) in expected else "unexpected"
            return [
                f"{prefix} must contain prompts {issues.start} to {issues.stop - 1} and the prompts that the previous "
                f"round buffered; prompt {min(wrong)} is {problem}"
            ]
        if after["segments"][: len(before["segments"])] != before["segments"]:
            return [
                f"{commit_key(prefix)} lacks data segments (`state.data_source.segments`) that the previous round's "
                "commit has"
            ]
        sources = {**round.served, **round.buffered, **round.dropped}
        issued = {issue: source for issue, source in sources.items() if issue in issues and source[1] != _NO_FILE}
        problems = self._advance_and_compare_cursors(prefix, before, after, issued)
        self.num_epochs = self._past_epochs + max(cursor.epoch for cursor in self._cursors.values()) + 1
        num_rows = sum(segment["rows"] for segment in after["segments"])
        if one_epoch and (after["epoch"], len(self._cursors[0].rows)) != (0, num_rows):
            problems.append(
                f"{prefix} has samples of {len(self._cursors[0].rows)} of the data set's {num_rows} prompts; it must "
                "have samples of each prompt"
            )
        return problems[:3]

    def _advance_and_compare_cursors(
        self, prefix: str, state_before: dict[str, Any], state_after: dict[str, Any], issued: dict[int, Source]
    ) -> list[str]:
        """Advance the expected data positions (`_cursors`) by the prompts `issued` in a round. Return the problems: how
        the positions differ from `state_after`, the data source's state in the round's commit."""
        weighted = state_after.get("places") or []
        if weighted and not state_before.get("places"):
            self._cursors = split_cursor_by_file(self._cursors.get(0, EpochCursor()), state_before["segments"])
        num_skipped = state_after.get("skipped", 0) - state_before.get("skipped", 0)
        self._num_skipped = 0
        problems: list[str] = []
        for file, state in enumerate(weighted or [state_after]):
            segments = [segment for segment in state_after["segments"] if not weighted or segment["file"] == file]
            served = {issue: source for issue, source in issued.items() if not weighted or source[1] == file}
            cursor = self._cursors.setdefault(file, EpochCursor())
            problems += self._advance_and_compare_cursor(
                prefix, cursor, state, served, segments, may_skip=num_skipped > 0
            )
        if num_skipped != self._num_skipped and not problems:
            problems.append(
                f"{commit_key(prefix)} records {num_skipped} skipped prompts, but its samples lack "
                f"{self._num_skipped} prompts of the data"
            )
        return problems

    def _advance_and_compare_cursor(
        self,
        prefix: str,
        cursor: EpochCursor,
        expected_state: dict[str, Any],
        served: dict[int, Source],
        segments: list[dict[str, Any]],
        *,
        may_skip: bool,
    ) -> list[str]:
        """Advance one data position by the prompts `served`, and return the problems: how the position differs from
        `expected_state`. With `may_skip`, prompts that are missing before the end of an epoch or before
        `expected_state` count as skipped."""
        problems = []
        num_rows = sum(segment["rows"] for segment in segments)
        for issue in sorted(served):
            epoch, file, row = served[issue]
            while cursor.cursor == num_rows or (may_skip and epoch > cursor.epoch):
                self._skip_prompts(cursor, num_rows - cursor.cursor)
                if len(cursor.rows) + cursor.skipped != num_rows:
                    problems.append(
                        f"{prefix}: epoch {cursor.epoch} ended with {len(cursor.rows)} of {num_rows} prompts used"
                    )
                cursor.epoch, cursor.cursor, cursor.rows, cursor.skipped = cursor.epoch + 1, 0, set(), 0
            cursor.cursor += 1
            where = f"{prefix}: prompt {issue} is row {row} of file {file + 1}"
            if epoch != cursor.epoch:
                problems.append(
                    f"{prefix}: prompt {issue} has epoch {epoch}; the data source was in epoch {cursor.epoch}"
                )
            if not any(s["file"] == file and s["start"] <= row < s["start"] + s["rows"] for s in segments):
                problems.append(f"{where}, which is not in the run's data")
            if (file, row) in cursor.rows:
                problems.append(f"{where}, which was already used in epoch {cursor.epoch}")
            cursor.rows.add((file, row))
        if may_skip and expected_state["epoch"] == cursor.epoch and expected_state["cursor"] > cursor.cursor:
            self._skip_prompts(cursor, expected_state["cursor"] - cursor.cursor)
        if (cursor.epoch, cursor.cursor) != (expected_state["epoch"], expected_state["cursor"]):
            problems.append(
                f"{commit_key(prefix)} records that the data source is at epoch {expected_state['epoch']}, prompt "
                f"{expected_state['cursor']}; its samples give epoch {cursor.epoch}, prompt {cursor.cursor}"
            )
        return problems

    def _skip_prompts(self, cursor: EpochCursor, count: int) -> None:
        cursor.cursor, cursor.skipped = cursor.cursor + count, cursor.skipped + count
        self._num_skipped += count


def split_cursor_by_file(cursor: EpochCursor, segments: list[dict[str, Any]]) -> dict[int, EpochCursor]:
    """Split one position in all prompt files together into a position per file: file index -> position. A run that is
    resumed with --prompt-data-weights does this. `segments`, from the data source's state, are blocks of rows in the
    order in which the run visits them."""
    cursors: dict[int, EpochCursor] = {}
    visited = cursor.cursor
    for segment in segments:
        of_file = cursors.setdefault(segment["file"], EpochCursor(cursor.epoch))
        here = min(visited, segment["rows"])
        of_file.cursor, visited = of_file.cursor + here, visited - here
    for file, of_file in cursors.items():
        of_file.rows = {source for source in cursor.rows if source[0] == file}
        of_file.skipped = of_file.cursor - len(of_file.rows)
    return cursors
