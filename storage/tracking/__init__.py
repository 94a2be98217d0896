"""Tracking: what a run's commits look like in MLflow. Derived, never trusted: the store is the truth, and this can be told again.

Training calls `Tracker.record`, which appends a line to a local outbox and returns. A background thread delivers, so a tracking
server that is away, slow or full never stops a run (the stock client would block for minutes and then raise). Delivering a line
twice changes nothing. What MLflow gets per commit is in storage/tracking/lineage.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from storage.refs import Commit, RunKeys, commit_key
from storage.secrets import masked, redact, reveal
from storage.store import Store, committed_prefixes
from storage.tracking.lineage import Lineage, is_final
from storage.tracking.outbox import Outbox

_COALESCE = 2.0  # seconds between deliveries, so that many small rounds travel as one request
_LONGEST_WAIT = 60.0  # seconds between tries while the server is away
_BATCH = 64  # lines a delivery
_LONGEST_PROBLEM = 200  # characters; MLflow's own messages hold whole pages of HTML and SQL
logger = logging.getLogger(__name__)


class Tracker:
    """Tells MLflow about one pipeline run.

    Args:
        run: name of the run.
        directory: a local directory for the outbox, the same at every start of the run (`tracking_directory`).
        tracking_uri: MLflow server or database, with its credentials (`tracking_uri`).
        config: the resolved config, shown as parameters.
        store_uri: where the run lies; tells it from a run of the same name in another store.
        experiment: the MLflow experiment.
    """

    def __init__(
        self,
        run: str,
        directory: str | Path,
        tracking_uri: str,
        config: dict[str, Any] | None = None,
        *,
        store_uri: str = "",
        experiment: str = "penstock",
    ) -> None:
        self.run = run
        self.tracking_uri = tracking_uri
        self.problem: str | None = None  # why lines are waiting, in MLflow's words
        self._experiment = experiment
        self._store_uri = store_uri
        self._outbox = Outbox(Path(directory))
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandon = threading.Event()
        self._page: str | None = None
        self._offer(f"start-{uuid.uuid4().hex}", {"type": "start", "at": time.time(), "config": masked(config or {})})
        self._thread = threading.Thread(target=self._deliver_until_closed, name="penstock-tracking", daemon=True)
        self._thread.start()

    def record(self, key: str, commit: Commit) -> bool:
        """Offer a commit under the key of its record. Known ones are passed over; True if it was new."""
        return self._offer(key, {"type": "commit", "commit": commit.model_dump(mode="json")})

    def catch_up(self, store: Store, keys: RunKeys) -> int:
        """Offer every commit of the run that the outbox lacks (killed between commit and `record`, or another machine's run)."""
        waiting = [prefix for prefix in committed_prefixes(store, keys) if commit_key(prefix) not in self._outbox]
        missing = [(commit_key(prefix), commit) for prefix in waiting if (commit := store.committed(prefix))]
        missing.sort(key=lambda pair: pair[1].created_at)
        return sum(self.record(key, commit) for key, commit in missing)

    def log(self, key: str, metrics: dict[str, float], step: int) -> bool:
        """Offer numbers that belong to no commit (time between stages, publishing), under a key that is unique in the run."""
        return self._offer(key, {"type": "metrics", "at": time.time(), "step": step, "metrics": metrics})

    @property
    def page(self) -> str | None:
        """The run's page in the MLflow UI; None for a database without a server, or as long as the server is away."""
        return self._page

    def close(self, status: str = "FINISHED", timeout: float = 10.0) -> int:
        """Deliver what can be delivered in `timeout` seconds; the rest waits in the outbox for the run's next start.

        Returns:
            The number of lines that wait.
        """
        if not self._closing.is_set():
            self._offer(f"end-{uuid.uuid4().hex}", {"type": "end", "at": time.time(), "status": status})
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        self._abandon.set()
        return self._outbox.num_waiting()

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _offer(self, key: str, line: dict[str, Any]) -> bool:
        added = self._outbox.append(key, line)
        if added:
            self._wake.set()
        return added

    def _deliver_until_closed(self) -> None:
        position, wait, lineage = 0, 1.0, None
        while not self._abandon.is_set():
            closing = self._closing.is_set()  # read before delivering: whatever was offered before `close` is in the file now
            self._wake.clear()
            try:
                if not self._outbox.lock():
                    raise BlockingIOError("another process delivers for this run")
                lineage = lineage or Lineage(self.tracking_uri, self._experiment, self.run, self._store_uri)
                position = self._deliver(lineage, position)
                if self.problem is not None:
                    logger.warning("MLflow answers again: everything is delivered")
                self.problem, self._page, wait = None, lineage.page, 1.0
            except Exception as error:  # any transport's or database's error: keep the lines, say why, try again later
                reason = redact(f"{type(error).__name__}: {' '.join(str(error).split())}")[:_LONGEST_PROBLEM]
                if self.problem is None:
                    logger.warning("MLflow does not take this run's metrics (%s); they wait in the outbox until it does", reason)
                self.problem, lineage, position = reason, None, 0
                self._closing.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            else:
                if not closing:
                    self._wake.wait()
                    self._closing.wait(_COALESCE)
            if closing:
                break
        self._outbox.unlock()

    def _deliver(self, lineage: Lineage, position: int) -> int:
        """Deliver the lines from byte `position` on; returns the byte after the last one."""
        delivered = self._outbox.delivered
        batch: list[dict[str, Any]] = []
        for line, end in self._outbox.lines(position):
            lineage.remember(line)
            position = end
            if end > delivered:
                batch.append(line)
            if len(batch) >= _BATCH:
                self._deliver_batch(lineage, batch, end)
                batch = []
            if self._abandon.is_set():
                return position
        if batch:
            self._deliver_batch(lineage, batch, position)
        return position

    def _deliver_batch(self, lineage: Lineage, batch: list[dict[str, Any]], end: int) -> None:
        try:
            lineage.tell(batch)
        except Exception as error:
            if not is_final(error):
                raise
            for line in batch:  # one of them will never be taken: the others must not suffer
                try:
                    lineage.tell([line])
                except Exception as reason:
                    if not is_final(reason):
                        raise
                    self._outbox.refuse(line, str(reason))
        self._outbox.mark_delivered(end)


def tracking_directory(store: Store, run: str) -> Path:
    """Where a run's outbox lies: in the store if that is a local disk, else in this user's state directory."""
    if store.is_local:
        return Path(store.path(RunKeys(run).prefix)) / "tracking"
    return _state_directory(store) / run


def tracking_uri(store: Store, given: str | None = None) -> str:
    """The MLflow to use: the given one, MLFLOW_TRACKING_URI, or an SQLite file beside the runs. With its credentials: not to be shown."""
    if found := reveal(given) or os.environ.get("MLFLOW_TRACKING_URI"):
        return found
    database = (Path(store.root) if store.is_local else _state_directory(store)) / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{database}"


def _state_directory(store: Store) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    endpoint = store.options.get("endpoint_url") or store.options.get("client_kwargs", {}).get("endpoint_url") or ""
    return (
        state / "penstock" / hashlib.sha256(f"{store.uri}{endpoint}".encode()).hexdigest()[:12]
    )  # buckets of one name elsewhere
