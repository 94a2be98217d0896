"""`penstock rm RUN`: remove a run with all its files. storage/maintenance/deletion.py defines when a removal is
refused and how a killed one is finished."""

from __future__ import annotations

from penstock.flows.options.argv import format_bytes, split_args
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.runs import keys_of_existing_run, open_store, remove_run_and_tracking
from penstock.storage.errors import OptionError, RunError
from penstock.storage.maintenance.deletion import is_removed, translate_write_errors
from penstock.storage.store import committed_prefixes

USAGE = """penstock rm RUN [--yes RUN] [--store URI ...]

  Removes a run: its record, rollouts, checkpoints, evaluations, exports, and undelivered MLflow data. Keeps converted
  models and what MLflow has received. Fails while a driver of the run is alive or a fork needs its files. After a kill
  the same command, or `penstock gc --delete`, finishes the removal.

  --yes   the run's name again; required if a round is committed"""

_ROUNDS = ("rollouts", "steps", "checkpoints", "exports")


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    positional, own, rest = split_args(argv, {"--yes": True})
    if len(positional) != 1:
        raise OptionError("penstock rm needs the name of one run; `penstock runs` lists them")
    run = positional[0]
    if own.get("--yes", run) != run:
        raise OptionError(f"--yes {own['--yes']} does not match the run {run!r} to be removed: give --yes {run}")
    store = open_store(parse_config(rest).run, probe=False)
    keys = keys_of_existing_run(store, run)
    if not is_removed(store, keys) and "--yes" not in own:
        kinds = [prefix.split("/")[2] for prefix in committed_prefixes(store, keys)]
        if any(kind in _ROUNDS for kind in kinds):
            num_rounds = kinds.count("steps")
            raise RunError(
                f"run {run!r} has {num_rounds} trained rounds and {len(kinds)} commits: confirm its removal with "
                f"--yes {run}"
            )
    with translate_write_errors(store):
        freed = remove_run_and_tracking(store, keys)
    print(f"run {run} was removed from {store.uri}: {format_bytes(freed)} freed")
    return 0
