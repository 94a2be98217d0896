"""The run that this process drives: its lease, its record, its commits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.flows.config import Flow, Plan, config_hash
from penstock.flows.runtime.engine_options import device_counts
from penstock.flows.runtime.runs import code_version, completion_of, keys_of_run, open_run, open_store
from penstock.storage.commit import CheckpointRef, Commit, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.history.run_record import (
    Start,
    login_name,
    read_run_record,
    record_completion,
    record_end,
    record_start,
)
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.preemption import Preempted
from penstock.storage.store import Store


class ActiveRun:
    """The run that this process drives: its store, its record, its commits. `drive_run` makes one.

    Attributes:
        record: run.json; None before the run is opened.
        provenance: fields of every commit: hash of the config and version of the code.
        start: number of this start, once it is recorded.
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
        self.start = 0
        self._created = time.monotonic() - max(0.0, self.started_at - self.record.created_at if self.record else 0.0)

    @property
    def age(self) -> float:
        """Return the seconds since the run was created; they also increase if the clock is set back meanwhile."""
        return time.monotonic() - self._created

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
        """Record which converted model the run uses as `role` (base, reference or teacher).

        Raises:
            RunError: the run has recorded another model as `role`, because the files at `path` have changed since.
        """
        key = self.keys.origin_key(role)
        self.store.create(key, model.model_dump_json().encode())
        pinned = self.store.read_record(CheckpointRef, key)
        assert pinned is not None, "it was created"
        if pinned.key != model.key:
            raise RunError(
                f"run {self.keys.run!r} uses {pinned.key} as its {role} model, but {path} now contains {model.key}: "
                f"restore the original files in {path} (the start weights of an old run may be those of --load or "
                "--hf-checkpoint), or start a new run with another --run"
            )

    def record_start(self, flow_run: str) -> None:
        """Record that this start begins. `flow_run`: URL or id of its flow run in Prefect."""
        trainer_devices, engine_devices, colocated = device_counts(self.flow, self.config)
        start = Start(
            at=self.started_at,
            host=socket.gethostname(),
            user=login_name(),
            flow_run=flow_run,
            code_version=code_version(),
            trainer_devices=trainer_devices,
            engine_devices=engine_devices,
            colocated=colocated,
        )
        self.start = record_start(self.store, self.keys, start)

    def record_end(self, kind: type[BaseException] | None, joules: float | None) -> None:
        """Record that this start has ended, by an exception of class `kind` or normally."""
        was_stopped = kind is not None and issubclass(kind, (Preempted, KeyboardInterrupt))
        outcome = "FINISHED" if kind is None else "STOPPED" if was_stopped else "FAILED"
        record_end(self.store, self.keys, self.start, outcome, joules)

    def record_completion(self) -> None:
        """Record that nothing is left to do."""
        record_completion(self.store, self.keys, self.start, completion_of(self.store, self.config))


@contextmanager
def drive_run(plan: Plan) -> Iterator[ActiveRun]:
    """Hold the lease that marks this process as the run's driver during the block. Creates or checks the run's record
    (`open_run`)."""
    store = open_store(plan.run)
    lease = Lease(store, new_driver_lease_key(keys_of_run(plan.run.run)))
    try:
        keys = open_run(store, plan, lease=lease)
        yield ActiveRun(store, keys, plan.flow, plan, lease.key)
    finally:
        lease.release()
