"""A run in the store: its record (run.json), compared with the config at every start, and `ActiveRun`, the run that
this process drives."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.engines.local_gpus import all_counters
from penstock.flows.config import (
    Flow,
    Plan,
    PostTrainConfig,
    config_hash,
    options_by_mutability,
    training_options,
    validate_config,
    with_entry,
)
from penstock.flows.options.argv import check_run_name, flag_of_field
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.paths import names_no_store, stores_with_run, with_relative_paths
from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.engine_options import device_counts
from penstock.stages.plugins import DEFAULT_NAMES, hash_source
from penstock.stages.train.reuse import Reuse
from penstock.storage.commit import DEBUG_DATA, CheckpointRef, Commit, RunKeys
from penstock.storage.errors import InputError, OptionError, RunError, StoreError, check_rules
from penstock.storage.history.run_record import (
    Completion,
    ParentRecord,
    RecordedConfig,
    RunRecord,
    ScheduleChange,
    Start,
    login_name,
    read_run_record,
    read_schedule_changes,
    read_starts,
    record_end,
    record_start,
    schedule_change_keys,
)
from penstock.storage.leases import Lease, describe_live_drivers, new_driver_lease_key
from penstock.storage.maintenance.deletion import describe_removing_process, is_removed, remove_run
from penstock.storage.preemption import Preempted
from penstock.storage.secrets import mask_secrets, redact
from penstock.storage.store import Store, committed_prefixes
from penstock.storage.tracking.tracker import tracking_directory
from penstock.storage.tracking.trackers import tracking_uris


def logs_of_run(store: Store, keys: RunKeys) -> Path | None:
    """Return the directory with the logs of a run, or None if the store is not local."""
    return Path(store.path(f"{keys.prefix}/logs")) if store.is_local else None


def open_store(config: RunConfig, *, probe: bool = True) -> Store:
    """Return the store of a run. With `probe`, check that it is writable by writing a file; commands that only read or
    delete do not."""
    if "://" not in config.store:
        path = next(path for path in (Path(config.store), *Path(config.store).absolute().parents) if path.exists())
        rules = [
            (
                not path.is_dir(),
                f"store {config.store!r} is not writable: {path} is not a directory; give --store a directory or a URI",
            )
        ]
        for path in (Path(config.store, name) for name in ("runs", "models", "mlflow", "tensorboard")):
            problem = f"{path} is not a directory, but the store needs one: move that file, or give another --store"
            rules.append((path.exists() and not path.is_dir(), problem))
        check_rules(rules, StoreError)
    return Store(config.store, config.store_options, single_writer=config.store_single_writer, probe=probe)


def open_named_store(argv: Sequence[str], command: str, *, run: str = "") -> Store:
    """Return the store that the options of `penstock COMMAND` name, without writing to it. If they name none, it is the
    one among the stores around the working directory that has `run`. Raises OptionError if several have it."""
    stores = stores_with_run(run) if run and names_no_store(argv) else []
    if len(stores) > 1:
        raise OptionError(f"{len(stores)} stores have a run {run!r} ({', '.join(stores)}): choose one with --store")
    flags = [word for store in stores for word in ("--store", store)]
    return open_store(parse_store_options([*argv, *flags], command), probe=False)


def keys_of_existing_run(store: Store, run: str) -> RunKeys:
    """Return the store keys of a run, after a check that the run has files in the store."""
    keys = RunKeys(check_run_name(run))
    if not store.list(keys.prefix):
        raise unknown_run_error(store, run)
    return keys


def unknown_run_error(store: Store, run: str) -> RunError:
    """Return the error for a run that does not exist. It lists the existing runs."""
    names = store.list("runs")
    existing = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "none"
    nearby = f" (run {run!r} is in {', '.join(stores)})" if (stores := stores_with_run(run)) else ""
    return RunError(
        f"store {store.uri} has no run {run!r} (it has: {existing}): correct the name, or give --store{nearby}"
    )


# ---- starting --------------------------------------------------------------------------------------------------------


def completion_of(store: Store, config: Plan) -> Completion:
    """Return the `Completion` that a start with this plan records when nothing is left to do."""
    placement = options_by_mutability(config, "placement")
    options = [options_by_mutability(config, "identity"), options_by_mutability(config, "schedule")]
    options += [placement[name] for name in ("run.debug_rollout_only", "run.debug_train_only", "run.report")]
    values = json.dumps([config.flow, options, tracking_uris(store, config.run)], sort_keys=True)
    defaults = options_by_mutability(PostTrainConfig(), "placement")
    outputs = [name for name in placement if name.startswith("debug.")] + ["run.keep_checkpoints", "run.keep_best"]
    return Completion(
        options=hashlib.sha256(values.encode()).hexdigest(),
        outputs={name: placement[name] for name in outputs if placement[name] != defaults[name]},
    )


def open_run(store: Store, plan: Plan, *, lease: Lease | None = None) -> RunKeys:
    """Create the run's record, or check that this plan may continue the run. Return the run's keys.

    Changed schedule options (number of rounds, intervals, paths) are recorded under `runs/<run>/changes/`. If identity
    options (model, data, seed, algorithm) differ from the record, the run is replaced, provided that it has no commits
    and no other process drives it. `lease` marks the caller as a driver of the run; it does not count as another one.
    """
    keys, own_lease = RunKeys(check_run_name(plan.run.run)), lease.key if lease else None
    while True:
        check_run_may_start(store, plan, own_lease=own_lease)
        if not is_removed(store, keys):
            if create_run_record(store, plan):
                return keys
            record = read_run_record(store, keys)
            if record is not None and describe_difference(record, plan) is None:
                record_schedule(store, keys, record, plan)
                return keys
        remove_run_and_tracking(store, keys, own_lease=own_lease)


def remove_run_and_tracking(store: Store, keys: RunKeys, *, own_lease: str | None = None) -> int:
    """Remove a run with its files and its undelivered MLflow data. Return the number of bytes deleted. Raises RunError
    if another process than the caller, which has the driver lease `own_lease`, drives it, or a fork needs its files."""
    files = remove_run(store, keys, own_lease=own_lease)
    if not store.is_local:  # in a local store MLflow data is among the run's files
        shutil.rmtree(tracking_directory(store, keys.run), ignore_errors=True)
    return sum(file.bytes for file in files)


def create_run_record(store: Store, plan: Plan, parent: ParentRecord | None = None) -> bool:
    """Write the record of a run, of a fork if it has a parent, unless it exists. Return whether this call wrote it."""
    # store_options are not recorded: they may contain credentials, and every start gives them again.
    values = plan.model_dump(mode="json", exclude={"run": {"store_options"}})
    record = RunRecord(
        flow=plan.flow,  # type: ignore[arg-type]
        config=mask_secrets(values),
        given=mask_secrets(plan.given),
        config_hash=config_hash(plan),
        directory=str(Path.cwd()),
        code_version=code_version(),
        created_at=time.time(),
        id=uuid.uuid4().hex,
        parent=parent,
    )
    return store.create(RunKeys(plan.run.run).record, record.model_dump_json(indent=1).encode())


def check_run_may_start(store: Store, plan: Plan, *, own_lease: str | None = None) -> None:
    """Check that this plan may start a new run, or continue the existing run with the name in `plan.run.run`.

    It may not if the flow or an identity option (model, data, seed, algorithm) differs from the record, and the run is
    a fork, has commits or has a driver other than the caller (`own_lease`); if the run has commits but no record; or if
    it is being removed.
    """
    keys = RunKeys(check_run_name(plan.run.run))
    if other := describe_removing_process(store, keys):
        raise RunError(f"run {keys.run!r} is being removed by {other}: wait until the removal is done")
    if is_removed(store, keys):
        return
    record = read_run_record(store, keys)
    if record is None:
        prefixes = committed_prefixes(store, keys)
        commits = [commit for prefix in prefixes if (commit := store.committed(prefix))]
        rules: list[tuple[object, str]] = [
            (
                prefixes and store.read(keys.fork) is not None,
                f"run {keys.run!r} is an unfinished fork: run the same `penstock fork` again, or give another --run",
            ),
            (
                commits and not _are_made_with(plan, keys, commits),
                f"run {keys.run!r} has {len(commits)} commits, but {store.path(keys.record)} is missing: restore it "
                "from a backup, give exactly the options that the run was started with, or give another --run",
            ),
        ]
        check_rules(rules, RunError)
        return
    if (problem := describe_difference(record, plan)) is None:
        return
    if record.parent:
        advice = ": a fork cannot change it; fork again with other options, or give another --run"
    elif prefixes := committed_prefixes(store, keys):
        has_steps = any(prefix.startswith(f"{keys.prefix}/steps/") for prefix in prefixes)
        other_way = f"fork it (`penstock fork {keys.run}`)" if has_steps else f"remove it (`penstock rm {keys.run}`)"
        advice = f": a resumed run cannot change it; {other_way}, or start a new run with another --run"
    elif drivers := describe_live_drivers(store, keys, own_lease=own_lease):
        advice = f", and the run is driven by {drivers[0]}: stop that process, or give another --run"
    else:
        return
    raise RunError(problem + advice)


def _are_made_with(plan: Plan, keys: RunKeys, commits: list[Commit]) -> bool:
    """Return whether all commits of a run without a record were made by this run and with this plan."""
    shared = any(commit.attempt and not commit.attempt.startswith(f"{keys.prefix}/") for commit in commits)
    rollouts = [commit for commit in commits if commit.kind == "rollout"]
    demonstrated = any(c.policy_version == -1 and DEBUG_DATA not in c.inputs for c in rollouts[:1])
    same_flow = (plan.flow.trains, plan.flow.has_demonstrations) == (bool(rollouts), demonstrated)
    return not shared and same_flow and {commit.config_hash for commit in commits} == {config_hash(plan)}


def describe_difference(record: RunRecord, plan: Plan) -> str | None:
    """Describe the first identity option (model, data, seed, algorithm) that differs between a plan and a run's record.
    Return None if all are equal."""
    if Flow(record.flow) is not plan.flow:
        return f"run {plan.run.run!r} was started by `{record.flow}`, not `{plan.flow}`"
    difference = differing_option(_validated_config(record.config), plan, record.directory)
    if difference is None:
        return None
    option, recorded, given = difference
    name = option.rpartition(".")[2]
    before, now = (text if len(text) <= 60 else f"{text[:57]}..." for text in (repr(recorded), repr(given)))
    return f"run {plan.run.run!r} has {flag_of_field(name)} {before}, this command has {now}"


def differing_option(before: PostTrainConfig, now: PostTrainConfig, directory: str) -> tuple[str, Any, Any] | None:
    """Return the first identity option of two configs with absolute paths that differs: name, value before, value now.
    A project may be moved, so paths also count as equal if they are equal relative to the working directories of the
    two starts; `directory` is that of the earlier start."""
    old, new = options_by_mutability(before, "identity"), options_by_mutability(now, "identity")
    moved_old = options_by_mutability(with_relative_paths(before, directory), "identity")
    moved_new = options_by_mutability(with_relative_paths(now, str(Path.cwd())), "identity")
    for field, value in new.items():
        if old[field] != value and moved_old[field] != moved_new[field]:
            return field, old[field], value
    return None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_existing_record(store: Store, keys: RunKeys) -> RunRecord:
    """Return the record of a run, which must exist."""
    removed = is_removed(store, keys)
    record = None if removed else read_run_record(store, keys)
    rules: list[tuple[object, str]] = [
        (removed, f"run {keys.run!r} was removed, but not completely: finish the removal with `penstock gc --delete`"),
        (
            record is None and committed_prefixes(store, keys),
            f"run {keys.run!r} has commits, but {store.path(keys.record)} is missing: restore it from a backup, "
            "or start the run again with exactly its original options",
        ),
    ]
    check_rules(rules, RunError)
    if record is None:
        raise unknown_run_error(store, keys.run)
    return record


def _validated_config(values: RecordedConfig) -> PostTrainConfig:
    """Return a recorded config. Raises RunError if this release does not accept it."""
    try:
        return validate_config(values)
    except InputError as error:
        run = values.get("run", {}).get("run", "")
        raise RunError(
            f"the recorded options of run {run!r} are not valid in this release ({error}): "
            "use the release that wrote them"
        ) from error


def num_planned_rounds(store: Store, keys: RunKeys, record: RunRecord) -> int:
    """Return how many rounds a run shall train, by its last recorded options."""
    return latest_config(store, keys, record)[0].run.num_rollout


def latest_config(store: Store, keys: RunKeys, record: RunRecord) -> tuple[PostTrainConfig, PostTrainConfig]:
    """Return the recorded config of a run with its last recorded schedule options, and the options as given to the
    start that recorded these."""
    if not (changes := read_schedule_changes(store, keys)):
        return _validated_config(record.config), _validated_config(record.given)
    return _config_with_schedule(record.config, changes[-1].schedule), _validated_config(changes[-1].given)


def record_schedule(store: Store, keys: RunKeys, record: RunRecord, plan: Plan) -> None:
    """Record the schedule options of this start (number of rounds, save and evaluation intervals, paths) under the next
    free number in `changes/`, unless they equal the latest recorded ones. The highest number is in effect."""
    schedule = options_by_mutability(plan, "schedule")
    if schedule == options_by_mutability(latest_config(store, keys, record)[0], "schedule"):
        return
    change = ScheduleChange(at=time.time(), id=uuid.uuid4().hex, schedule=schedule, given=mask_secrets(plan.given))
    data = change.model_dump_json(indent=1).encode()
    numbers = [int(Path(key).stem) for key in schedule_change_keys(store, keys)]
    number = max(numbers, default=-1) + 1
    while not store.create(f"{keys.prefix}/changes/{number:06d}.json", data):
        number += 1


def _config_with_schedule(config: RecordedConfig, schedule: dict[str, Any]) -> PostTrainConfig:
    """Return a recorded config with `schedule` (`section.name` -> value) in place of the recorded values."""
    for field, value in schedule.items():
        config = with_entry(config, field, value)
    return _validated_config(config)


def read_flow_and_config(where: RunConfig, run: str) -> tuple[Flow, PostTrainConfig]:
    """Return the flow and the config of a run, with its last recorded schedule options, from the store of
    `where`."""
    store, keys = open_store(where, probe=False), RunKeys(check_run_name(run))
    record = read_existing_record(store, keys)
    config, _ = latest_config(store, keys, record)
    stores = {name: getattr(where, name) for name in ("store", "store_options", "store_single_writer")}
    return Flow(record.flow), config.model_copy(update={"run": config.run.model_copy(update=stores)})


def config_history(store: Store, keys: RunKeys, record: RunRecord) -> list[tuple[float, PostTrainConfig]]:
    """Return the configs of a run, oldest first, each with the time of its record: that of run.json, then one for each
    change of schedule options."""
    changes = read_schedule_changes(store, keys)
    return [
        (record.created_at, _validated_config(record.config)),
        *((change.at, _config_with_schedule(record.config, change.schedule)) for change in changes),
    ]


def config_of_round(record: RunRecord, rollout_id: int) -> PostTrainConfig:
    """Return the config that a round was trained with: the run's own or, before its fork point, that of an ancestor."""
    return validate_config(record.config_of_round(rollout_id))


def missing_fork_checkpoint(store: Store, record: RunRecord) -> tuple[int, PostTrainConfig] | None:
    """Return the policy version that a fork must save as a checkpoint before it trains, and the config to replay the
    rounds up to that version with: if its training options differ from its parent's, those rounds can only be replayed
    with the parent's options. Return None if no checkpoint is needed."""
    parent = record.parent
    if parent is None or parent.at == 0:
        return None
    if store.committed(RunKeys(record.config["run"]["run"]).checkpoint_prefix(parent.at)):
        return None
    before, after = config_of_round(record, parent.at - 1), validate_config(record.config)
    return None if training_options(before) == training_options(after) else (parent.at, before)


def format_time(at: float) -> str:
    """Format a time in seconds since the epoch: `10:58`, or with the date if that is not today."""
    local = time.localtime(at)
    return time.strftime("%H:%M" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


@cache
def code_version() -> str:
    """Return the version of Penstock: the release, with the git commit if this is a checkout."""
    try:
        release = version("penstock-rl")
    except PackageNotFoundError:  # a checkout on PYTHONPATH, not installed
        release = "uninstalled"
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return release
    git = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return f"{release}+{git.stdout.strip()}" if git.returncode == 0 else release


# ---- the run of this process -----------------------------------------------------------------------------------------


class ActiveRun:
    """The run that this process drives: its store, its record, its commits. `open_active_run` makes one.

    Attributes:
        record: run.json; None before the run is opened.
        provenance: fields of every commit: hash of the config and version of the code.
        start: number of this start, once it is recorded.
        counters_at_start: energy counters of this machine's GPUs when this object was created.
        created: time at which the run was created on the monotonic clock, which is never set back.
    """

    def __init__(self, store: Store, keys: RunKeys, flow: Flow, config: Plan, lease_key: str = "") -> None:
        self.store = store
        self.keys = keys
        self.flow = flow
        self.config = config
        self.lease_key = lease_key
        self.record = read_run_record(store, keys)
        self.provenance: dict[str, Any] = {"config_hash": config_hash(config), "code_version": code_version()}
        self.started_at = time.time()
        self.counters_at_start = all_counters()
        self.start = 0
        self.created = time.monotonic() - max(0.0, self.started_at - self.record.created_at if self.record else 0.0)

    def writes_report(self, kind: type[BaseException] | None) -> bool:
        """Return whether a start that ends by an exception of class `kind`, or normally, writes the report."""
        return self.config.run.report and not (kind is not None and issubclass(kind, Preempted))

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds at which this start ends: --num-rollout; with --debug-train-only, unless
        rollouts are loaded from files, at most the number of committed rollouts."""
        run = self.config.run
        if not run.debug_train_only or self.config.debug.load_debug_rollout_data:
            return run.num_rollout
        return min(run.num_rollout, len(self.store.committed_indices(f"{self.keys.prefix}/rollouts")))

    @property
    def reuse(self) -> Reuse | None:
        """Return the rounds that the run, a fork, trains on the rollouts of its parent, and the bound of their
        effective sample size."""
        parent = self.record.parent if self.record else None
        if parent is None or not parent.num_reused:
            return None
        bound, loss_unit = self.config.run.min_effective_sample_size, self.config.train.loss_unit
        return Reuse(RunKeys(parent.run), parent.reused_rounds, bound, loss_unit)

    def num_trained_rounds(self) -> int:
        """Return the number of rounds whose training is committed."""
        return len(self.store.committed_indices(f"{self.keys.prefix}/steps"))

    def needs_rollout(self, version: int) -> bool:
        """Return whether the rollout of policy `version` is still to be generated."""
        run = self.config.run
        missing = version < run.num_rollout and self.store.committed(self.keys.rollout_prefix(version)) is None
        return missing and not run.debug_train_only

    def read_commit(self, prefix: str) -> Commit:
        """Return the commit at `prefix`, which must exist."""
        commit = self.store.committed(prefix)
        assert commit is not None, f"{prefix} is not committed"
        return commit

    def weight_version(self, version: int) -> str:
        """Return the weight version that engines report while they serve policy `version`: `RUN/VERSION`."""
        return f"{self.keys.run}/{version}"

    def pin_model(self, role: str, path: str, model: CheckpointRef) -> None:
        """Record which converted model the run uses as `role` (base, reference or teacher). Raises RunError if it has
        recorded another one, because the files at `path` have changed since."""
        key = self.keys.origin_key(role)
        self.store.create(key, model.model_dump_json().encode())
        pinned = self.store.read_record(CheckpointRef, key)
        assert pinned is not None, "the record exists: it was just created or read"
        if pinned.key != model.key:
            raise RunError(
                f"run {self.keys.run!r} uses {pinned.key} as its {role} model, but {path} now contains {model.key}: "
                f"restore the original files in {path} (the initial weights may come from --load or "
                "--hf-checkpoint), or start a new run with another --run"
            )

    def record_start(self, flow_run: str) -> None:
        """Record that this start begins. `flow_run`: URL or id of its flow run in Prefect."""
        trainer_devices, engine_devices, colocated = device_counts(self.flow, self.config)
        sections = self.config.rollout, self.config.train
        given = [(name, getattr(section, name, None)) for section in sections for name in DEFAULT_NAMES]
        start = Start(
            at=self.started_at,
            host=socket.gethostname(),
            user=login_name(),
            flow_run=flow_run,
            code_version=code_version(),
            functions={name: hash_source(path) for name, path in given if path},
            trainer_devices=trainer_devices,
            engine_devices=engine_devices,
            colocated=colocated,
        )
        self.start = record_start(self.store, self.keys, start)

    def changed_functions(self) -> list[str]:
        """Return the options whose user-defined functions are in files that have changed since the start before this
        one. The rounds before and after such a change are not comparable."""
        starts = [start.functions for start, _ in read_starts(self.store, self.keys)[-2:]]
        return [name for name in starts[0] if starts[-1].get(name, "") not in ("", starts[0][name])]

    def describe_earlier_end(self) -> str:
        """Return how and when the start before this one ended: ", killed after 10:58"; "" for the first start. Of a
        killed start the time of its last round is known."""
        earlier = read_starts(self.store, self.keys)[:-1]
        if not earlier:
            return ""
        start, end = earlier[-1]
        if end is not None:
            return f", {end.outcome.lower()} at {format_time(end.at)}"
        rounds = self.num_trained_rounds()
        last = self.read_commit(self.keys.step_prefix(rounds - 1)).created_at if rounds else 0.0
        return f", killed after {format_time(max(start.at, last))}"

    def record_end(self, error: BaseException | None, joules: float | None) -> None:
        """Record that this start has ended, by an exception or normally."""
        was_stopped = isinstance(error, (Preempted, KeyboardInterrupt))
        outcome = "FINISHED" if error is None else "STOPPED" if was_stopped else "FAILED"
        reason = redact(f"{type(error).__name__}: {error}".partition("\n")[0])[:300] if outcome == "FAILED" else ""
        record_end(self.store, self.keys, self.start, outcome, joules, reason)


def check_not_driven(store: Store, keys: RunKeys, *, own_lease: str | None = None) -> None:
    """Check that no process of this machine drives the run, except the holder of `own_lease`. The lease of another
    machine does not refuse a command, because that machine may be lost."""
    if drivers := describe_live_drivers(store, keys, own_lease=own_lease, is_here=True):
        raise RunError(f"run {keys.run!r} is driven by {drivers[0]}: wait until that process ends, or stop it")


@contextmanager
def driver_lease(store: Store, keys: RunKeys, wait: Callable[[str], None] | None = None) -> Iterator[Lease]:
    """Hold the lease that marks this process as the run's driver during the block. A process looks for others after its
    own lease is visible, so of two that start together at least one sees the other, and releases its lease.

    `wait` is called with the description of another driver, as long as there is one; it waits a random time. Without
    it, RunError is raised if another process of this machine drives the run.
    """
    while True:
        while wait is not None and (others := describe_live_drivers(store, keys)):
            wait(others[0])
        lease = Lease(store, new_driver_lease_key(keys)).take()
        try:
            if wait is None:
                check_not_driven(store, keys, own_lease=lease.key)
            if wait is None or not (others := describe_live_drivers(store, keys, own_lease=lease.key)):
                yield lease
                return
        finally:
            lease.release()
            if store.list(keys.prefix) == ["drivers"]:  # a refused start does not take the run's name
                store.remove_empty_directories(keys.prefix)
        wait(others[0])


def open_active_run(plan: Plan, lease: Lease) -> ActiveRun:
    """Return the run of a plan, of which this process is the driver (`driver_lease`). Creates or checks the run's
    record (`open_run`)."""
    store = open_store(plan.run)
    return ActiveRun(store, open_run(store, plan, lease=lease), plan.flow, plan, lease.key)
