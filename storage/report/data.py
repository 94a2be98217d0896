"""Collect what a report shows about a run, from its record and commits, as a dict that can be written as JSON.

Metrics are copied from the commits without rounding. A number that is not finite becomes "NaN", "Infinity" or
"-Infinity", as in the commits.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.storage.commits import read_commits
from penstock.storage.refs import ORIGINS, Commit, RunKeys, commit_key
from penstock.storage.secrets import mask_secrets
from penstock.storage.store import Store

STAGE_KINDS = ("rollout", "step", "checkpoint", "eval", "export")  # stages of a run, as shown in the time line
_EXPIRED = re.compile(r"(\d{6})\.expired\.json")
_MIN_GAP = 15.0  # seconds without any stage that count as an interruption, at least
_GAP_ROUNDS = 3.0  # and at least this many median rounds

Compare = Callable[[Store, Commit, Commit], dict[str, Any]]


@dataclass(frozen=True)
class OptionRow:
    """One option of a run, as the configuration table shows it."""

    section: str
    name: str
    value: Any
    default: Any


@dataclass(frozen=True)
class ReportInput:
    """What the report needs besides commits: values that are defined above the storage layer."""

    record: dict[str, Any]  # run.json
    num_planned_rounds: int
    options: list[OptionRow]
    changes: list[dict[str, Any]] = field(default_factory=list)  # records of changes/, oldest first
    compare: Compare | None = None  # paired comparison of two evaluations on one data set


def collect_overview(store: Store, keys: RunKeys, given: ReportInput) -> tuple[dict[str, Any], list[Commit]]:
    """Return everything that the report shows except samples, and the run's commits in the order of their creation.

    Raises:
        StoreError: a commit is damaged.
    """
    commits = read_commits(store, keys)
    rollouts, steps = (_by_index(commits, kind) for kind in ("rollout", "step"))
    stages = [_stage_entry(commit, is_inherited(keys, given.record, commit)) for commit in commits]
    gaps = find_gaps(stages)
    rounds = collect_rounds(rollouts, steps)
    overview = {
        "header": _collect_header(keys, given, rollouts, steps, commits),
        "rounds": rounds,
        "stages": stages,
        "gaps": gaps,
        "events": collect_events(rounds, stages, gaps, given.changes),
        "evaluations": [_evaluation_entry(commit) for commit in _evaluations(commits)],
        "comparisons": collect_comparisons(store, commits, given.compare),
        "lineage": _collect_lineage(store, keys, given.record, commits),
        "costs": collect_costs(stages, rounds, num_engine_gpus(given.record["config"])),
        "options": _collect_options(given),
        "changes": describe_changes(given),
    }
    return overview, commits


def to_json_number(value: float) -> float | str:
    """Return the number, or its name if it is not finite: JSON has no such numbers."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# ---- rounds and stages -----------------------------------------------------------------------------------------------


def collect_rounds(rollouts: Mapping[int, Commit], steps: Mapping[int, Commit]) -> dict[str, Any]:
    """Return the metrics of all rounds by column: {"round": [...], "metrics": {name: [value or None, ...]}}."""
    rounds = sorted(rollouts.keys() | steps.keys())
    summaries = [
        {name: to_json_number(value) for commit in (rollouts.get(r), steps.get(r)) if commit
         for name, value in commit.summary.items()}
        for r in rounds
    ]  # fmt: skip
    names = sorted({name for summary in summaries for name in summary})
    return {"round": rounds, "metrics": {name: [summary.get(name) for summary in summaries] for name in names}}


def is_inherited(keys: RunKeys, record: Mapping[str, Any], commit: Commit) -> bool:
    """Return whether a fork shares this commit with its parent. The copied record names the fork as its run, but its
    files remain in the parent's directory; steps have no files."""
    if not record.get("parent"):
        return False
    if commit.attempt:
        return not commit.attempt.startswith(f"{keys.prefix}/")
    return bool(commit.index < record["parent"]["at"])


def _stage_entry(commit: Commit, inherited: bool) -> dict[str, Any]:
    """Return one stage for the time line: when it began and ended (seconds since the epoch), and its parts."""
    return {
        "kind": commit.kind,
        "index": commit.index,
        "task": _task_of(commit) if commit.kind == "eval" else "",
        "start": commit.created_at - sum(commit.seconds.values()),
        "end": commit.created_at,
        "seconds": dict(commit.seconds),
        "bytes": sum(file.bytes for file in commit.files),
        "code": commit.code_version,
        "inherited": inherited,
    }


def find_gaps(stages: Iterable[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the times in which no stage of this run was active, if they are long compared with a round.

    Commits do not record a driver's start and end, so such a gap is the only trace of an interruption.
    """
    own = sorted((stage for stage in stages if not stage["inherited"]), key=lambda stage: stage["start"])
    ends = [stage["end"] for stage in own if stage["kind"] == "step"]
    rounds = [later - earlier for earlier, later in zip(sorted(ends), sorted(ends)[1:])]
    shortest = max(_MIN_GAP, _GAP_ROUNDS * statistics.median(rounds) if rounds else 0.0)
    gaps, active_until = [], own[0]["end"] if own else 0.0
    for stage in own:
        if stage["start"] - active_until > shortest:
            gaps.append({"start": active_until, "end": stage["start"]})
        active_until = max(active_until, stage["end"])
    return gaps


def collect_events(
    rounds: Mapping[str, Any],
    stages: list[dict[str, Any]],
    gaps: list[dict[str, float]],
    changes: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the traces of faults and restarts, in time: {"at": time, "text": what the commits show}."""
    ends = {stage["index"]: stage["end"] for stage in stages if stage["kind"] == "rollout"}
    events = [{"at": gap["end"], "text": _describe_gap(gap)} for gap in gaps]
    for name, values in rounds["metrics"].items():
        if title := _fault_title(name):
            events += [
                {"at": ends.get(r, 0.0), "text": f"round {r}: {title.format(value)}"}
                for r, value in zip(rounds["round"], values)
                if isinstance(value, int | float) and value > 0
            ]
    previous = ""
    for stage in stages:
        if stage["code"] and stage["code"] != previous and not stage["inherited"]:
            if previous:
                events.append({"at": stage["end"], "text": f"code changed from {previous} to {stage['code']}"})
            previous = stage["code"]
    events += [{"at": change["at"], "text": "options of the schedule changed"} for change in changes]
    return sorted(events, key=lambda event: event["at"])


def _describe_gap(gap: Mapping[str, float]) -> str:
    causes = "the run was stopped, a stage was retried, or processes were starting"
    return f"no stage was active for {gap['end'] - gap['start']:.0f} s ({causes})"


def _fault_title(metric: str) -> str:
    """Return the text of an event for a metric that counts faults, with `{}` for its value, else ""."""
    if metric == "rollout/num_adopted_groups":
        return "{:g} groups of an earlier attempt were reused"
    if metric == "rollout/failed_ratio":
        return "{:.2%} of the samples failed"
    return f"{{:g}} {metric}" if "restart" in metric else ""


def _by_index(commits: Iterable[Commit], kind: str) -> dict[int, Commit]:
    return {commit.index: commit for commit in commits if commit.kind == kind}


# ---- header and evaluations ------------------------------------------------------------------------------------------


def _collect_header(
    keys: RunKeys,
    given: ReportInput,
    rollouts: Mapping[int, Commit],
    steps: Mapping[int, Commit],
    commits: list[Commit],
) -> dict[str, Any]:
    record = given.record
    trained = [rollouts[r] for r in sorted(steps) if r in rollouts]
    rewards = [commit.summary["rollout/raw_reward"] for commit in trained if "rollout/raw_reward" in commit.summary]
    own = [commit for commit in commits if not is_inherited(keys, record, commit)]
    checkpoints = [commit.index for commit in commits if commit.kind == "checkpoint"]
    return {
        "run": keys.run,
        "flow": record["flow"],
        "model": record["config"].get("convert", {}).get("hf_checkpoint"),
        "parent": _short_parent(record.get("parent")),
        "started_at": record.get("created_at"),
        "last_commit_at": max((commit.created_at for commit in own), default=None),
        "generated_at": time.time(),
        "code_versions": list(dict.fromkeys(commit.code_version for commit in own if commit.code_version))
        or [record.get("code_version", "")],
        "num_rounds": len(steps),
        "num_planned_rounds": given.num_planned_rounds,
        "final_reward": to_json_number(rewards[-1]) if rewards else None,
        "first_reward": to_json_number(rewards[0]) if rewards else None,
        "last_checkpoint": max(checkpoints, default=None),
    }


def _short_parent(parent: Any) -> dict[str, Any] | None:
    return {"run": parent["run"], "at": parent["at"]} if parent else None


def _task_of(commit: Commit) -> str:
    """Return the data set of an evaluation: its attempt is .../evals/<version>/<data set>/attempt-<id>."""
    parts = (commit.attempt or "").split("/")
    return parts[-2] if len(parts) >= 2 else ""


def _evaluations(commits: Iterable[Commit]) -> list[Commit]:
    """Return the evaluations of a run, sorted by data set and version."""
    return sorted((c for c in commits if c.kind == "eval"), key=lambda commit: (_task_of(commit), commit.index))


def _evaluation_entry(commit: Commit) -> dict[str, Any]:
    return {
        "task": _task_of(commit),
        "version": commit.index,
        "metrics": {name: to_json_number(value) for name, value in commit.summary.items()},
    }


def collect_comparisons(store: Store, commits: Iterable[Commit], compare: Compare | None) -> list[dict[str, Any]]:
    """Return, for every data set with two evaluated versions, the comparison of the last with the first version."""
    by_task: dict[str, list[Commit]] = {}
    for commit in _evaluations(commits):
        by_task.setdefault(_task_of(commit), []).append(commit)
    return [
        {"task": task, "first": versions[0].index, "last": versions[-1].index}
        | compare(store, versions[0], versions[-1])
        for task, versions in by_task.items()
        if compare is not None and len(versions) > 1
    ]


# ---- lineage, costs, options -----------------------------------------------------------------------------------------


def _collect_lineage(store: Store, keys: RunKeys, record: Mapping[str, Any], commits: list[Commit]) -> dict[str, Any]:
    """Return the models and runs that the run is made from, and the checkpoints, evaluations and exports made of it."""
    origins = {role: store.read_json(keys.origin_key(role)) for role in ORIGINS}
    names = store.list(f"{keys.prefix}/checkpoints")
    expired = [int(match[1]) for name in names if (match := _EXPIRED.fullmatch(name))]
    parents, parent = [], record.get("parent")
    while parent is not None:
        parents.append(_short_parent(parent))
        parent = parent.get("parent")

    def entry(commit: Commit) -> dict[str, Any]:
        return _version_entry(commit, is_inherited(keys, record, commit))

    return {
        "models": {role: origin.get("key") for role, origin in origins.items() if origin},
        "parents": parents,
        "checkpoints": [entry(c) for c in commits if c.kind == "checkpoint"],
        "expired": expired,
        "evaluations": [entry(c) | {"task": _task_of(c)} for c in commits if c.kind == "eval"],
        "exports": [entry(c) for c in commits if c.kind == "export"],
    }


def _version_entry(commit: Commit, inherited: bool) -> dict[str, Any]:
    num_bytes = sum(file.bytes for file in commit.files)
    inputs = {role: key.removesuffix(commit_key("")) for role, key in commit.inputs.items()}
    return {"version": commit.index, "bytes": num_bytes, "inputs": inputs, "inherited": inherited}


def num_engine_gpus(config: Mapping[str, Any]) -> int:
    """Return the number of engine GPUs that the recorded options ask for (without GPUs: of engines)."""
    rollout = config.get("rollout", {})
    num_engines, gpus_per_engine = rollout.get("num_engines", 1), rollout.get("rollout_num_gpus_per_engine", 1)
    return int(rollout.get("rollout_num_gpus") or num_engines * gpus_per_engine)


def collect_costs(stages: list[dict[str, Any]], rounds: Mapping[str, Any], num_gpus: int) -> dict[str, Any]:
    """Return the seconds of every part of every kind of stage, and the samples and tokens of every round.

    Stages that a fork shares with its parent are not counted, their rounds neither.
    """
    own = [stage for stage in stages if not stage["inherited"]]
    seconds: dict[str, dict[str, float]] = {kind: {} for kind in STAGE_KINDS}
    for stage in own:
        for part, duration in stage["seconds"].items():
            parts = seconds.setdefault(stage["kind"], {})
            parts[part] = parts.get(part, 0.0) + duration
    by_round = {(stage["kind"], stage["index"]): stage["seconds"] for stage in own}
    rows = [
        _round_cost(r, by_round, {name: values[i] for name, values in rounds["metrics"].items()}, num_gpus)
        for i, r in enumerate(rounds["round"])
        if ("rollout", r) in by_round or ("step", r) in by_round
    ]
    return {"seconds": {kind: parts for kind, parts in seconds.items() if parts}, "rounds": rows, "num_gpus": num_gpus}


def _round_cost(
    r: int, seconds: Mapping[tuple[str, int], Mapping[str, float]], metrics: Mapping[str, Any], num_gpus: int
) -> dict[str, Any]:
    """Return seconds, samples, tokens and energy of one round; None for what its commits do not record."""

    def number(name: str) -> float | None:
        value = metrics.get(name)
        return value if isinstance(value, int | float) else None

    rollout, step = seconds.get(("rollout", r), {}), seconds.get(("step", r), {})
    energy = [number("perf/rollout_energy_joules"), number("perf/train_energy_joules")]
    samples, length = number("rollout/num_samples"), number("rollout/response_len/mean")
    lost = (number("rollout/removed_ratio") or 0.0) + (number("rollout/failed_ratio") or 0.0)
    rate = number("perf/tokens_per_gpu_per_sec")
    return {
        "round": r,
        "rollout_seconds": sum(rollout.values()) if rollout else None,
        "step_seconds": sum(step.values()) if step else None,
        "samples": None if samples is None else round(samples * (1 - lost)),
        "generated": None if rate is None else round(rate * rollout.get("generate", 0.0) * num_gpus),
        "trained": None if samples is None or length is None else round(samples * length),
        "wasted": number("rollout/wasted_tokens"),
        "joules": None if energy == [None, None] else sum(joules or 0.0 for joules in energy),
    }


def _collect_options(given: ReportInput) -> list[dict[str, Any]]:
    """Return the rows of the configuration table. Rows of a fork also have the parent's value if it differs."""
    parent = given.record.get("parent")
    rows = []
    for option in given.options:
        row = {
            "section": option.section,
            "name": option.name,
            "value": option.value,
            "default": option.default,
            "changed": option.value != option.default,
        }
        before = parent["config"].get(option.section, {}) if parent else {}  # without options that are not recorded
        if (option.section, option.name) != ("run", "run") and before.get(option.name, option.value) != option.value:
            row["parent"] = mask_secrets(before[option.name], option.name)
        rows.append(row)
    return rows


def describe_changes(given: ReportInput) -> list[dict[str, Any]]:
    """Return what every record of changes/ changed: {"at": time, "options": [[name, before, after], ...]}."""
    values = {f"{option.section}.{option.name}": option.value for option in given.options}
    out = []
    for change in given.changes:
        schedule = change["schedule"]
        out.append(
            {
                "at": change["at"],
                "options": [
                    [name, values.get(name), value] for name, value in schedule.items() if values.get(name) != value
                ],
            }
        )
        values |= schedule
    return out
