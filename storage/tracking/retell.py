"""Send a run's commits to a tracker from the store alone: after the tracker lost them, or to another tracker.

Nothing is written to the store, and no outbox is needed. Metrics that are not in commits (waiting times, queue depth,
durations of weight updates) exist only in the outbox and in the trackers that received them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.storage.commits import committed_prefixes, read_commits
from penstock.storage.history.costs import costs_at_end
from penstock.storage.maintenance.retention import expired_versions, read_tombstone
from penstock.storage.refs import RunKeys, commit_key
from penstock.storage.store import Store
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.tracker import Committed, MetricsLogged, Record, Tracker

_BATCH = 64  # records per delivery


def read_committed(store: Store, keys: RunKeys) -> list[Committed]:
    """Return all commits of a run in the order of their creation, with those of expired checkpoints."""
    prefixes = committed_prefixes(store, keys)
    found = {commit_key(prefix): commit for prefix in prefixes if (commit := store.committed(prefix))}
    for version in expired_versions(store, keys):
        prefix = keys.checkpoint_prefix(version)
        if tombstone := read_tombstone(store, prefix):
            found.setdefault(commit_key(prefix), tombstone.commit)
    commits = [Committed(key, commit.created_at, commit) for key, commit in found.items()]
    return sorted(commits, key=lambda record: record.at)


def read_cost_metrics(
    store: Store, keys: RunKeys, price_per_hour: float | None, start: int | None = None
) -> list[MetricsLogged]:
    """Return the costs of a run at the end of each start that was not killed, or only of start `start`, as metrics.

    Raises:
        StoreError: a record is damaged.
    """
    steps = [step.created_at for step in read_commits(store, keys) if step.kind == "step"]
    return [
        MetricsLogged(f"cost-{number}", end.at, sum(at <= end.at for at in steps), costs.metrics(price_per_hour))
        for number, end, costs in costs_at_end(store, keys, start)
    ]


def deliver_all(tracker: Tracker, records: Sequence[Record]) -> list[str]:
    """Deliver records in the given order.

    Returns:
        the records that the tracker refused for good: their keys, with the reason.
    """
    lineage, refused = Lineage(), []
    for start in range(0, len(records), _BATCH):
        batch = records[start : start + _BATCH]
        for record in batch:
            if isinstance(record, Committed):
                lineage.add(record.key, record.commit)
        try:
            tracker.deliver(batch, lineage)
        except Exception as error:  # clients have their own error types
            if not tracker.is_permanent_refusal(error):
                raise
            refused += _deliver_one_by_one(tracker, batch, lineage)
    return refused


def _deliver_one_by_one(tracker: Tracker, batch: Sequence[Record], lineage: Lineage) -> list[str]:
    refused = []
    for record in batch:
        try:
            tracker.deliver([record], lineage)
        except Exception as error:
            if not tracker.is_permanent_refusal(error):
                raise
            refused.append(f"{record.key}: {error}")
    return refused
