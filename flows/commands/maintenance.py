"""`penstock verify`, `rm` and `gc`: check the files of a run, remove a run, and remove files that nothing needs.

storage/maintenance/ does the checks and decides what is removable; this file parses the requests and prints tables.

Outside the store, `gc` removes only files of dead processes that are provably unused:

    temporary directories    of Penstock's processes (engines/scratch.py)
    Ray's session folders    of dead drivers, in /tmp/ray, where Ray creates them if the path of TMPDIR is too long
    shared memory            files of engines and torch in /dev/shm that no process has mapped
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.engines import scratch
from penstock.engines.backends import BACKENDS, engine_backend
from penstock.flows.options.argv import format_bytes, parse_number, parse_run_argument, short_repr, split_args
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.runs import keys_of_existing_run, open_named_store, open_store, remove_run_and_tracking
from penstock.flows.terminal.console import print_table
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.leases import store_time
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import (
    Orphan,
    find_orphans,
    finish_interrupted_expiries,
    is_removed,
    remove_orphan,
    translate_write_errors,
)
from penstock.storage.store import Store, committed_prefixes

# ---- penstock verify -------------------------------------------------------------------------------------------------

VERIFY_USAGE = """penstock verify RUN [--no-hashes] [--store URI ...]

  Checks everything that a run has committed: every record, the size and hash of every file and image, the inputs of
  every commit, the order of the rounds, the ids of all samples, and that every prompt of every epoch was served exactly
  once. Changes nothing. Exit code 1 if a check fails.

  --no-hashes   check only the sizes of models, checkpoints, exports and images (samples are always read)"""

MAX_SHOWN = 20  # problems that are printed


def verify_main(argv: list[str]) -> int:
    """Run `penstock verify`. Return 0 if no problem was found, else 1."""
    positional, own, rest = split_args(argv, {"--no-hashes": False})
    run = parse_run_argument("verify", positional)
    store = open_named_store(rest, "verify")
    start = time.monotonic()
    result = audit_run(store, RunKeys(run), verify_hashes="--no-hashes" not in own)
    seconds = time.monotonic() - start
    commits = ", ".join(f"{count} {kind}" for kind, count in sorted(result.num_commits.items())) or "none"
    expired = f"; {result.num_expired} checkpoints have expired" if result.num_expired else ""
    off_policy = f"{result.num_off_policy} rollouts generated with the initial weights (--debug-rollout-only)"
    unused = f"{result.num_orphans} files, {format_bytes(result.orphan_bytes)}: harmless; `penstock gc` lists them"
    print(f"{run} in {store.uri}")
    for title, text, is_shown in (
        ("commits", commits + expired, True),
        ("files", f"{result.num_files}, {format_bytes(result.num_bytes)}, read in {seconds:.1f} s", True),
        ("samples", f"{result.num_samples} of {result.num_prompts} prompts, over {result.num_epochs} epochs", True),
        ("training", f"samples were trained {result.num_sample_uses} times", result.num_sample_uses),
        ("off-policy", off_policy, result.num_off_policy),
        ("unused", unused, result.num_orphans),
    ):
        if is_shown:
            print(f"  {title:<12} {text}")
    for problem in result.problems[:MAX_SHOWN]:
        print(f"  WRONG: {problem}", file=sys.stderr)
    if len(result.problems) > MAX_SHOWN:
        print(f"  ... and {len(result.problems) - MAX_SHOWN} more", file=sys.stderr)
    print(f"{len(result.problems)} problems" if result.problems else "no problems found")
    return 1 if result.problems else 0


# ---- penstock rm -----------------------------------------------------------------------------------------------------

RM_USAGE = """penstock rm RUN [--yes RUN] [--store URI ...]

  Removes a run: its record, rollouts, checkpoints, evaluations, exports, and undelivered MLflow data. Keeps converted
  models, images (`penstock gc` deletes those that no other run uses) and what MLflow has received. Fails
  while a driver of the run is alive or a fork needs its files. After a kill the same command, or `penstock gc
  --delete`, finishes the removal.

  --yes   the run's name again; required if a round is committed"""

_ROUNDS = ("rollouts", "steps", "checkpoints", "exports")


def rm_main(argv: list[str]) -> int:
    """Run `penstock rm`. Return 0."""
    positional, own, rest = split_args(argv, {"--yes": True})
    run = parse_run_argument("rm", positional)
    if own.get("--yes", run) != run:
        raise OptionError(f"--yes {own['--yes']} does not match the run {run!r} to be removed: give --yes {run}")
    store = open_store(parse_config(rest).run, probe=False)
    keys = keys_of_existing_run(store, run)
    if not is_removed(store, keys) and "--yes" not in own:
        kinds = [prefix.split("/")[2] for prefix in committed_prefixes(store, keys)]
        if not {*kinds}.isdisjoint(_ROUNDS):
            raise RunError(
                f"run {run!r} has {kinds.count('steps')} trained rounds and {len(kinds)} commits: confirm its removal "
                f"with --yes {run}"
            )
    with translate_write_errors(store):
        freed = remove_run_and_tracking(store, keys)
    print(f"run {run} was removed from {store.uri}: {format_bytes(freed)} freed")
    return 0


# ---- penstock gc -----------------------------------------------------------------------------------------------------

DEFAULT_HOURS = 24.0
GC_USAGE = """penstock gc [RUN] [--delete] [--older-than HOURS] [--store URI ...]

  Lists files that the store no longer needs: attempts without a commit (the writer died, or another attempt was
  committed first), files of expired checkpoints and removed runs, journals of finished rounds, images that no commit
  lists (they are deleted only while no driver of any run is alive), unfinished forks, temporary files. Without RUN it
  also lists files that dead processes left in TMPDIR and /dev/shm. Files that a commit of any run refers to are kept
  (forks use their parent's files).

  RUN            only files of this run; by default the whole store
  --delete       remove the listed files; without this flag nothing is changed
  --older-than   hours without a change before a file counts as orphaned (default 24)"""


def gc_main(argv: list[str]) -> int:
    """Run `penstock gc`. Return 0."""
    positional, own, rest = split_args(argv, {"--delete": False, "--older-than": True})
    if len(positional) > 1:
        raise OptionError(f"penstock gc takes one run or none; found {short_repr(' '.join(positional))}")
    older_than = 3600 * parse_number("--older-than", own.get("--older-than", str(DEFAULT_HOURS)))
    store = open_named_store(rest, "gc")
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
        leftovers = find_files_of_dead_processes()
        freed = [residue for residue in leftovers if "--delete" in own and remove_residue(residue)]
        for residue in leftovers:
            state = "" if "--delete" not in own else " (removed)" if residue in freed else " (in use now, kept)"
            print(f"{residue.kind}  {residue.path}  {format_bytes(residue.bytes)}{state}")
    return 0


def delete_orphans(store: Store, orphans: list[Orphan], run: str | None, min_age_seconds: float) -> set[str]:
    """Delete `orphans` (unneeded files) of a run (None: of all runs), except those that have come into use since
    `find_orphans` listed them. Return the keys of the deleted orphans."""
    for name in [run] if run else store.list("runs"):
        finish_interrupted_expiries(store, RunKeys(name))
    now = store_time(store)
    remaining = {orphan.key: orphan for orphan in find_orphans(store, run, older_than=min_age_seconds, now=now)}
    # Unfinished attempts are removed last: that needs disk space, because a claim file is written for each.
    simple_first = sorted(remaining.values(), key=lambda orphan: orphan.kind == "unfinished attempt")
    removed = {orphan.key for orphan in simple_first if remove_orphan(store, orphan, now)}
    return removed | {
        orphan.key for orphan in orphans if orphan.kind == "expired checkpoint" and orphan.key not in remaining
    }


def print_orphans(store: Store, orphans: list[Orphan], removed_keys: set[str] | None) -> None:
    """Print a table of unneeded files. `removed_keys`: keys of the orphans that were removed; None without --delete."""
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


# ---- files of dead processes -----------------------------------------------------------------------------------------

_PROC = Path("/proc")
_SESSION = re.compile(r"^session_[\d_-]+_(?P<pid>\d+)$")
_TORCH_FILE = re.compile(r"^torch_(?P<pid>\d+)_\d+_\d+$")  # a shared tensor; pid of the process that created it
_TORCH_SECONDS = 3600.0  # keep a dead process's shared tensors this long: a receiver may not have mapped them yet


@dataclass(frozen=True)
class Residue:
    """A file or directory that a dead process left."""

    kind: str
    path: Path
    bytes: int
    modified: float  # seconds since the epoch


def find_files_of_dead_processes(
    base: Path | None = None, ray: Path = Path("/tmp/ray"), shm: Path = Path("/dev/shm")
) -> list[Residue]:
    """Return the files and directories that dead processes of this user left, oldest first.

    Args:
        base: where penstock processes create their temporary directories; None: TMPDIR.
        ray: where Ray creates its session folders.
        shm: where shared memory is mounted.
    """
    by_kind = {
        "temporary directory": scratch.abandoned_temp_directories(base or scratch.temp_base_directory()),
        "Ray session": _dead_ray_sessions(ray),
        "shared memory": _unmapped_engine_files(shm),
    }
    found = []
    for kind, path in ((kind, path) for kind, paths in by_kind.items() for path in paths):
        files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file() and not f.is_symlink()]
        found.append(Residue(kind, path, sum(file.stat().st_size for file in files), path.stat().st_mtime))
    return sorted(found, key=lambda residue: residue.modified)


def remove_residue(residue: Residue) -> bool:
    """Remove a leftover file or directory unless a process uses it again. Return whether it was removed."""
    if residue.kind == "temporary directory":
        return scratch.remove_if_abandoned(residue.path)
    find = _dead_ray_sessions if residue.kind == "Ray session" else _unmapped_engine_files
    if residue.path not in find(residue.path.parent):
        return False
    if residue.path.is_dir():
        shutil.rmtree(residue.path, ignore_errors=True)
    else:
        residue.path.unlink(missing_ok=True)
    return not residue.path.exists()


def _dead_ray_sessions(directory: Path) -> list[Path]:
    """Return Ray's session folders in a directory whose driver, the process with the pid in the folder's name, is dead,
    and whose name is not on the command line of any process."""
    candidates = [
        path
        for path in _entries_of_this_user(directory)
        if (match := _SESSION.match(path.name)) and not (_PROC / match["pid"]).exists()
    ]
    if not candidates:
        return []
    commands = [text for path in _PROC.glob("[0-9]*/cmdline") if (text := _read_proc_file(path))]
    return [path for path in candidates if not any(path.name in command for command in commands)]


def _unmapped_engine_files(shm: Path) -> list[Path]:
    """Return the files of engines and trainers in shared memory that no process has mapped. Return [] if it cannot be
    determined which files are mapped."""
    entries = _entries_of_this_user(shm)
    patterns = list(filter(None, (engine_backend(name).shared_memory for name in BACKENDS)))
    candidates = [path for path in entries if any(re.fullmatch(pattern, path.name) for pattern in patterns)]
    for path in entries:
        match = _TORCH_FILE.match(path.name)
        if match and not (_PROC / match["pid"]).exists():
            candidates += [path] if time.time() - path.stat().st_mtime > _TORCH_SECONDS else []
    if not candidates:
        return []
    used = mapped_paths()
    return [] if used is None else [path for path in candidates if str(path) not in used]


def _entries_of_this_user(directory: Path) -> list[Path]:
    """Return the entries of a directory that belong to this user, except symbolic links."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if not path.is_symlink() and path.stat().st_uid == os.geteuid())


def mapped_paths() -> set[str] | None:
    """Return the files that this user's processes map into memory; None if the files of a Python or engine process
    cannot be read in /proc."""
    paths: set[str] = set()
    for process in _PROC.glob("[0-9]*"):
        try:
            if process.stat().st_uid != os.geteuid():
                continue
        except FileNotFoundError:  # the process has ended
            continue
        maps = _read_proc_file(process / "maps")
        if maps is None:
            if re.search("|".join(["python", *BACKENDS]), _read_proc_file(process / "cmdline") or "python"):
                return None
            continue
        paths.update(
            line.split(maxsplit=5)[5]
            for line in maps.splitlines()
            if line.count("/") and len(line.split(maxsplit=5)) == 6
        )
    return paths


def _read_proc_file(path: Path) -> str | None:
    """Return the text of a file in /proc: "" if the process has ended, None if permission is denied."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except PermissionError:
        return None
