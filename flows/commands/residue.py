"""Find and remove files that killed processes of this user left on this machine outside the store.

Most of them are in the temporary directories of dead processes (engines/scratch.py). Ray's session folders in /tmp/ray,
where they are if TMPDIR is too long for Ray, are removed if their driver (the pid in the folder's name) is dead; files
of engines and torch in /dev/shm if no process has mapped them.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.engines import scratch
from penstock.flows.options.argv import format_bytes

_SESSION = re.compile(r"^session_[\d_-]+_(?P<pid>\d+)$")
_ENGINE_FILE = re.compile(r"^sglang_loads_.+\.shm$")
_TORCH_FILE = re.compile(r"^torch_(?P<pid>\d+)_\d+_\d+$")  # a shared tensor; pid of the process that created it
_TORCH_SECONDS = 3600.0  # a shared tensor of a dead process may wait for its receiver, which then maps it


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
        base: where processes create their temporary directories; default TMPDIR.
        ray: directory with Ray's session folders of runs whose TMPDIR is too long for Ray.
        shm: mount point of shared memory.
    """
    base = base or scratch.temp_base_directory()
    found = [_measure_residue("temporary directory", path) for path in scratch.abandoned_temp_directories(base)]
    found += [_measure_residue("Ray session", path) for path in _dead_ray_sessions(ray)]
    found += [_measure_residue("shared memory", path) for path in _unmapped_engine_files(shm)]
    return sorted(found, key=lambda residue: residue.modified)


def remove_residue(residue: Residue) -> bool:
    """Remove a leftover file or directory unless a process uses it again. Return whether it was removed."""
    if residue.kind == "temporary directory":
        return scratch.remove_if_abandoned(residue.path)
    if residue.kind == "Ray session":
        if residue.path not in _dead_ray_sessions(residue.path.parent):
            return False
        shutil.rmtree(residue.path, ignore_errors=True)
        return not residue.path.exists()
    if residue.path not in _unmapped_engine_files(residue.path.parent):
        return False
    residue.path.unlink(missing_ok=True)
    return True


def _dead_ray_sessions(directory: Path) -> list[Path]:
    """Return Ray's session folders whose driver (the pid in the folder's name) is dead and whose name is not on the
    command line of any process."""
    candidates = [
        path
        for path in _entries_of_this_user(directory)
        if (match := _SESSION.match(path.name)) and not Path(f"/proc/{match['pid']}").exists()
    ]
    if not candidates:
        return []
    commands = [text for process in _proc_directories() if (text := _read_proc_file(process / "cmdline"))]
    return [path for path in candidates if not any(path.name in command for command in commands)]


def _unmapped_engine_files(shm: Path) -> list[Path]:
    """Return files of engines and of trainers in shared memory that no process has mapped; none if that cannot be
    determined."""
    entries = _entries_of_this_user(shm)
    candidates = [path for path in entries if _ENGINE_FILE.match(path.name) or _is_old_tensor_of_dead_process(path)]
    if not candidates:
        return []
    used = mapped_paths()
    return [] if used is None else [path for path in candidates if str(path) not in used]


def _is_old_tensor_of_dead_process(path: Path) -> bool:
    match = _TORCH_FILE.match(path.name)
    if match is None or Path(f"/proc/{match['pid']}").exists():
        return False
    return time.time() - path.stat().st_mtime > _TORCH_SECONDS


def _entries_of_this_user(directory: Path) -> list[Path]:
    """Return the entries of a directory that belong to this user, except symbolic links."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if not path.is_symlink() and path.stat().st_uid == os.geteuid())


def mapped_paths() -> set[str] | None:
    """Return the files that this user's processes map into memory; None if /proc hides those of a Python process."""
    paths: set[str] = set()
    for process in _proc_directories():
        try:
            if process.stat().st_uid != os.geteuid():
                continue
        except FileNotFoundError:  # the process has ended
            continue
        maps = _read_proc_file(process / "maps")
        if maps is None:
            if re.search("python|sglang", _read_proc_file(process / "cmdline") or "python"):
                return None
            continue
        paths.update(
            line.split(maxsplit=5)[5]
            for line in maps.splitlines()
            if line.count("/") and len(line.split(maxsplit=5)) == 6
        )
    return paths


def _proc_directories() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read_proc_file(path: Path) -> str | None:
    """Return the text of a file in /proc: "" if the process has ended, None if permission is denied."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except PermissionError:
        return None


def _measure_residue(kind: str, path: Path) -> Residue:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return Residue(kind, path, sum(file.stat().st_size for file in files), path.stat().st_mtime)


def print_or_delete_residue(*, delete: bool) -> None:
    """Print the files that dead processes of this user left on this machine; with `delete` remove them."""
    found = find_files_of_dead_processes()
    removed = [residue for residue in found if delete and remove_residue(residue)]
    for residue in found:
        state = "" if not delete else " (removed)" if residue in removed else " (in use now, kept)"
        print(f"{residue.kind}  {residue.path}  {format_bytes(residue.bytes)}{state}")
