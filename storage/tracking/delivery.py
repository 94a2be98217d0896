"""Send a run's records to its trackers without blocking the run.

Records are appended to a local outbox; a background thread for each tracker delivers them and retries while the
tracking server is down, slow or full. (MLflow's own client blocks for minutes and then raises.)
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.storage.commits import committed_prefixes
from penstock.storage.refs import Commit, RunKeys, commit_key
from penstock.storage.secrets import mask_secrets, redact
from penstock.storage.store import Store
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.outbox import Outbox
from penstock.storage.tracking.tracker import (
    Committed,
    Record,
    TrackedRun,
    Tracker,
    parse_record,
    report_record_key,
    tracker_class,
    tracker_suffix,
)

_COALESCE = 2.0  # seconds to collect records before a delivery, so that short rounds share requests
_MAX_WAIT = 60.0  # maximum seconds between retries; the first wait is 1 s, and doubles
_BATCH = 64  # records per delivery
_MAX_PROBLEM = 200  # characters of a server's error message, which may be a page of HTML or SQL
logger = logging.getLogger(__name__)


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
        self.deliveries: list[Delivery] = []
        self._append(
            f"start-{uuid.uuid4().hex}", {"type": "start", "at": time.time(), "config": mask_secrets(config or {})}
        )
        self.deliveries = [Delivery(uri, run, Path(directory)) for uri in tracking_uris]

    @property
    def problem(self) -> str | None:
        """Return why the last delivery to a tracker failed, or None if all succeeded."""
        return next((delivery.problem for delivery in self.deliveries if delivery.problem), None)

    def record_commit(self, key: str, commit: Commit) -> bool:
        """Append a commit to the outbox. Return False if the outbox already contains `key`, the key of the commit's
        record in the store."""
        return self._append(key, {"type": "commit", "commit": commit.model_dump(mode="json")})

    def record_missing_commits(self, store: Store, keys: RunKeys) -> int:
        """Append those commits of the run to the outbox that it does not contain, and return their number.

        The outbox lacks a commit if the driver was killed between committing and `record_commit`, or if the run has
        moved to another machine.
        """
        prefixes = [prefix for prefix in committed_prefixes(store, keys) if commit_key(prefix) not in self._outbox]
        missing = [(commit_key(prefix), commit) for prefix in prefixes if (commit := store.committed(prefix))]
        missing.sort(key=lambda pair: pair[1].created_at)
        return sum(self.record_commit(key, commit) for key, commit in missing)

    def enqueue_metrics(self, key: str, metrics: dict[str, float], step: int, at: float | None = None) -> bool:
        """Append metrics that are not part of a commit to the outbox. Return False if the outbox already contains
        `key`, which must be unique in the run. `at`, in seconds since the epoch, is their time; default: now."""
        self.on_metrics(metrics)
        at = time.time() if at is None else at
        return self._append(key, {"type": "metrics", "at": at, "step": step, "metrics": metrics})

    def record_report(self, store_key: str, content: bytes) -> bool:
        """Append the report of the run to the outbox, which is at `store_key`. Return False if it was appended before
        with the same content."""
        return self._append(report_record_key(content), {"type": "report", "at": time.time(), "store_key": store_key})

    def close(self, status: str = "FINISHED", timeout: float = 10.0) -> int:
        """Append the end of the run to the outbox, and deliver waiting records for at most `timeout` seconds.

        Returns:
            The number of records that were not delivered, over all trackers. The next start of the run delivers them.
        """
        if not self._closed:
            self._append(f"end-{uuid.uuid4().hex}", {"type": "end", "at": time.time(), "status": status})
        self._closed = True
        deadline = time.monotonic() + timeout
        for delivery in self.deliveries:
            delivery.begin_close()
        for delivery in self.deliveries:
            delivery.close(max(0.0, deadline - time.monotonic()))
        return sum(delivery.num_waiting() for delivery in self.deliveries)

    def _append(self, key: str, line: dict[str, Any]) -> bool:
        added = self._outbox.append(key, line)
        if added:
            for delivery in self.deliveries:
                delivery.wake()
        return added


class Delivery:
    """Delivers the outbox in `directory` to one tracker, in a background thread."""

    def __init__(self, uri: str, run: TrackedRun, directory: Path) -> None:
        self.uri = uri
        self.run = run
        self.problem: str | None = None  # why the last delivery failed, or None
        self.page: str | None = None  # URL of the run in the tracker's UI, once it is known
        self._tracker_class = tracker_class(uri)
        self._outbox = Outbox(directory, tracker_suffix(uri))
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandon = threading.Event()
        self.thread = threading.Thread(target=self._deliver_until_closed, name="penstock-tracking", daemon=True)
        self.thread.start()

    @property
    def name(self) -> str:
        """Return the tracker's name."""
        return self._tracker_class.name

    def wake(self) -> None:
        """Start a delivery, since a record was appended to the outbox."""
        self._wake.set()

    def begin_close(self) -> None:
        """Let the thread end after the next delivery."""
        self._closing.set()
        self._wake.set()

    def close(self, timeout: float) -> None:
        """Wait for the last delivery, at most `timeout` seconds, then abandon it."""
        self.thread.join(timeout)
        self._abandon.set()

    def num_waiting(self) -> int:
        """Return the number of records that were not delivered."""
        return self._outbox.num_waiting()

    def _deliver_until_closed(self) -> None:
        position, wait = 0, 1.0
        tracker: Tracker | None = None
        lineage = Lineage()
        while not self._abandon.is_set():
            # Read before delivering, so that the last delivery includes all records appended before `close`.
            closing = self._closing.is_set()
            self._wake.clear()
            try:
                if tracker is None:
                    tracker, lineage, position = self._connect(), Lineage(), 0
                position = self._deliver(tracker, lineage, position)
                if self.problem is not None:
                    logger.warning("%s is available again; all waiting records were delivered", tracker.name)
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
                self._closing.wait(wait)
                wait = min(2 * wait, _MAX_WAIT)
            else:
                if not closing:
                    self._wake.wait()
                    self._closing.wait(_COALESCE)
            if closing:
                break
        self._outbox.unlock()

    def _connect(self) -> Tracker:
        """Return a connection to the tracker, with the delivery lock held."""
        if not self._outbox.try_lock():
            raise BlockingIOError("another process is delivering this run's outbox")
        tracker = self._tracker_class(self.uri, self.run)
        if tracker.resend != "none":
            self._outbox.mark_delivered(0 if tracker.resend == "all" else self._first_unended_start())
        return tracker

    def _first_unended_start(self) -> int:
        """Return the byte offset of the first start whose end was not delivered; if none, that of the first undelivered
        line."""
        delivered, begin = self._outbox.delivered_offset, 0
        unended: int | None = None
        for line, end in self._outbox.lines_from(0):
            if end > delivered:
                break
            if line["type"] == "end":
                unended = None
            elif line["type"] == "start" and unended is None:
                unended = begin
            begin = end
        return delivered if unended is None else unended

    def _deliver(self, tracker: Tracker, lineage: Lineage, offset: int) -> int:
        """Read the outbox from the byte `offset` on, add its commits to `lineage`, and deliver the undelivered lines.
        Return the byte offset after the last line that was read."""
        delivered = self._outbox.delivered_offset
        batch: list[tuple[dict[str, Any], Record]] = []
        for line, end in self._outbox.lines_from(offset):
            record = parse_record(line)
            if isinstance(record, Committed):
                lineage.add(record.key, record.commit)
            offset = end
            if end > delivered:
                batch.append((line, record))
            if len(batch) >= _BATCH:
                self._deliver_batch(tracker, lineage, batch, end)
                batch = []
            if self._abandon.is_set():
                return offset
        if batch:
            self._deliver_batch(tracker, lineage, batch, offset)
        return offset

    def _deliver_batch(
        self, tracker: Tracker, lineage: Lineage, batch: list[tuple[dict[str, Any], Record]], end_offset: int
    ) -> None:
        try:
            tracker.deliver([record for _, record in batch], lineage)
        except Exception as error:
            if not tracker.is_permanent_refusal(error):
                raise
            for line, record in batch:  # deliver one by one, so that only records that the tracker refuses are skipped
                try:
                    tracker.deliver([record], lineage)
                except Exception as reason:
                    if not tracker.is_permanent_refusal(reason):
                        raise
                    self._outbox.record_refused_line(line, str(reason))
        self._outbox.mark_delivered(end_offset)
