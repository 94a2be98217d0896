"""`penstock runs`: a table of the runs in a store."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from flows.config import RunConfig
from flows.runs import latest_schedule, open_store, read_record
from storage.errors import PenstockError, RunError
from storage.refs import RunKeys
from storage.removal import is_removed
from storage.store import Store, committed_prefixes


def print_runs(where: RunConfig) -> int:
    """Print a table of the runs in a store. Writes nothing, and a damaged record costs its row only."""
    store = open_store(where, probe=False)
    table = Table(box=None, pad_edge=False)
    for title in ("run", "flow", "rounds", "reward first -> last", "checkpoints", "evals", "started"):
        table.add_column(title)
    reasons = []
    for run in store.list("runs"):
        try:
            cells = _row(store, RunKeys(run))
        except (PenstockError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            cells = [run, "damaged"]
            reasons.append(f"{run} is damaged: {' '.join(str(error).split())[:300]}")
        if cells:
            table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own
    console.print(table if table.row_count else f"no runs in {store.uri}; `penstock demo` makes one")
    for reason in reasons:
        print(reason)
    return 0


def _row(store: Store, keys: RunKeys) -> list[str]:
    """Return the cells of one run; none if nothing of it is there."""
    if is_removed(store, keys):
        return [keys.run, "removed"]
    record = read_record(store, keys)
    if record is None:
        if committed_prefixes(store, keys):
            raise RunError("run.json is lost: restore it from a backup")
        return []
    rounds = store.committed_indices(f"{keys.prefix}/steps")
    rewards = [_reward(store, keys, r) for r in (rounds[:1] + rounds[-1:])]
    parent = record.get("parent")
    return [
        f"{keys.run} (from {parent['run']} at {parent['at']})" if parent else keys.run,
        record["flow"],
        f"{len(rounds)} of {latest_schedule(store, keys)['run.num_rollout']}",
        " -> ".join(f"{reward:.3f}" for reward in rewards if reward is not None) or "-",
        " ".join(str(number) for number in store.committed_indices(f"{keys.prefix}/checkpoints")) or "-",
        " ".join(name.lstrip("0") or "0" for name in store.list(f"{keys.prefix}/evals")) or "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record["created_at"])),
    ]


def _reward(store: Store, keys: RunKeys, rollout_id: int) -> float | None:
    commit = store.committed(keys.rollout(rollout_id))
    return commit.summary.get("rollout/raw_reward") if commit else None
