"""`penstock rm RUN`: remove a run with everything under its name. What is refused, and what a kill leaves, is in storage/removal.py."""

from __future__ import annotations

from flows.flags import parse
from flows.runs import discard, existing_run, open_store
from flows.words import size, taken
from storage.errors import OptionError, RunError
from storage.removal import changing, is_removed
from storage.store import committed_prefixes

USAGE = """penstock rm RUN [--yes RUN] [--store URI ...]

  Removes a run: its record, rollouts, checkpoints, evaluations, exports, and what waits for MLflow. Not what MLflow has, nor converted models.
  Refused while a driver of the run is alive, and while a fork needs its files. After a kill the same command, or `penstock gc --delete`,
  finishes it.

  --yes   the run's name once more; needed if a round is committed"""

_ROUNDS = ("rollouts", "steps", "checkpoints", "exports")


def main(words: list[str]) -> int:
    """Run the command. Returns 0.

    Raises:
        OptionError: the words are not those of the command.
        RunError: no such run, it has rounds and is not confirmed, a driver of it is alive, or a fork needs its files.
        StoreError: the store cannot be written.
    """
    alone, own, rest = taken(words, {"--yes": True})
    if len(alone) != 1:
        raise OptionError("penstock rm needs the name of one run; `penstock runs` lists them")
    run = alone[0]
    if own.get("--yes", run) != run:
        raise OptionError(f"--yes {own['--yes']} is not the name of the run that is to be removed: give --yes {run}")
    store = open_store(parse(rest).run, probe=False)
    keys = existing_run(store, run)
    if not is_removed(store, keys) and "--yes" not in own:
        kinds = [prefix.split("/")[2] for prefix in committed_prefixes(store, keys)]
        if any(kind in _ROUNDS for kind in kinds):
            num_rounds = kinds.count("steps")
            raise RunError(f"run {run!r} has {num_rounds} trained rounds, {len(kinds)} commits in all: confirm with --yes {run}")
    with changing(store):
        freed = discard(store, keys)
    print(f"run {run} was removed from {store.uri}: {size(freed)} freed")
    return 0
