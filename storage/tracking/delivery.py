"""Send a run's records to its trackers without blocking the run, and read them again from the store.

Records are appended to a local outbox; a background thread for each tracker delivers them at least once, and retries
while the tracking server is down, slow or full. (MLflow's own client blocks for minutes and then raises.) The store is
the authority: `penstock report --to` sends a run again from its commits. Metrics that are not in commits (waiting
times, queue depth, durations of weight updates) exist only in the outbox and in the trackers that received them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Self

from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.history.costs import costs_at_end
from penstock.storage.maintenance.deletion import expired_versions, read_tombstone
from penstock.storage.secrets import mask_secrets, redact
from penstock.storage.store import Store, read_commits, read_stages
from penstock.storage.tracking.tracker import (
    Committed,
    MetricsLogged,
    Record,
    RunCommits,
    RunEnded,
    TrackedRun,
    Tracker,
    parse_record,
    report_record_key,
    tracking_directory,
)
from penstock.storage.tracking.trackers import TRACKERS, tracker_of

OUTBOX = "outbox.jsonl"
_COALESCE = 2.0  # seconds to collect records before a delivery, so that short rounds share requests
_MAX_WAIT = 60.0  # maximum seconds between retries; the first wait is 1 s, and doubles
_BATCH = 64  # records per delivery
_MAX_PROBLEM = 200  # characters of a server's error message, which may be a page of HTML or SQL
logger = logging.getLogger(__name__)


# ---- records in the store --------------------------------------------------------------------------------------------


def read_committed(store: Store, keys: RunKeys, *, skip: Container[str] = ()) -> list[Committed]:
    """Return a run's commits in the order of creation, also of expired checkpoints, but not of the keys in `skip`."""
    commits = read_stages(store, keys, skip=skip)
    for version in expired_versions(store, keys):
        prefix = keys.checkpoint_prefix(version)
        if commit_key(prefix) not in skip and (tombstone := read_tombstone(store, prefix)):
            commits.setdefault(prefix, tombstone.commit)
    records = (Committed(commit_key(prefix), commit.created_at, commit) for prefix, commit in commits.items())
    return sorted(records, key=lambda record: record.at)


def read_cost_metrics(
    store: Store, keys: RunKeys, price_per_hour: float | None, start: int | None = None
) -> list[MetricsLogged]:
    """Return the costs of a run up to the end of each start that was not killed, as metrics. `start` selects one start
    by its number, from 0; `price_per_hour` is the price of a device. Raises StoreError if a record is damaged."""
    steps = [step.created_at for step in read_commits(store, keys) if step.kind == "step"]
    return [
        MetricsLogged(f"cost-{number}", end.at, sum(at <= end.at for at in steps), costs.metrics(price_per_hour))
        for number, end, costs in costs_at_end(store, keys, start)
    ]


def read_logged_metric(store: Store, keys: RunKeys, name: str) -> dict[int, float]:
    """Return step -> value of a metric that only the run's outbox has; {} if this machine has no outbox of the run."""
    path = tracking_directory(store, keys.run) / OUTBOX
    if not path.exists():
        return {}
    with path.open("rb") as file:  # lines of commits are not parsed, since they contain sample previews and are large
        records = [
            parse_record(json.loads(raw)) for raw in file if b'"type": "metrics"' in raw and raw.endswith(b"}\n")
        ]
    return {r.step: r.metrics[name] for r in records if isinstance(r, MetricsLogged) and name in r.metrics}


# ---- delivery --------------------------------------------------------------------------------------------------------


def deliver_batch(tracker: Tracker, records: Sequence[Record], commits: RunCommits) -> list[tuple[Record, str]]:
    """Deliver records together or, if the tracker permanently refuses one of them, one by one. Return the refused
    records, each with the reason. Other errors are raised."""
    try:
        tracker.deliver(records, commits)
    except Exception as error:  # clients have their own error types
        if not tracker.is_permanent_refusal(error):
            raise
        if len(records) == 1:
            return [(records[0], str(error))]
        return [refused for record in records for refused in deliver_batch(tracker, [record], commits)]
    return []


def deliver_all(tracker: Tracker, records: Sequence[Record]) -> list[tuple[Record, str]]:
    """Deliver the records of a run in batches. Return the records that the tracker permanently refused, each with the
    reason. Other errors are raised."""
    commits, refused = RunCommits(), []
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        for record in batch:
            if isinstance(record, Committed):
                commits.add(record.key, record.commit)
        refused += deliver_batch(tracker, batch, commits)
    return refused


class Outbox:
    """A durable queue of JSON lines, as seen by one tracker: a run appends lines to outbox.jsonl, each with a unique
    key; the process that holds the delivery lock delivers them.

        delivered.json   the byte offset in outbox.jsonl up to which lines were delivered
        refused.jsonl    lines that the tracker permanently refused, with the reason
        delivery.lock    the delivery lock (flock)

    Each tracker has its own three files, so that the outage of one tracker does not delay the others. MLflow's have the
    names above; those of other trackers have a suffix, for instance delivered-wandb.json. A line is marked as delivered
    after its delivery, so a kill between delivery and mark causes a second delivery.

    `directory` must be on a local disk, since appending must not wait for a network.
    """

    def __init__(self, directory: Path, suffix: str = "") -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lines = directory / OUTBOX
        self._delivered = directory / f"delivered{suffix}.json"
        self._refused = directory / f"refused{suffix}.jsonl"
        self._lock_path = directory / f"delivery{suffix}.lock"
        self._lock: int | None = None
        self._append_lock = threading.Lock()
        self._torn = False  # whether outbox.jsonl ends with a partial line
        self._lines.touch(mode=0o600)
        with self._lines.open("rb+") as file:  # terminate a partial line that a killed process has left
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")

    @cached_property
    def keys(self) -> set[str]:
        """Return the keys of all lines."""
        return {line["key"] for line, _ in self.lines_from(0)}

    def append(self, key: str, line: dict[str, Any]) -> bool:
        """Append a line with the given key. If the key exists, append nothing and return False."""
        data = json.dumps({"key": key, **line}, ensure_ascii=False).encode() + b"\n"
        with self._append_lock:
            if key in self.keys:
                return False
            # One unbuffered write, so that lines that two processes append are not interleaved.
            with self._lines.open("ab", buffering=0) as file:
                whole = b"\n" + data if self._torn else data
                written = file.write(whole)
                self._torn = written < len(whole) and (written > 0 or self._torn)
                if written < len(whole):  # a full disk writes only a part, without an error
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._lines))
            self.keys.add(key)
        return True

    def lines_from(self, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the lines from the byte `offset` on, each with the offset of its end. Partial lines are skipped."""
        with self._lines.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # an incomplete last line, which may still be being written
                offset += len(raw)
                try:
                    yield json.loads(raw), offset
                except ValueError:
                    continue

    @property
    def delivered_offset(self) -> int:
        """Return the byte offset up to which lines were delivered."""
        try:
            offset = int(json.loads(self._delivered.read_bytes())["offset"])
        except (FileNotFoundError, ValueError):
            return 0
        return min(offset, self._lines.stat().st_size)

    def mark_delivered(self, offset: int) -> None:
        """Record that all lines before byte `offset` were delivered."""
        temporary = self._delivered.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"offset": offset}))
        temporary.replace(self._delivered)

    def record_refused_line(self, line: dict[str, Any], reason: str) -> None:
        """Append a line that the tracker refused, and the reason, to refused.jsonl. The caller then marks the
        line as delivered, so that it is not sent again."""
        with open(os.open(self._refused, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as file:
            file.write(json.dumps({"reason": reason, "line": line}, ensure_ascii=False) + "\n")

    def try_lock(self) -> bool:
        """Acquire the delivery lock, which ends with the process. Return False if another process holds it."""
        if self._lock is None:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._lock = descriptor
        return True

    def unlock(self) -> None:
        """Release the delivery lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class RunTracking:
    """Appends the commits and metrics of one run to an outbox, and delivers them to every tracker in a background
    thread.

    Args:
        run: identity of the run in the trackers.
        directory: local directory of the outbox, the same at every start of the run (see `tracking_directory`).
        tracking_uris: URIs of the trackers, with credentials; at most one for each kind of tracker.
        config: the resolved config, which the trackers show as parameters.
    """

    def __init__(
        self, run: TrackedRun, directory: str | Path, tracking_uris: Sequence[str], config: dict[str, Any] | None = None
    ) -> None:
        self._outbox = Outbox(Path(directory))
        self._closed = False
        self.on_metrics: Callable[[dict[str, float]], object] = lambda metrics: None  # called with new metrics
        self.deliveries = [Delivery(uri, run, Path(directory)) for uri in tracking_uris]
        self._config = config or {}

    def start(self) -> Self:
        """Record that the run starts, and start the threads that deliver records. Return this object."""
        self._append(f"start-{uuid.uuid4().hex}", "start", config=mask_secrets(self._config))
        for delivery in self.deliveries:
            delivery.thread.start()
        return self

    @property
    def problem(self) -> str | None:
        """Return why the last delivery to a tracker failed, or None if all succeeded."""
        return next((delivery.problem for delivery in self.deliveries if delivery.problem), None)

    def record_commit(self, key: str, commit: Commit) -> bool:
        """Append a commit to the outbox. Return False if the outbox contains `key`, that of the commit's record."""
        return self._append(key, "commit", commit=commit.model_dump(mode="json"))

    def record_missing_commits(self, store: Store, keys: RunKeys) -> int:
        """Append to the outbox the commits of the run that it does not contain, and return their number. The outbox
        lacks a commit if the driver was killed between committing and `record_commit`, or if the run has moved to
        another machine."""
        missing = read_committed(store, keys, skip=self._outbox.keys)
        return sum(self.record_commit(record.key, record.commit) for record in missing)

    def enqueue_metrics(self, key: str, metrics: dict[str, float], step: int, at: float | None = None) -> bool:
        """Append metrics that are not part of a commit to the outbox. Return False if the outbox already contains
        `key`, which must be unique in the run. `at` is the time of the metrics in seconds since the epoch; default:
        now."""
        self.on_metrics(metrics)
        return self._append(key, "metrics", at, step=step, metrics=metrics)

    def record_report(self, store_key: str, content: bytes) -> bool:
        """Append a record of the run's HTML report, which is in the store at `store_key`, to the outbox. Return False
        if a report with the same content was appended before."""
        return self._append(report_record_key(content), "report", store_key=store_key)

    def close(self, status: str = "FINISHED", timeout: float = 10.0) -> int:
        """Append the end of the run (`status` is FINISHED or FAILED) to the outbox, and deliver waiting records for at
        most `timeout` seconds. Return the number of records that were not delivered, over all trackers; the next start
        of the run delivers them."""
        if not self._closed:
            self._append(f"end-{uuid.uuid4().hex}", "end", status=status)
        self._closed = True
        deadline = time.monotonic() + timeout
        for delivery in self.deliveries:
            delivery.closing.set()
            delivery.wake.set()
        for delivery in self.deliveries:
            delivery.close(max(0.0, deadline - time.monotonic()))
        return sum(delivery.num_waiting() for delivery in self.deliveries)

    def _append(self, key: str, type: str, at: float | None = None, **content: Any) -> bool:
        added = self._outbox.append(key, {"type": type, "at": time.time() if at is None else at, **content})
        for delivery in self.deliveries if added else ():
            delivery.wake.set()
        return added


class Delivery:
    """Delivers the outbox in `directory` to one tracker, in a background thread."""

    def __init__(self, uri: str, run: TrackedRun, directory: Path) -> None:
        self.uri = uri
        self.run = run
        self.problem: str | None = None  # why the last delivery failed, or None
        self.page: str | None = None  # URL of the run in the tracker's UI, once it is known
        self.name = tracker_of(uri).title
        scheme = uri.partition("://")[0]
        self._outbox = Outbox(directory, f"-{scheme}" if scheme in TRACKERS else "")
        self.wake = threading.Event()  # set when records were appended
        self.closing = threading.Event()  # set if the next delivery is the last one
        self._abandon = threading.Event()
        self.thread = threading.Thread(target=self._deliver_until_closed, name="penstock-tracking", daemon=True)

    def close(self, timeout: float) -> None:
        """Wait for the last delivery, at most `timeout` seconds, then abandon it."""
        self.thread.join(timeout)
        self._abandon.set()

    def num_waiting(self) -> int:
        """Return the number of records that were not delivered."""
        return sum(1 for _ in self._outbox.lines_from(self._outbox.delivered_offset))

    def _deliver_until_closed(self) -> None:
        position, wait = 0, 1.0
        tracker: Tracker | None = None
        commits = RunCommits()
        while not self._abandon.is_set():
            # Read before delivering, so that the last delivery includes all records appended before `close`.
            closing = self.closing.is_set()
            self.wake.clear()
            try:
                if tracker is None:
                    if not self._outbox.try_lock():
                        raise BlockingIOError(
                            "another process is delivering this run's outbox: wait until that process ends, or stop it"
                        )
                    tracker, commits, position = tracker_of(self.uri).connect(self.uri, self.run), RunCommits(), 0
                    if tracker.wants_all:
                        self._outbox.mark_delivered(0)
                position = self._deliver(tracker, commits, position)
                if self.problem is not None:
                    logger.warning("%s is available again; all waiting records were delivered", self.name)
                self.problem, self.page, wait = None, tracker.page, 1.0
            except Exception as error:  # clients have their own error types
                reason = redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:_MAX_PROBLEM]
                if self.problem is None:
                    logger.warning(
                        "commits and metrics could not be sent to %s (%s); they stay in the outbox, retrying",
                        self.name,
                        reason,
                    )
                self.problem, tracker = reason, None
                self.closing.wait(wait)
                wait = min(2 * wait, _MAX_WAIT)
            else:
                if not closing:
                    self.wake.wait()
                    self.closing.wait(_COALESCE)
            if closing:
                break
        self._outbox.unlock()

    def _deliver(self, tracker: Tracker, commits: RunCommits, offset: int) -> int:
        """Read the outbox from the byte `offset` on, add its commits to `commits`, and deliver the undelivered lines in
        batches. Return the byte offset after the last line that was read."""
        delivered = self._outbox.delivered_offset
        lines = self._outbox.lines_from(offset)
        while not self._abandon.is_set() and (batch := list(islice(lines, _BATCH))):
            records: list[Record] = []
            for line, offset in batch:
                record = parse_record(line)
                if isinstance(record, Committed):
                    commits.add(record.key, record.commit)
                if offset > delivered:
                    records.append(record)
            if not records:
                continue
            line_of = {line["key"]: line for line, _ in batch}
            for refused, reason in deliver_batch(tracker, records, commits):
                self._outbox.record_refused_line(line_of[refused.key], reason)
            if not tracker.buffers or isinstance(records[-1], RunEnded):
                self._outbox.mark_delivered(offset)
        return offset
