"""`penstock gc`: list files that are no longer needed, and remove them on request.

storage/maintenance/deletion.py decides what is removable; this file parses the request and prints the table.
"""

from __future__ import annotations

import time

from penstock.flows.commands.local_processes import print_or_delete_residue
from penstock.flows.options.argv import format_bytes, parse_number, short_repr, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.runtime.runs import keys_of_existing_run, open_store
from penstock.flows.terminal.console import print_table
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError
from penstock.storage.leases import store_time
from penstock.storage.maintenance.deletion import (
    Orphan,
    find_orphans,
    finish_interrupted_expiries,
    remove_orphan,
    translate_write_errors,
)
from penstock.storage.store import Store

DEFAULT_HOURS = 24.0
USAGE = """penstock gc [RUN] [--delete] [--older-than HOURS] [--store URI ...]

  Lists files that the store no longer needs: attempts without a commit (the writer died, or another attempt was
  committed first), files of expired checkpoints and removed runs, journals of finished rounds, unfinished forks,
  temporary files. Without RUN it also lists files that dead processes left in TMPDIR and /dev/shm. Files that a commit
  of any run refers to are kept (forks use their parent's files).

  RUN            only files of this run; by default the whole store
  --delete       remove the listed files; without this flag nothing is changed
  --older-than   hours without a change before a file counts as orphaned (default 24)"""


def main(argv: list[str]) -> int:
    """Run the command. Return 0."""
    positional, own, rest = split_args(argv, {"--delete": False, "--older-than": True})
    if len(positional) > 1:
        raise OptionError(f"penstock gc takes one run or none; found {short_repr(' '.join(positional))}")
    older_than = 3600 * parse_number("--older-than", own.get("--older-than", str(DEFAULT_HOURS)))
    store = open_store(parse_store_options(rest, "gc"), probe=False)
    run = positional[0] if positional else None
    if run is not None:
        keys_of_existing_run(store, run)
    found = find_orphans(store, run, older_than=older_than)
    removed = None
    if "--delete" in own:
        with translate_write_errors(store):
            removed = delete_orphans(store, found, run, older_than)
    print_orphans(store, found, removed)
    if run is None:
        print_or_delete_residue(delete="--delete" in own)
    return 0


def delete_orphans(store: Store, orphans: list[Orphan], run: str | None, min_age_seconds: float) -> set[str]:
    """Delete `orphans` (unneeded files), except those that have come into use since `find_orphans` listed them. Return
    the keys of the deleted orphans."""
    for name in [run] if run else store.list("runs"):
        finish_interrupted_expiries(store, RunKeys(name))  # finish the expiry of checkpoints that a kill interrupted
    now = store_time(store)
    remaining = {orphan.key: orphan for orphan in find_orphans(store, run, older_than=min_age_seconds, now=now)}
    # Unfinished attempts last: removing one writes a claim file, which needs disk space.
    simple_first = sorted(remaining.values(), key=lambda orphan: orphan.kind == "unfinished attempt")
    removed = {orphan.key for orphan in simple_first if remove_orphan(store, orphan, now)}
    return removed | {
        orphan.key for orphan in orphans if orphan.kind == "expired checkpoint" and orphan.key not in remaining
    }


def print_orphans(store: Store, orphans: list[Orphan], removed_keys: set[str] | None) -> None:
    """Print a table of unneeded files. `removed_keys`: keys of the removed orphans, or None without --delete."""
    if not orphans:
        print(f"no unneeded files in {store.uri}")
        return
    rows = []
    for orphan in orphans:
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(orphan.modified))
        kept = " (in use, kept)" if removed_keys is not None and orphan.key not in removed_keys else ""
        size = format_bytes(orphan.bytes)
        rows.append((orphan.kind + kept, orphan.key, str(len(orphan.files)), size, changed))
    print_table(("what", "where", "files", "size", "last change"), rows, width=200)
    counted = [orphan for orphan in orphans if removed_keys is None or orphan.key in removed_keys]
    num_bytes = sum(orphan.bytes for orphan in counted)
    total = f"{sum(len(orphan.files) for orphan in counted)} files, {format_bytes(num_bytes)}"
    print(f"{total}; nothing was removed: give --delete to remove them" if removed_keys is None else f"{total} removed")
