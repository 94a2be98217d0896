"""`penstock verify RUN`: check every record, hash, reference, sample and prompt of a run. Writes nothing.

storage/maintenance/audit.py does the checks; this file parses the request, prints the table and returns the exit code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from penstock.flows.options.argv import format_bytes, parse_run_argument, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import RunKeys
from penstock.storage.maintenance.audit import Audit, audit_run

USAGE = """penstock verify RUN [--no-hashes] [--store URI ...]

  Checks everything that a run has committed: every record, the size and hash of every file, the inputs of every commit,
  the order of the rounds, the ids of all samples, and that every prompt of every epoch was served exactly once. Changes
  nothing. Exit code 1 if a check fails.

  --no-hashes   check only the sizes of models, checkpoints and exports (samples are always read)"""

MAX_SHOWN = 20  # problems that are printed


def main(argv: list[str]) -> int:
    """Run the command. Return 0 if no problem was found, else 1."""
    positional, own, rest = split_args(argv, {"--no-hashes": False})
    run = parse_run_argument("verify", positional)
    store = open_store(parse_store_options(rest, "verify"), probe=False)
    start = time.monotonic()
    result = audit_run(store, RunKeys(run), verify_hashes="--no-hashes" not in own)
    print(f"{run} in {store.uri}")
    for title, text in audit_report_rows(result, time.monotonic() - start):
        print(f"  {title:<12} {text}")
    for problem in result.problems[:MAX_SHOWN]:
        print(f"  WRONG: {problem}", file=sys.stderr)
    if len(result.problems) > MAX_SHOWN:
        print(f"  ... and {len(result.problems) - MAX_SHOWN} more", file=sys.stderr)
    print(f"{len(result.problems)} problems" if result.problems else "no problems found")
    return 1 if result.problems else 0


def audit_report_rows(result: Audit, seconds: float) -> Sequence[tuple[str, str]]:
    """Return the lines (title, text) of the report that say what was checked and how much of it."""
    commits = ", ".join(f"{count} {kind}" for kind, count in sorted(result.num_commits.items())) or "none"
    expired = f"; {result.num_expired} checkpoints have expired" if result.num_expired else ""
    rows = [
        ("commits", commits + expired),
        ("files", f"{result.num_files}, {format_bytes(result.num_bytes)}, read in {seconds:.1f} s"),
        ("samples", f"{result.num_samples} of {result.num_prompts} prompts, over {result.num_epochs} epochs"),
    ]
    if result.num_off_policy:
        rows.append(("off-policy", f"{result.num_off_policy} rollouts of the start weights (--debug-rollout-only)"))
    if result.num_orphans:
        unused = f"{result.num_orphans} files, {format_bytes(result.orphan_bytes)}: harmless; `penstock gc` lists them"
        rows.append(("unused", unused))
    return rows
