"""`penstock verify RUN`: look at every record, hash, reference, sample and prompt of a run. Changes nothing.

What is looked at is in storage/audit.py; here are the words, the table and the exit code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from flows.flags import parse_store
from flows.runs import open_store
from flows.words import one_run, size, taken
from storage.audit import Audit, audit
from storage.refs import RunKeys

USAGE = """penstock verify RUN [--no-hashes] [--store URI ...]

  Reads everything that a run has committed: every record, every file's size and hash, what each was made from, the order of the rounds,
  the ids of all samples, and that every prompt of every epoch was served exactly once. Changes nothing. Exit code 1 if something is wrong.

  --no-hashes   of models, checkpoints and exports only the sizes (samples are read in any case)"""

MOST_SHOWN = 20


def main(words: list[str]) -> int:
    """The command. Returns 0 if the run is whole, 1 if not.

    Raises:
        RunError: no such run.
        OptionError: unknown words.
    """
    alone, own, rest = taken(words, {"--no-hashes": False})
    run = one_run("verify", alone)
    store = open_store(parse_store(rest, "verify"), probe=False)
    start = time.monotonic()
    found = audit(store, RunKeys(run), hashes="--no-hashes" not in own)
    print(f"{run} in {store.uri}")
    for title, text in table(found, time.monotonic() - start):
        print(f"  {title:<12} {text}")
    for problem in found.problems[:MOST_SHOWN]:
        print(f"  WRONG: {problem}", file=sys.stderr)
    if len(found.problems) > MOST_SHOWN:
        print(f"  ... and {len(found.problems) - MOST_SHOWN} more", file=sys.stderr)
    print(f"{len(found.problems)} problems" if found.problems else "the run is whole")
    return 1 if found.problems else 0


def table(found: Audit, seconds: float) -> Sequence[tuple[str, str]]:
    """What was looked at, as title and text."""
    commits = ", ".join(f"{count} {kind}" for kind, count in sorted(found.num_commits.items())) or "none"
    expired = f"; {found.num_expired} checkpoints have expired" if found.num_expired else ""
    rows = [
        ("commits", commits + expired),
        ("files", f"{found.num_files}, {size(found.num_bytes)}, read in {seconds:.1f} s"),
        ("samples", f"{found.num_samples} of {found.num_prompts} prompts, over {found.num_epochs} epochs"),
    ]
    if found.num_without_digest:
        rows.append(("unsealed", f"{found.num_without_digest} records carry no digest: they were written before there were any"))
    if found.num_orphans:
        unused = f"{found.num_orphans} files, {size(found.orphan_bytes)}: no harm; `penstock gc` lists them"
        rows.append(("unused", unused))
    return rows
