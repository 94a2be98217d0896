"""`penstock gc`: list what nothing needs any more, and remove it if told to.

What is found, and what guards it, is in storage/leftovers.py and storage/retention.py; here are the words and the table.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from flows import residue
from flows.flags import parse_store
from flows.runs import existing_run, open_store
from flows.words import number, shown, size, taken
from storage.errors import OptionError
from storage.leases import store_time
from storage.leftovers import Leftover, leftovers, remove
from storage.refs import RunKeys
from storage.removal import changing
from storage.retention import finish_expiries
from storage.store import Store

DEFAULT_HOURS = 24.0
USAGE = """penstock gc [RUN] [--delete] [--older-than HOURS] [--store URI ...]

  Lists what nothing in the store needs: attempts of writers that died or lost, files of expired checkpoints and removed runs, journals of
  finished rounds, half-made forks, temporary files. Without RUN also what dead processes have left in TMPDIR and /dev/shm. What a commit
  of any run names is never touched (forks use their parent's files).

  RUN            only what lies under this run; the whole store if not given
  --delete       remove it; without this nothing is changed
  --older-than   hours without a change before something counts as left behind (default 24)"""


def main(words: list[str]) -> int:
    """The command. Returns 0.

    Raises:
        RunError: no such run.
        OptionError: unknown words.
        StoreError: a record is damaged, or the store cannot be written.
    """
    alone, own, rest = taken(words, {"--delete": False, "--older-than": True})
    if len(alone) > 1:
        raise OptionError(f"penstock gc takes one run or none; found {shown(' '.join(alone))}")
    older_than = 3600 * number("--older-than", own.get("--older-than", str(DEFAULT_HOURS)))
    store = open_store(parse_store(rest, "gc"), probe=False)
    run = alone[0] if alone else None
    if run is not None:
        existing_run(store, run)
    found = leftovers(store, run, older_than=older_than)
    removed = None
    if "--delete" in own:
        with changing(store):
            removed = delete(store, found, run, older_than)
    show(store, found, removed)
    if run is None:
        residue.report(delete="--delete" in own)
    return 0


def delete(store: Store, found: list[Leftover], run: str | None, older_than: float) -> set[str]:
    """Remove what was found. Returns the keys of what went; what has come to be needed meanwhile stays."""
    for name in [run] if run else store.list("runs"):
        finish_expiries(store, RunKeys(name))  # where a kill has left the record of an expired checkpoint
    now = store_time(store)
    still = {leftover.key: leftover for leftover in leftovers(store, run, older_than=older_than, now=now)}
    simple_first = sorted(
        still.values(), key=lambda leftover: leftover.kind == "unfinished attempt"
    )  # those write a claim: make room
    removed = {leftover.key for leftover in simple_first if remove(store, leftover, now)}
    return removed | {leftover.key for leftover in found if leftover.kind == "expired checkpoint" and leftover.key not in still}


def show(store: Store, found: list[Leftover], removed: set[str] | None) -> None:
    """A table of what was found, and what became of it."""
    if not found:
        print(f"nothing is left over in {store.uri}")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("what", "where", "files", "size", "last change"):
        table.add_column(title)
    for leftover in found:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(leftover.modified))
        kept = " (in use, kept)" if removed is not None and leftover.key not in removed else ""
        table.add_row(leftover.kind + kept, leftover.key, str(len(leftover.files)), size(leftover.bytes), changed)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe has no width of its own
    console.print(table)
    gone = [leftover for leftover in found if removed is None or leftover.key in removed]
    total = f"{sum(len(leftover.files) for leftover in gone)} files, {size(sum(leftover.bytes for leftover in gone))}"
    print(f"{total}; nothing was removed: --delete does it" if removed is None else f"{total} removed")
