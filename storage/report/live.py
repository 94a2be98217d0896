"""What the page of a running run shows, as a dict that can be written as JSON: from commits, each read once, and from
status.json. A browser asks every few seconds and gets what is new since its last answer."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.storage.commit import Commit, RunKeys, model_title
from penstock.storage.history.costs import ran_on_gpus
from penstock.storage.history.run_record import (
    RunRecord,
    Start,
    StartEnd,
    is_inherited,
    read_run_record,
    read_starts,
)
from penstock.storage.history.run_status import (
    SILENT_SECONDS,
    CommitFeed,
    RunState,
    RunStatus,
    read_run_status,
    run_state,
)
from penstock.storage.report.data import task_of, to_json_number
from penstock.storage.report.page import STATUSES, ReportSamples
from penstock.storage.samples.shards import read_table
from penstock.storage.store import Store

READ_SECONDS = 0.05  # of commits for one answer; the next answer has more
MAX_POINTS = 1000  # of a curve
LANE_ROUNDS = 8
NUM_BEST = 3  # samples with the highest reward of a round, and as many with the lowest
RECORDS_SECONDS = 10.0  # between two readings of starts and lease

CHARTS: tuple[tuple[str, str, str, dict[str, str]], ...] = (  # section, title, unit, metric -> label of its curve
    ("learning", "Reward", "mean of a round", {"rollout/raw_reward": "reward"}),
    ("learning", "Loss", "", {"train/loss": "loss"}),
    ("speed", "Tokens per second", "", {
        "perf/tokens_per_gpu_per_sec": "generated, per device", "perf/actor_train_tok_per_s": "trained",
    }),
    ("speed", "Response length", "tokens", {"rollout/response_len/mean": "mean", "rollout/response_len/max": "max"}),
    ("speed", "Staleness", "policy versions", {"rollout/staleness/mean": "mean", "rollout/staleness/max": "max"}),
    ("speed", "Idle engines", "fraction of the time", {"perf/engine_idle_ratio": "idle"}),
    ("policy", "Entropy", "nats per token", {"train/entropy_loss": "entropy"}),
    ("policy", "KL", "nats per token", {"train/kl_loss": "to the reference", "train/ppo_kl": "old − current"}),
    ("policy", "Gap of log-probs", "mean |train − rollout|, nats", {"train/train_rollout_logprob_abs_diff": "gap"}),
    ("policy", "Gradient norm", "before clipping", {"train/grad_norm": "norm"}),
    ("policy", "Truncated and failed", "fraction of samples", {
        "rollout/truncated_ratio": "truncated", "rollout/failed_ratio": "failed",
    }),
)  # fmt: skip
METRICS = [name for *_, curves in CHARTS for name in curves]


class LiveRun:
    """A run that is shown on the live page. Thread-safe: several browsers may ask.

    Args:
        num_planned_rounds: returns how many rounds a run with a record shall train, by its newest recorded options.
        read_token_texts: returns id -> text of tokens, by the run's record and newest commits.
    """

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        num_planned_rounds: Callable[[Store, RunKeys, RunRecord], int],
        read_token_texts: Callable[[Store, RunRecord, Sequence[Commit], Sequence[int]], dict[int, str]],
    ) -> None:
        self.store = store
        self.keys = keys
        self._num_planned_rounds, self._read_token_texts = num_planned_rounds, read_token_texts
        self._lock = threading.Lock()
        self._begin(None)

    def _begin(self, record: RunRecord | None) -> None:
        """Forget everything: the run was removed, or another one has its name."""
        self.record = record
        self.feed = CommitFeed(self.store, self.keys)
        self.num_trained = 0
        self.on_gpus = False  # whether a trained round used GPUs
        self.newest: dict[str, Commit] = {}  # kind -> newest commit, without its state
        self.evaluations: list[dict[str, Any]] = []
        self._columns: dict[str, array[float]] = defaultdict(lambda: array("d"))  # metric -> value of each round
        self._stages: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=4 * LANE_ROUNDS))
        self._starts: list[tuple[Start, StartEnd | None]] = []
        self._num_planned = 0
        self._records_read_at = float("-inf")
        self._status: RunStatus | None = None
        self._status_changed_at = float("-inf")  # by this machine's monotonic clock
        self._state = RunState("waiting")
        self._samples: tuple[tuple[int, bool], dict[str, Any]] | None = None

    # ---- reading -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read what is new in the store, for about READ_SECONDS."""
        now = time.monotonic()
        status = read_run_status(self.store, self.keys)
        is_new = status != self._status
        if is_new:
            self._status_changed_at = now if self._status is not None else float("-inf")
            restarted = self._status is not None and status is not None and status.start != self._status.start
            self._status = status
            self._records_read_at = float("-inf") if restarted else self._records_read_at
        is_fresh = now - self._status_changed_at < SILENT_SECONDS
        if now - self._records_read_at > RECORDS_SECONDS:
            record = read_run_record(self.store, self.keys)
            if record != self.record:
                self._begin(record)
                self._status = status
            self._records_read_at = now
            if record is not None:
                self._starts = read_starts(self.store, self.keys, known=self._starts)
                self._num_planned = self._num_planned_rounds(self.store, self.keys, record)
            self._state = run_state(self.store, self.keys, self._starts, self._status, is_fresh=is_fresh)
        for commit in self.feed.read(READ_SECONDS):
            self._add(commit)

    def _add(self, commit: Commit) -> None:
        kind, index = commit.listed_kind, commit.index
        if kind == "regrade":
            return
        if kind == "step":
            self.num_trained = max(self.num_trained, index + 1)
            self.on_gpus = self.on_gpus or ran_on_gpus(commit)
        if kind in ("rollout", "step"):
            for name in METRICS:
                if name in commit.summary:
                    column = self._columns[name]
                    column.extend([float("nan")] * (index + 1 - len(column)))
                    column[index] = commit.summary[name]
        if kind == "eval":
            task = task_of(commit)
            values = [commit.summary.get(f"eval/{task}{end}") for end in ("", "-ci_low", "-ci_high")]
            mean, low, high = (None if value is None else to_json_number(value) for value in values)
            self.evaluations.append({"task": task, "version": index, "mean": mean, "low": low, "high": high})
        if not is_inherited(self.keys, self.record, commit):
            stage = {"kind": kind, "index": index, "start": commit.started_at, "end": commit.created_at}
            self._stages[kind].append(stage | {"task": task_of(commit) if kind == "eval" else ""})
        newest = self.newest.get(kind)
        if newest is None or index >= newest.index:
            self.newest[kind] = commit.model_copy(update={"state": {}})

    # ---- answers -----------------------------------------------------------------------------------------------------

    def answer(self, since: str = "") -> dict[str, Any] | None:
        """Return what is new since the answer with the cursor `since` (default: all); None if the run is unknown."""
        with self._lock:
            self.refresh()
            if self.record is None:
                return None
            state, status, last_sign = self._state, self._status, self._state.since
            of_start = status is not None and status.start == len(self._starts) - 1
            is_current = of_start and state.kind in ("running", "silent")  # otherwise the status is that of the end
            if state.kind == "killed":
                last_sign = max([last_sign or 0.0, *(commit.created_at for commit in self.newest.values())])
            rollout = self.newest.get("rollout")
            first = min(rollout.index + 1 if rollout else 0, self.num_trained) - LANE_ROUNDS  # round of the lanes
            shown = {
                "header": self._header(self.record),
                "state": asdict(state) | {"since": last_sign, "num_starts": len(self._starts)},
                "status": status.model_dump() if status else None,
                "is_current": is_current,
                "stages": [stage for stages in self._stages.values() for stage in stages if stage["index"] >= first],
                "now": time.time(),
                "num_loading": self.feed.num_waiting,
            }
            return shown | self._new_points(self.record.id, since)

    def _header(self, record: RunRecord) -> dict[str, Any]:
        rewards = self._columns.get("rollout/raw_reward", array("d"))[: self.num_trained]
        rollout, checkpoint = self.newest.get("rollout"), self.newest.get("checkpoint")
        parent = record.parent
        return {
            "run": self.keys.run,
            "flow": record.flow,
            "model": model_title(record.config.get("convert", {}).get("hf_checkpoint", "")),
            "store": self.store.uri,
            "parent": parent.model_dump(include={"run", "at"}) if parent else None,
            "num_rounds": self.num_trained,
            "num_planned_rounds": self._num_planned,
            "first_reward": to_json_number(rewards[0]) if rewards else None,
            "last_reward": to_json_number(rewards[-1]) if rewards else None,
            "last_checkpoint": checkpoint.index if checkpoint else None,
            "newest_rollout": rollout.index if rollout and rollout.files else None,
            "newest_is_trained": bool(rollout and rollout.index < self.num_trained),
            "on_gpus": self.on_gpus
            or any("GPU" in lane.devices for lane in (self._status.lanes if self._status else [])),
            "colocated": bool(self._starts) and self._starts[-1][0].colocated,
        }

    def _new_points(self, run_id: str, since: str) -> dict[str, Any]:
        """Return the points of the curves and the evaluations that the cursor `since` does not cover, and a new cursor.
        Of a long run each point is the mean of `stride` rounds. The last point may change, so it is sent again."""
        num_rounds = max((len(column) for column in self._columns.values()), default=0)
        stride = 1
        while num_rounds > MAX_POINTS * stride:
            stride *= 2
        num_points = -(-num_rounds // stride)
        parts = since.split("-")
        known = parts[:2] == [run_id, str(stride)] and len(parts) == 4 and parts[2].isdigit()
        first = min(int(parts[2]), num_points) if known else 0
        # the newest rollouts may not be trained yet: their points will change
        final = min(num_points, self.num_trained // stride)
        values = {name: self._points(column, first, stride) for name, column in self._columns.items()}
        out: dict[str, Any] = {
            "cursor": f"{run_id}-{stride}-{final}-{len(self.evaluations)}",
            "curves": {
                "first": first,
                "stride": stride,
                "round": [point * stride for point in range(first, num_points)],
                "metrics": values,
            },
        }
        if not known:
            out["charts"] = CHARTS
        if not known or parts[3] != str(len(self.evaluations)):
            out["evaluations"] = sorted(self.evaluations, key=lambda entry: (entry["task"], entry["version"]))
        return out

    def _points(self, column: array[float], first: int, stride: int) -> list[float | None]:
        rounds = np.frombuffer(column[first * stride :], dtype=np.float64)
        padded = np.append(rounds, np.full(-len(rounds) % stride, np.nan)).reshape(-1, stride)
        finite = np.isfinite(padded)
        counts = finite.sum(axis=1)
        means = np.where(finite, padded, 0.0).sum(axis=1) / np.maximum(counts, 1)
        return [float(f"{mean:.6g}") if count else None for mean, count in zip(means, counts, strict=True)]

    # ---- samples -----------------------------------------------------------------------------------------------------

    def samples(self) -> dict[str, Any] | None:
        """Return the samples with the highest and the lowest rewards of the newest rollout, those with the highest
        first, or None if the run has none. They are read once for each rollout, and again when it was trained."""
        with self._lock:
            record, rollout, step = self.record, self.newest.get("rollout"), self.newest.get("step")
        if record is None or rollout is None or not rollout.files:
            return None
        step = step if step is not None and step.index == rollout.index else None
        key, known = (rollout.index, step is not None), self._samples
        if known is None or known[0] != key:
            table = read_table(self.store, rollout).drop_columns(["routed_experts", "teacher_logprobs"])
            rows = best_and_worst(table.column("reward").to_pylist(), table.column("group_id").to_pylist())
            rows = rows or list(range(min(2 * NUM_BEST, len(table))))  # demonstrations have no rewards
            samples = ReportSamples(num_total=len(table), sets=["training"])
            samples.add_table("training", rollout.index, table.take(pa.array(rows, pa.int64())), self.store, step)
            samples.finish(self.store)
            commits = list(self.newest.values())
            texts = self._read_token_texts(self.store, record, commits, sorted(samples.token_ids))
            value = {"round": rollout.index, "num_samples": len(table), "index": samples.index, "statuses": STATUSES}
            value |= {"page": samples.pages[0] if rows else {}, "token_texts": texts, "pictures": samples.pictures}
            known = self._samples = key, value
        return known[1]


def best_and_worst(rewards: Sequence[float | None], groups: Sequence[str]) -> list[int]:
    """Return the rows with the highest rewards, then those with the lowest, NUM_BEST each, of different groups if there
    are enough."""
    graded = sorted((reward, row) for row, reward in enumerate(rewards) if reward is not None and math.isfinite(reward))
    order = [row for _, row in graded]

    def pick(candidates: Sequence[int], taken: Sequence[int]) -> list[int]:
        free = [row for row in candidates if row not in taken]
        first: dict[str, int] = {}
        for row in free:
            first.setdefault(groups[row], row)
        return list(dict.fromkeys([*first.values(), *free]))[:NUM_BEST]

    best = pick(order[::-1], ())
    return [*best, *pick(order, best)[::-1]]
