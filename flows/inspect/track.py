"""`penstock report RUN --to TRACKER`: send the commits of runs to a tracker again. All data is read from the store."""

from __future__ import annotations

import sys
from typing import Any

from penstock.flows.config import validate_config
from penstock.flows.options.addresses import MLFLOW, check_url
from penstock.flows.options.argv import check_run_name, flag_of_field, split_args
from penstock.flows.options.flags import parse_values, split_flags
from penstock.flows.options.paths import with_absolute_paths
from penstock.flows.runtime.runs import config_history, open_named_store, read_existing_record
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError, TrackerError, check_rules
from penstock.storage.history.run_record import RunRecord, read_run_record
from penstock.storage.leases import describe_live_drivers
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.secrets import mask_secrets, redact
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import deliver_all, read_committed, read_cost_metrics
from penstock.storage.tracking.tracker import (
    Committed,
    Record,
    ReportWritten,
    RunEnded,
    RunStarted,
    metric_points,
    report_record_key,
)
from penstock.storage.tracking.trackers import TRACKERS, TrackerOptions, tracked_run
from penstock.storage.web.login import page_link

USAGE = """penstock report RUN ... --to mlflow|tensorboard|wandb [--tracking-uri URI] [--store URI ...]

  Sends the commits of runs to a tracker again, for instance after its database was lost, or to another server. All data
  is read from the store. The command can be repeated. Changes nothing in the store, except a tracker's own files there.
  Metrics that are not in commits (waiting times, queue depth) cannot be restored.

  --to TRACKER         mlflow, tensorboard or wandb
  --tracking-uri URI   with --to mlflow: server or database; default: as recorded by the run, see docs/tracking.md
  --all                all runs in the store, instead of RUN
  --mlflow-trace-samples N
                       with --to mlflow: samples of each round that are sent as traces
  --tb-dir, --wandb-project, --wandb-team, --wandb-group, --wandb-mode, --wandb-dir, --wandb-host, --wandb-key
                       as in penstock train; default: as recorded by the run"""

_MAX_SHOWN = 5  # refused records that are printed


def main(argv: list[str]) -> int:
    """Run `penstock report --to`. Return 0, or 1 if the tracker refused records."""
    names, own, rest = split_args(argv, {"--to": True, "--tracking-uri": True, "--all": False})
    to = own["--to"]  # always given: without --to, `penstock report` runs another command
    check_rules(
        (
            (to not in TRACKERS, f"penstock report --to takes {'|'.join(TRACKERS)}; found {to}"),
            ("--tracking-uri" in own and to != "mlflow", f"--tracking-uri has no effect with --to {to}: leave it out"),
            (
                ("--all" in own) == bool(names),
                "penstock report --to needs the names of runs, or --all instead; `penstock runs` lists them",
            ),
        )
    )
    of_tracker = {flag_of_field(name) for name in TRACKERS[to].model_fields if name != f"use_{to}"}
    argv_of: dict[bool, list[str]] = {True: [], False: []}  # whether flags belong to the tracker -> their arguments
    for name, values in split_flags(rest):
        argv_of[name in of_tracker] += [name, *values]
    given = parse_values(argv_of[True]).get("run", {})
    if "--tracking-uri" in own:
        given["mlflow_tracking_uri"] = own["--tracking-uri"]
    store = open_named_store(argv_of[False], "report --to")
    runs = [check_run_name(name) for name in names]
    if "--all" in own:
        runs = [name for name in store.list("runs") if not is_removed(store, RunKeys(name))]
    if not runs:
        raise RunError(f"store {store.uri} has no runs: give --store")
    records = {name: read_run_record(store, RunKeys(name)) for name in runs}
    runs.sort(key=lambda name: record.created_at if (record := records[name]) else 0.0)  # a run before its forks
    refused = [send_run(store, RunKeys(name), to, given) for name in runs]
    return 1 if any(refused) else 0


def send_run(store: Store, keys: RunKeys, to: str, given: dict[str, Any]) -> int:
    """Send a run's commits to the tracker `to`, with the tracker's options `given` on the command line, and print what
    was sent. Return the number of records that the tracker refused."""
    record = read_existing_record(store, keys)
    if to == "wandb" and (drivers := describe_live_drivers(store, keys)):
        raise RunError(
            f"run {keys.run!r} is driven by {drivers[0]}, and W&B accepts one writer: wait until that process ends"
        )
    records = _records_of_run(store, keys, record)
    uri, title = _tracking_uri(store, record, to, given), TRACKERS[to].title
    num_traces = given.get("mlflow_trace_samples")  # validated by `_tracking_uri`
    run = tracked_run(store, keys, record, None if num_traces is None else int(num_traces))
    try:
        tracker = TRACKERS[to].connect(uri, run)
        refused = deliver_all(tracker, records)
    except Exception as error:  # clients have their own error types
        reason = redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:200]
        raise TrackerError(
            f"run {keys.run!r} could not be sent to {title} ({reason}): correct the tracker's address or start its "
            "server, then run the command again"
        ) from error
    commits = sum(isinstance(record, Committed) for record in records)
    points = sum(len(metric_points(record)) for record in records)
    page = page_link(tracker.page or redact(uri))
    print(f"{keys.run}: {commits} commits with {points} metric values are in {title}: {page}")
    print("  not sent: metrics that are not in commits (waiting times, queue depth, weight updates)")
    for refused_record, reason in refused[:_MAX_SHOWN]:
        print(f"  refused by {title}: {redact(f'{refused_record.key}: {reason}')[:300]}", file=sys.stderr)
    return len(refused)


def _tracking_uri(store: Store, record: RunRecord, to: str, given: dict[str, Any]) -> str:
    """Return the URI of the tracker `to`, from the options in the run's record and those on the command line."""
    recorded = record.config.get("run", {})
    values = {name: recorded[name] for name in TrackerOptions.model_fields if name in recorded} | given
    # With the switches of all trackers, none of the trackers' options is refused.
    values |= {name: True for name in TrackerOptions.model_fields if name.startswith("use_")}
    run = with_absolute_paths(validate_config({"run": values})).run
    if to == "mlflow":
        check_url("--tracking-uri", run.mlflow_tracking_uri, MLFLOW)
    check_rules(TRACKERS[to].machine_rules(run))
    uri = TRACKERS[to].uri_of(run, store)
    if uri is None:
        raise OptionError(f"--{to}-mode disabled sends nothing: give online or offline")
    return uri


def _records_of_run(store: Store, keys: RunKeys, record: RunRecord) -> list[Record]:
    """Return the tracker records of a run: the config of each of its starts, its commits, its costs at the end of each
    start, its report and, unless a driver is alive, its end."""
    commits = read_committed(store, keys)
    starts: list[Record] = []
    rounds = 0
    for at, config in config_history(store, keys, record):
        values = mask_secrets(config.model_dump(mode="json"))
        values["run"]["store"] = store.uri
        starts.append(RunStarted(f"start-{at}", at, values))
        rounds = config.run.num_rollout
    costs = read_cost_metrics(store, keys, record.config.get("run", {}).get("price_per_device_hour"))
    records = sorted([*starts, *commits, *costs], key=lambda record: record.at)
    records.sort(key=lambda record: record is not starts[0])  # a fork has commits that are older than its record
    if report := store.read(keys.report):
        written = store.modified(keys.report) or records[-1].at
        records.append(ReportWritten(report_record_key(report), written, keys.report))
    if not describe_live_drivers(store, keys):
        steps = sum(record.commit.kind == "step" for record in commits)
        status = "FINISHED" if steps >= rounds else "FAILED"
        records.append(RunEnded(f"end-{records[-1].at}-{status}", max(record.at for record in records), status))
    return records
