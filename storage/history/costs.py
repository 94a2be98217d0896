"""What a run costs: device-seconds by stage, by round and by checkpoint, and tokens, derived from commits and starts.

Devices are GPUs; on a machine without GPUs they are the trainer's processes and the engines. For every device, the
seconds of its stages and its idle seconds add up to the time that drivers of the run were alive. If two stages overlap
on a device (a checkpoint that is saved during an evaluation on the same GPUs), the overlap counts for the stage that
started later. Idle time includes startup, weight updates and waits.

Energy is that of the GPUs, if the node of the driver has energy counters for them (engines/local_gpus.py); otherwise it
is absent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.history.run_record import Start, StartEnd, is_inherited, read_run_record, read_starts
from penstock.storage.store import Store, read_commits

IDLE = "idle"
STAGES = {
    "rollout": "rollout",
    "eval": "evaluation",
    "step": "training",
    "checkpoint": "checkpoint",
    "export": "export",
}
_ENGINE_KINDS = ("rollout", "eval")
_ENERGY = {  # kind of commit -> metric of its energy in joules
    "rollout": "perf/rollout_energy_joules",
    "eval": "perf/rollout_energy_joules",
    "step": "perf/train_energy_joules",
    "checkpoint": "perf/save_energy_joules",
}


class Interval(NamedTuple):
    """The time of one stage, in seconds since the epoch."""

    begin: float
    end: float
    stage: str


@dataclass
class RoundCost:
    """The resources that one round used."""

    rollout_id: int
    device_seconds: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    kept_samples: int = 0  # samples with trained tokens
    removed_samples: int = 0  # committed samples without trained tokens
    dropped_groups: int = 0  # groups that a filter dropped
    trained_tokens: float = 0.0
    wasted_tokens: float = 0.0  # generated and not trained on, where the commit records it (streaming mode)
    joules: dict[str, float] = field(default_factory=dict)  # stage -> energy, of stages where it was measured


@dataclass
class RunCosts:
    """The resources that a run used, over all of its starts."""

    wall_seconds: float = 0.0  # time in which a driver was alive
    num_starts: int = 0
    device_seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # devices -> stage or IDLE -> seconds
    num_devices: dict[str, int] = field(default_factory=dict)  # devices -> their number in the last start
    rounds: list[RoundCost] = field(default_factory=list)
    # policy version -> device-seconds since the previous one
    checkpoints: dict[int, float] = field(default_factory=dict)
    joules: dict[str, float] = field(default_factory=dict)  # stage or IDLE -> energy, where it was measured
    checkpoint_joules: dict[int, float] = field(default_factory=dict)  # policy version -> energy, as `checkpoints`

    @property
    def total_device_seconds(self) -> float:
        """Return the device-seconds of all stages and of idle time."""
        return sum(sum(stages.values()) for stages in self.device_seconds.values())

    @property
    def kept_samples(self) -> int:
        """Return the number of samples with trained tokens."""
        return sum(cost.kept_samples for cost in self.rounds)

    def metrics(self, price_per_hour: float | None = None) -> dict[str, float]:
        """Return the totals as metrics, with the money that they cost if a price per device and hour is given."""
        total = self.total_device_seconds
        idle = sum(stages.get(IDLE, 0.0) for stages in self.device_seconds.values())
        metrics = {
            "usage/device_hours": total / 3600,
            "usage/idle_ratio": idle / total if total else 0.0,
            "usage/wall_hours": self.wall_seconds / 3600,
            "usage/device_seconds_per_kept_sample": total / self.kept_samples if self.kept_samples else 0.0,
        }
        if self.joules:
            joules = sum(self.joules.values())
            metrics["usage/energy_kwh"] = joules / 3.6e6
            metrics["usage/joules_per_kept_sample"] = joules / self.kept_samples if self.kept_samples else 0.0
        if price_per_hour is not None:
            metrics["usage/money"] = total / 3600 * price_per_hour
        return metrics


def compute_costs(store: Store, keys: RunKeys) -> RunCosts:
    """Return the resources that a run used. Commits that a fork shares with its parent do not count."""
    return sum_costs(read_own_commits(store, keys), read_starts(store, keys))


def costs_at_end(store: Store, keys: RunKeys, number: int | None = None) -> Iterator[tuple[int, StartEnd, RunCosts]]:
    """Yield (number, end, costs up to the end) of each start that was not killed, or only of start `number`."""
    commits, starts = read_own_commits(store, keys), read_starts(store, keys)
    for n, (_, end) in enumerate(starts):
        if end is not None and number in (None, n):
            yield n, end, sum_costs([commit for commit in commits if commit.created_at <= end.at], starts[: n + 1])


def read_own_commits(store: Store, keys: RunKeys) -> list[Commit]:
    """Return the commits of a run, except commits that a fork shares with its parent, and except those of `penstock
    regrade`, which are made when no driver is alive."""
    record = read_run_record(store, keys)
    commits = (commit for commit in read_commits(store, keys) if commit.listed_kind != "regrade")
    return [commit for commit in commits if not is_inherited(keys, record, commit)]


def sum_costs(commits: list[Commit], recorded_starts: list[tuple[Start, StartEnd | None]]) -> RunCosts:
    """Return the resources that a run used, computed from its own commits and its starts."""
    starts = close_starts(recorded_starts, commits)
    costs = RunCosts(sum(end - start.at for start, end in starts), len(starts))
    on_gpus = any(ran_on_gpus(commit) for commit in commits if commit.kind == "step")
    trainer_kinds = [kind for kind in STAGES if kind not in _ENGINE_KINDS]
    groups: list[tuple[str, int, Sequence[str]]]  # name, number of devices, kinds of commits made on them
    for start, end in starts:
        groups = [("trainer", start.trainer_devices, trainer_kinds), ("engines", start.engine_devices, _ENGINE_KINDS)]
        if start.colocated and on_gpus:
            groups = [("trainer and engines", max(start.trainer_devices, start.engine_devices), list(STAGES))]
        for devices, number, kinds in groups:
            if not number:
                continue
            intervals = [
                Interval(commit.started_at, commit.created_at, STAGES[commit.kind])
                for commit in commits
                if commit.kind in kinds
            ]
            used = costs.device_seconds.setdefault(devices, {})
            for stage, seconds in seconds_by_stage(intervals, start.at, end).items():
                used[stage] = used.get(stage, 0.0) + number * seconds
            costs.num_devices[devices] = number
    last = starts[-1][0] if starts else Start()
    costs.rounds = costs_of_rounds(commits, last)
    saves = [commit for commit in commits if commit.kind == "checkpoint"]
    costs.checkpoints = sum_by_checkpoint(
        {cost.rollout_id: sum(cost.device_seconds.values()) for cost in costs.rounds},
        {commit.index: last.trainer_devices * sum(commit.seconds.values()) for commit in saves},
    )
    costs.joules = energy_by_stage(commits, recorded_starts)
    joules = sum_by_checkpoint(
        {cost.rollout_id: sum(cost.joules.values()) for cost in costs.rounds},
        {commit.index: commit.summary.get(_ENERGY["checkpoint"], math.nan) for commit in saves},
    )
    costs.checkpoint_joules = {version: energy for version, energy in joules.items() if not math.isnan(energy)}
    return costs


def ran_on_gpus(step: Commit) -> bool:
    """Return whether the trainer of a step used GPUs. The fingerprint has the number of threads of a trainer on CPUs;
    its `cuda` is the CUDA version of the torch build, which also exists on machines without GPUs."""
    fingerprint = step.state.get("fingerprint", {})
    return bool(fingerprint) and fingerprint.get("threads") is None


def energy_by_stage(commits: list[Commit], starts: list[tuple[Start, StartEnd | None]]) -> dict[str, float]:
    """Return the energy in joules of each stage where it was measured, and under IDLE the rest of the total energy that
    the starts recorded. {} if no energy was measured.

    If two stages use the same GPUs at the same time (an evaluation during a rollout), both count the energy of that
    time, so IDLE may be too small, but is never negative.
    """
    joules: Counter[str] = Counter()
    for commit in commits:
        if (metric := _ENERGY.get(commit.kind)) in commit.summary:
            joules[STAGES[commit.kind]] += commit.summary[metric]  # type: ignore[assignment]
    for start, end in starts:
        if end is not None and end.joules is not None:
            inside = [c for c in commits if start.at <= c.created_at <= end.at]
            measured = sum(c.summary.get(_ENERGY.get(c.kind, ""), 0.0) for c in inside)
            joules[IDLE] += max(0.0, end.joules - measured)  # type: ignore[assignment]
    return dict(joules)


def seconds_by_stage(intervals: Iterable[Interval], begin: float, end: float) -> dict[str, float]:
    """Return the seconds between `begin` and `end` that each stage took, and under IDLE the rest; the sum is end -
    begin. Where intervals overlap, the time counts for the one that began last."""
    clipped = [Interval(max(i.begin, begin), min(i.end, end), i.stage) for i in intervals]
    events = sorted((time, order, i) for i in clipped if i.begin < i.end for order, time in enumerate((i.begin, i.end)))
    seconds: Counter[str] = Counter()
    active: list[Interval] = []
    now = begin
    for time, is_end, interval in events:
        seconds[active[-1].stage if active else IDLE] += time - now  # type: ignore[assignment]
        now = time
        active.remove(interval) if is_end else active.append(interval)
    seconds[IDLE] += end - now  # type: ignore[assignment]
    return dict(seconds)


def close_starts(starts: list[tuple[Start, StartEnd | None]], commits: list[Commit]) -> list[tuple[Start, float]]:
    """Return each start with the time of its end; a killed start ends at the time of its last commit."""
    closed = []
    for index, (start, end) in enumerate(starts):
        until = starts[index + 1][0].at if index + 1 < len(starts) else float("inf")
        times = [commit.created_at for commit in commits if start.at <= commit.created_at < until]
        closed.append((start, end.at if end else max(times, default=start.at)))
    return closed


def costs_of_rounds(commits: list[Commit], start: Start) -> list[RoundCost]:
    rounds: dict[int, RoundCost] = {}
    for commit in commits:
        if commit.kind not in ("rollout", "step"):
            continue
        cost = rounds.setdefault(commit.index, RoundCost(commit.index))
        devices = start.engine_devices if commit.kind == "rollout" else start.trainer_devices
        cost.device_seconds[STAGES[commit.kind]] = devices * sum(commit.seconds.values())
        if (metric := _ENERGY[commit.kind]) in commit.summary:
            cost.joules[STAGES[commit.kind]] = commit.summary[metric]
        if commit.kind == "rollout":
            summary, num_samples = commit.summary, commit.num_samples()
            cost.removed_samples = round(summary.get("rollout/removed_ratio", 0.0) * num_samples)
            cost.kept_samples = num_samples - cost.removed_samples
            cost.dropped_groups = int(summary.get("rollout/num_dropped_groups", 0.0))
            cost.trained_tokens = summary.get("rollout/response_len/mean", 0.0) * num_samples
            cost.wasted_tokens = summary.get("rollout/wasted_tokens", 0.0)
    return [rounds[index] for index in sorted(rounds)]


def sum_by_checkpoint(of_rounds: dict[int, float], saves: dict[int, float]) -> dict[int, float]:
    """Return, by the policy version of each checkpoint, the sum of `of_rounds` over the rounds since the previous
    checkpoint, plus `saves`, the cost of saving the checkpoint."""
    versions = sorted(saves)
    return {
        version: sum(value for index, value in of_rounds.items() if before <= index < version) + saves[version]
        for before, version in pairwise([0, *versions])
    }
