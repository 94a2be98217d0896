"""Which prompts a run has served, and whether each was served exactly once: read from the shards, held against the data source's states.

Of samples only ids, versions and metadata are read, shard by shard; what is held of them is a hash per sample and a few numbers per
prompt. Where a prompt should come from is stages/rollout/prompts/source.py's: here is only what must hold of any such order.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from storage.errors import StoreError
from storage.refs import BUFFER, TRAINED, Commit, commit_key
from storage.sample import Status, check_schema
from storage.store import Store

_BATCH = 4096  # samples read at a time
_COLUMNS = ["sample_id", "group_id", "trajectory_id", "rollout_id", "policy_versions", "metadata", "reward", "status"]
_NO_FILE = -1  # of a prompt that a data source of the user's has issued itself
_MOST = 10  # problems told of one round

Source = tuple[int, int, int]  # epoch, file, row


@dataclass
class Round:
    """What the shards of a rollout or an evaluation hold."""

    problems: list[str]
    ids: np.ndarray  # [samples] uint64, hashes of the sample ids
    served: dict[int, Source]  # issue number -> where the prompt came from
    waiting: dict[int, Source] = field(default_factory=dict)  # the same of prompts that were put aside for a later round
    dropped: dict[int, Source] = field(default_factory=dict)  # and of those that were dropped


def read_round(store: Store, prefix: str, commit: Commit) -> Round:
    """The samples of one commit: what is wrong with them by themselves, and which prompts they answer."""
    problems: list[str] = []
    ids: list[str] = []
    served: dict[int, Source] = {}
    waiting: dict[int, Source] = {}
    siblings: dict[int, set[str]] = defaultdict(set)
    rewards: list[float | None] = []
    statuses: Counter[str] = Counter()
    issue_of = _issue_reader(prefix, commit)
    try:
        with store.reading(commit) as directory:
            for row in _rows(directory, commit, TRAINED):
                ids.append(row["sample_id"])
                rewards.append(row["reward"])
                statuses[row["status"]] += 1
                if (issue := issue_of(row["group_id"])) is None:
                    problems.append(
                        f"{prefix}: sample {row['sample_id']} has group {row['group_id']!r}, which is no issue number"
                    )
                    continue
                if problem := _wrong_round(row, commit):
                    problems.append(f"{prefix}: sample {row['sample_id']} {problem}")
                siblings[issue].add(row["trajectory_id"])
                where = _source(json.loads(row["metadata"]))
                if served.setdefault(issue, where) != where:
                    problems.append(f"{prefix}: the samples of group {row['group_id']} answer different prompts")
            for row in _rows(directory, commit, BUFFER):
                waiting[int(row["group_id"])] = _source(json.loads(row["metadata"]))
    except (StoreError, ValueError, OSError) as error:
        problems.append(f"{prefix}: {str(error).partition(chr(10))[0]}")
    twice = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
    if twice:
        problems.append(f"{prefix}: {len(twice)} sample ids are not unique, first {twice[0]}")
    if len(sizes := {len(members) for members in siblings.values()}) > 1:
        problems.append(f"{prefix}: groups have {min(sizes)} to {max(sizes)} samples; all must have the same number")
    if not problems and len(ids) != commit.num_samples():
        problems.append(f"{prefix} has {len(ids)} samples, committed are {commit.num_samples()}")
    if not problems:
        problems += _wrong_summary(prefix, commit, rewards, statuses)
    hashes = np.array([xxhash.xxh3_64_intdigest(one.encode()) for one in ids], dtype=np.uint64)
    dropped = {int(group["group_id"]): _source(group) for group in commit.state.get("dropped", [])}
    return Round(problems[:_MOST], hashes, served, waiting, dropped)


def _wrong_summary(prefix: str, commit: Commit, rewards: list[float | None], statuses: Counter[str]) -> list[str]:
    """The numbers of a commit that its samples contradict. A sample without a reward counts 0 in an evaluation, and not in a rollout."""
    graded = [reward for reward in rewards if reward is not None]
    name, most = prefix.rpartition("/")[2], max(len(rewards), 1)
    ratios = {"truncated_ratio": statuses[Status.TRUNCATED] / most, "failed_ratio": statuses[Status.FAILED] / most}
    if commit.kind == "eval":
        expected = {f"eval/{name}": sum(graded) / most, f"eval/{name}/num_samples": float(len(rewards))}
        expected |= {f"eval/{name}-{ratio}": value for ratio, value in ratios.items()}
    else:
        expected = {"rollout/raw_reward": sum(graded) / max(len(graded), 1), "rollout/num_samples": float(len(rewards))}
        expected |= {f"rollout/{ratio}": value for ratio, value in ratios.items()}
    tolerance = 1e-9 * max([1.0, *map(abs, graded)])
    return [
        f"{commit_key(prefix)} says {metric} {stated:g}, but its samples give {expected[metric]:g}"
        for metric, stated in commit.summary.items()
        if metric in expected and not _is_close(stated, expected[metric], tolerance)
    ]


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return one == other or abs(one - other) <= tolerance or (math.isnan(one) and math.isnan(other))


def _issue_reader(prefix: str, commit: Commit) -> Callable[[str], int | None]:
    """Group id -> number of the prompt in the order of issue."""
    before = f"eval-{commit.index:06d}-{re.escape(prefix.split('/')[-1])}-" if commit.kind == "eval" else ""
    number = re.compile(before + r"(\d{9,})")
    return lambda group_id: int(found[1]) if (found := number.fullmatch(group_id)) else None


def _wrong_round(row: dict[str, Any], commit: Commit) -> str:
    """What is wrong with the round and the policies that a sample names. One that began in an earlier round may have older tokens."""
    first, last = row["policy_versions"]
    began = json.loads(row["metadata"]).get("start_rollout_id")
    right = (first, last) == (commit.policy_version,) * 2 if began is None else first <= last <= commit.policy_version
    if row["rollout_id"] == commit.index and right:
        return ""
    version = [commit.policy_version] * 2
    return f"says rollout {row['rollout_id']} and policy versions {[first, last]}, its commit {commit.index} and {version}"


def _source(metadata: dict[str, Any]) -> Source:
    source = metadata.get("source") or {}
    return source.get("epoch", -1), source.get("file", -2), source.get("row", -1)


def _rows(directory: Path, commit: Commit, name: str) -> Iterable[dict[str, Any]]:
    for record in commit.files:
        if not record.path.rpartition("/")[2].startswith(f"{name}-"):
            continue
        with pq.ParquetFile(directory / Path(record.path).relative_to(commit.attempt or "")) as shard:
            check_schema(shard.schema_arrow)
            for batch in shard.iter_batches(_BATCH, columns=_COLUMNS):
                yield from batch.to_pylist()


@dataclass
class Lane:
    """What is visited in epochs of its own: all files, or one of several weighted ones."""

    epoch: int = 0
    cursor: int = 0  # prompts of this epoch already visited
    rows: set[tuple[int, int]] = field(default_factory=set)  # (file, row) served in this epoch
    skipped: int = 0  # prompts of this epoch that were too long


class Course:
    """The way of a run through its data, followed commit by commit beside what the samples say."""

    def __init__(self, restarts: set[int]) -> None:
        self.restarts = restarts  # rounds at which a fork began the data anew
        self.num_epochs = 0  # begun, those before a restart included
        self._past_epochs = 0
        self.before: dict[str, Any] = {"issued": 0, "segments": []}
        self.lanes: dict[int, Lane] = {}  # by file if they are weighted, else one
        self.waiting: set[int] = set()  # prompts that were put aside, by issue number
        self._skipped_now = 0  # prompts in the round that is followed

    def follow(self, prefix: str, commit: Commit, round: Round, *, whole: bool = False) -> list[str]:
        """What is wrong with one round's place in the order. `whole`: the round must be exactly one epoch."""
        after = commit.state.get("data_source")
        if after is None:
            return [f"{commit_key(prefix)} does not say where the run stands in its data"]
        if commit.index in self.restarts and not whole:
            self.before = {"issued": self.before["issued"], "segments": []}
            self.lanes, self.waiting = {}, set()
            self._past_epochs = self.num_epochs
        before, self.before = self.before, after
        issues = range(before["issued"], after["issued"])
        expected, self.waiting = {*issues, *self.waiting}, set(round.waiting)
        arrived = Counter([*round.served, *round.waiting, *round.dropped])
        if twice := [issue for issue, count in arrived.items() if count > 1]:
            return [f"{prefix}: prompt {min(twice)} is in two places: what is trained on, waits or was dropped must be different"]
        if wrong := arrived.keys() ^ expected:
            return [
                f"{prefix} should answer prompts {issues.start} to {issues.stop - 1}; number {min(wrong)} is "
                + ("missing" if min(wrong) in expected else "too many")
            ]
        every = {**round.served, **round.waiting, **round.dropped}
        issued = {issue: source for issue, source in every.items() if issue in issues and source[1] != _NO_FILE}
        if after["segments"][: len(before["segments"])] != before["segments"]:
            return [f"{commit_key(prefix)} has forgotten data that earlier rounds have seen"]
        weighted = after.get("places") or []
        if weighted and not before.get("places"):
            self.lanes = _divided(self.lanes.get(0, Lane()), before["segments"])
        num_skipped = after.get("skipped", 0) - before.get("skipped", 0)
        problems: list[str] = []
        for number, place in enumerate(weighted or [after]):
            segments = [one for one in after["segments"] if not weighted or one["file"] == number]
            lane = self.lanes.setdefault(number, Lane())
            mine = {issue: source for issue, source in issued.items() if not weighted or source[1] == number}
            problems += self._walk(prefix, lane, place, mine, segments, may_skip=num_skipped > 0)
        if num_skipped != self._skipped_now and not problems:
            problems.append(f"{commit_key(prefix)} says that {num_skipped} prompts were skipped; {self._skipped_now} are missing")
        self._skipped_now = 0
        self.num_epochs = self._past_epochs + max(lane.epoch for lane in self.lanes.values()) + 1
        num_rows = sum(segment["rows"] for segment in after["segments"])
        if whole and (after["epoch"], len(self.lanes[0].rows)) != (0, num_rows):
            problems.append(f"{prefix} has scored {len(self.lanes[0].rows)} of the data set's prompts")
        return problems[:3]

    def _walk(
        self,
        prefix: str,
        lane: Lane,
        place: dict[str, Any],
        served: dict[int, Source],
        segments: list[dict[str, Any]],
        *,
        may_skip: bool,
    ) -> list[str]:
        """Follow one lane to `place`. What was skipped is seen by what is missing: up to the next epoch, or up to the end."""
        problems = []
        num_rows = sum(segment["rows"] for segment in segments)

        def skip(count: int) -> None:
            lane.cursor, lane.skipped = lane.cursor + count, lane.skipped + count
            self._skipped_now += count

        def turn() -> None:
            if len(lane.rows) + lane.skipped != num_rows:
                problems.append(f"{prefix}: epoch {lane.epoch} ended with {len(lane.rows)} of {num_rows} prompts served")
            lane.epoch, lane.cursor, lane.rows, lane.skipped = lane.epoch + 1, 0, set(), 0

        for issue in sorted(served):
            said, file, row = served[issue]
            while lane.cursor == num_rows or (may_skip and said > lane.epoch):
                skip(num_rows - lane.cursor)
                turn()
            lane.cursor += 1
            if said != lane.epoch:
                problems.append(f"{prefix}: prompt {issue} says epoch {said}; the data source was in epoch {lane.epoch}")
            if not any(s["file"] == file and s["start"] <= row < s["start"] + s["rows"] for s in segments):
                problems.append(f"{prefix}: prompt {issue} is row {row} of file {file + 1}, which the run has not seen")
            if (file, row) in lane.rows:
                problems.append(f"{prefix}: prompt {issue} is row {row} of file {file + 1}, served before in epoch {lane.epoch}")
            lane.rows.add((file, row))
        if may_skip and place["epoch"] == lane.epoch and place["cursor"] > lane.cursor:
            skip(place["cursor"] - lane.cursor)
        if (lane.epoch, lane.cursor) != (place["epoch"], place["cursor"]):
            problems.append(
                f"{commit_key(prefix)} stands at epoch {place['epoch']}, prompt {place['cursor']}; "
                f"its samples lead to {lane.epoch}, {lane.cursor}"
            )
        return problems


def _divided(lane: Lane, segments: list[dict[str, Any]]) -> dict[int, Lane]:
    """What every file has of a lane of them all: a run that gets weights goes on in each where it stands."""
    lanes: dict[int, Lane] = {}
    left = lane.cursor
    for segment in segments:
        mine = lanes.setdefault(segment["file"], Lane(lane.epoch))
        visited = min(left, segment["rows"])
        mine.cursor, left = mine.cursor + visited, left - visited
    for number, mine in lanes.items():
        mine.rows = {(file, row) for file, row in lane.rows if file == number}
        mine.skipped = mine.cursor - len(mine.rows)
    return lanes
