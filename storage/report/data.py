"""Collect what a report shows about a run, from its record and commits, as a dict that can be written as JSON.

Metrics are copied from the commits without rounding. A number that is not finite becomes "NaN", "Infinity" or
"-Infinity", as in the commits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from penstock.storage.commit import STAGE_KINDS, CheckpointRef, Commit, RunKeys, attempt_in_path, commit_key
from penstock.storage.config import entries_of
from penstock.storage.history.costs import RunCosts, close_starts, compute_costs, ran_on_gpus
from penstock.storage.history.run_record import RunRecord, ScheduleChange, is_inherited, read_starts
from penstock.storage.maintenance.deletion import expired_versions
from penstock.storage.secrets import mask_secrets
from penstock.storage.store import Store, origin_roles, read_commits

_ENDS = {"FINISHED": "finished", "FAILED": "failed", "STOPPED": "been stopped"}  # by the outcome of a start

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
    """What the report needs besides commits: values that layers above `storage` compute."""

    record: RunRecord
    num_planned_rounds: int
    options: list[OptionRow]
    changes: list[ScheduleChange] = field(default_factory=list)  # oldest first
    compare: Compare | None = None  # paired comparison of two evaluations on one data set


def collect_overview(store: Store, keys: RunKeys, given: ReportInput) -> tuple[dict[str, Any], list[Commit]]:
    """Return everything that the report shows except samples, and the run's commits in the order of their creation."""
    commits = read_commits(store, keys)
    rollouts, steps = ({c.index: c for c in commits if c.kind == kind} for kind in ("rollout", "step"))
    of_run = [commit for commit in commits if commit.listed_kind != "regrade"]
    stages = [  # for the time line; times in seconds since the epoch
        {
            "kind": commit.kind,
            "index": commit.index,
            "task": task_of(commit) if commit.kind == "eval" else "",
            "start": commit.started_at,
            "end": commit.created_at,
            "seconds": dict(commit.seconds),
            "bytes": sum(file.bytes for file in commit.files),
            "code": commit.code_version,
            "inherited": is_inherited(keys, given.record, commit),
        }
        for commit in of_run
    ]
    gaps = find_gaps(store, keys, [commit for commit in of_run if not is_inherited(keys, given.record, commit)])
    rounds = collect_rounds(rollouts, steps)
    evaluated = {task: list(versions) for task, versions in groupby(_evaluations(commits), key=task_of)}
    overview = {
        "header": collect_header(keys, given, rollouts, steps, commits),
        "rounds": rounds,
        "stages": stages,
        "gaps": gaps,
        "events": collect_events(rounds, stages, gaps, given.changes),
        "evaluations": _scores(commits, "eval"),
        "regrades": _scores(commits, "regrade"),
        "comparisons": [  # of the last evaluated version with the first one, by data set
            {"task": task, "first": versions[0].index, "last": versions[-1].index}
            | given.compare(store, versions[0], versions[-1])
            for task, versions in evaluated.items()
            if given.compare is not None and len(versions) > 1
        ],
        "lineage": collect_lineage(store, keys, given.record, commits),
        "costs": collect_costs(compute_costs(store, keys), stages, given.record.config),
        "options": collect_options(given),
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


def find_gaps(store: Store, keys: RunKeys, commits: list[Commit]) -> list[dict[str, Any]]:
    """Return the times between two starts of the run, in which no driver was alive, and how the earlier start ended.
    `commits` do not include those that the run shares with its parent."""
    starts = read_starts(store, keys)
    ends = [end for _, end in close_starts(starts, commits)]
    return [
        {"start": end, "end": later.at, "after": _ENDS[record.outcome] if record else "been killed"}
        for (_, record), end, (later, _) in zip(starts, ends, starts[1:])
    ]


def collect_events(
    rounds: Mapping[str, Any],
    stages: list[dict[str, Any]],
    gaps: list[dict[str, Any]],
    changes: list[ScheduleChange],
) -> list[dict[str, Any]]:
    """Return the faults and restarts of the run, ordered by time: {"at": time, "text": description}."""
    ends = {stage["index"]: stage["end"] for stage in stages if stage["kind"] == "rollout"}
    events = [
        {"at": gap["end"], "text": f"started again {gap['end'] - gap['start']:.0f} s after it had {gap['after']}"}
        for gap in gaps
    ]
    titles = {
        "rollout/num_adopted_groups": "{:g} groups of an earlier attempt were reused",
        "rollout/failed_ratio": "{:.2%} of the samples failed",
    }
    titles |= {name: f"{{:g}} {name}" for name in rounds["metrics"] if "restart" in name}
    for name, values in rounds["metrics"].items():
        if title := titles.get(name):
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
    events += [{"at": change.at, "text": "options of the schedule changed"} for change in changes]
    return sorted(events, key=lambda event: event["at"])


# ---- header and evaluations ------------------------------------------------------------------------------------------


def collect_header(
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
        "flow": record.flow,
        "model": record.config.get("convert", {}).get("hf_checkpoint"),
        "parent": record.parent.model_dump(include={"run", "at"}) if record.parent else None,
        "started_at": record.created_at,
        "last_commit_at": max((commit.created_at for commit in own), default=None),
        "generated_at": time.time(),
        "code_versions": list(dict.fromkeys(commit.code_version for commit in own if commit.code_version))
        or [record.code_version],
        "num_rounds": len(steps),
        "num_planned_rounds": given.num_planned_rounds,
        "final_reward": to_json_number(rewards[-1]) if rewards else None,
        "first_reward": to_json_number(rewards[0]) if rewards else None,
        "last_checkpoint": max(checkpoints, default=None),
        "on_gpus": any(ran_on_gpus(step) for step in steps.values()),
    }


def task_of(commit: Commit) -> str:
    """Return the data set of an evaluation: its attempt is .../evals/<version>/<data set>/attempt-<id>. For a regraded
    round, return the hash of its grading."""
    parts = (commit.attempt or "").split("/")
    return parts[-2] if len(parts) >= 2 else ""


def _evaluations(commits: Iterable[Commit], kind: str = "eval") -> list[Commit]:
    """Return the evaluations (`eval`), or what was graded again (`regrade`), sorted by data set and version."""
    return sorted((c for c in commits if c.listed_kind == kind), key=lambda commit: (task_of(commit), commit.index))


def _scores(commits: Iterable[Commit], kind: str) -> list[dict[str, Any]]:
    return [
        {
            "kind": commit.kind,
            "task": task_of(commit),
            "version": commit.index,
            "metrics": {name: to_json_number(value) for name, value in commit.summary.items()},
        }
        for commit in _evaluations(commits, kind)
    ]


# ---- lineage, costs, options -----------------------------------------------------------------------------------------


def collect_lineage(store: Store, keys: RunKeys, record: RunRecord, commits: list[Commit]) -> dict[str, Any]:
    """Return the models and runs that the run is made from, and its checkpoints, evaluations and exports."""
    origins = {role: store.read_record(CheckpointRef, keys.origin_key(role)) for role in origin_roles(store, keys)}
    parents, parent = [], record.parent
    while parent is not None:
        parents.append(parent.model_dump(include={"run", "at"}))
        parent = parent.parent

    def entry(commit: Commit) -> dict[str, Any]:
        return {
            "version": commit.index,
            "bytes": sum(file.bytes for file in commit.files),
            "inputs": {role: key.removesuffix(commit_key("")) for role, key in commit.inputs.items()},
            "inherited": is_inherited(keys, record, commit),
        }

    models = {role: origin.key for role, origin in origins.items() if origin}
    base = store.read_record(Commit, models["base"]) if "base" in models else None
    sources = []  # paths of models or, for the files of a run, their references: `my-run/export/20`
    for path in base.inputs.values() if base else ():
        run, _, rest = (attempt_in_path(path) or "").removeprefix("runs/").partition("/")
        kind, _, version = rest.partition("/")
        reference = f"{run}/{kind.removesuffix('s')}/{int(version.partition('/')[0])}" if version else path
        sources.append(reference)
    return {
        "sources": sources,
        "models": models,
        "parents": parents,
        "checkpoints": [entry(c) for c in commits if c.kind == "checkpoint"],
        "expired": expired_versions(store, keys),
        "evaluations": [entry(c) | {"task": task_of(c)} for c in _evaluations(commits)],
        "regrades": [entry(c) | {"task": task_of(c)} for c in _evaluations(commits, "regrade")],
        "exports": [entry(c) for c in commits if c.kind == "export"],
    }


def collect_costs(costs: RunCosts, stages: list[dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device-seconds of a run, and the seconds of every part of every kind of stage. Stages that a fork
    shares with its parent are not counted, and neither are their rounds."""
    price = config.get("run", {}).get("price_per_device_hour")
    parts: dict[str, dict[str, float]] = {}
    for stage in stages:
        of_kind = parts.setdefault(stage["kind"], {})
        for part, seconds in stage["seconds"].items() if not stage["inherited"] else ():
            of_kind[part] = of_kind.get(part, 0.0) + seconds
    used = asdict(costs)
    del used["checkpoints"], used["checkpoint_joules"]  # the page does not show them
    return used | {
        "metrics": costs.metrics(price),
        "price_per_device_hour": price,
        "parts": {kind: parts[kind] for kind in STAGE_KINDS if parts.get(kind)},
    }


def collect_options(given: ReportInput) -> list[dict[str, Any]]:
    """Return the rows of the configuration table. Rows of a fork also have the parent's value if it differs."""
    parent = given.record.parent
    rows = []
    for option in given.options:
        row = asdict(option) | {"changed": option.value != option.default}
        # also for an option that the run did not record
        absent = option.default if parent and "." in option.section else option.value
        before = entries_of(parent.config if parent else {}, option.section).get(option.name, absent)
        if (option.section, option.name) != ("run", "run") and before != option.value:
            row["parent"] = mask_secrets(before, option.name)
        rows.append(row)
    return rows


def describe_changes(given: ReportInput) -> list[dict[str, Any]]:
    """Return the changes of the schedule: [{"at": time, "options": [[name, before, after], ...]}, ...]."""
    values = {f"{option.section}.{option.name}": option.value for option in given.options}
    out = []
    for change in given.changes:
        new = {name: value for name, value in change.schedule.items() if values.get(name) != value}
        out.append({"at": change.at, "options": [[name, values.get(name), value] for name, value in new.items()]})
        values |= change.schedule
    return out
