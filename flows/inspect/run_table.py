"""`penstock runs`: a table of the runs in a store."""

from __future__ import annotations

import time

from penstock.flows.config import RunConfig
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.nearby_stores import find_nearby_stores, names_no_store
from penstock.flows.runtime.runs import latest_schedule_options, open_store
from penstock.flows.terminal.console import print_table
from penstock.storage.commit import RunKeys
from penstock.storage.errors import PenstockError, RunError
from penstock.storage.history.run_record import read_run_record
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.store import Store, committed_prefixes

USAGE = """penstock runs [--store URI ...]

  Lists runs: rounds, rewards, checkpoints, evaluations. Without --store, those of all stores below the working
  directory (three levels), and of the store that contains it. Changes nothing."""


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    run_config = parse_store_options(argv, "runs")
    stores = find_nearby_stores() if names_no_store(argv) else []
    for path in stores:
        print(f"store {path}")
        print_runs(run_config.model_copy(update={"store": path}))
        print()
    if not stores:
        print_runs(run_config)
    return 0


def print_runs(run_config: RunConfig) -> None:
    """Print a table of the runs in a store. A damaged run is marked in the table and described below it."""
    store = open_store(run_config, probe=False)
    rows, reasons = [], []
    for run in store.list("runs"):
        try:
            row = row_of_run(store, RunKeys(run))
        except (PenstockError, OSError) as error:
            row = [run, "damaged"]
            reasons.append(f"{run} is damaged: {' '.join(str(error).split())[:300]}")
        if row:
            rows.append(row)
    if rows:
        print_table(("run", "flow", "rounds", "reward first -> last", "checkpoints", "evals", "started"), rows)
    else:
        print(f"no runs in {store.uri}; `penstock demo` makes one")
    for reason in reasons:
        print(reason)


def row_of_run(store: Store, keys: RunKeys) -> list[str]:
    """Return the cells of a run's row in the table; no cells if the run has neither a record nor commits."""
    if is_removed(store, keys):
        return [keys.run, "removed"]
    record = read_run_record(store, keys)
    if record is None:
        if committed_prefixes(store, keys):
            raise RunError("run.json is missing: restore it from a backup")
        return []
    rounds = store.committed_indices(f"{keys.prefix}/steps")
    rollouts = [store.committed(keys.rollout_prefix(r)) for r in rounds[:1] + rounds[-1:]]
    rewards = [rollout.summary.get("rollout/raw_reward") for rollout in rollouts if rollout]
    parent = record.parent
    return [
        f"{keys.run} (from {parent.run} at {parent.at})" if parent else keys.run,
        record.flow,
        f"{len(rounds)} of {latest_schedule_options(store, keys)['run.num_rollout']}",
        " -> ".join(f"{reward:.3f}" for reward in rewards if reward is not None) or "-",
        " ".join(str(number) for number in store.committed_indices(f"{keys.prefix}/checkpoints")) or "-",
        " ".join(name.lstrip("0") or "0" for name in store.list(f"{keys.prefix}/evals")) or "-",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at)),
    ]
