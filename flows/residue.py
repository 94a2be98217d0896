"""What killed processes of this user have left on this machine, outside the store: found, and removed.

Directories of dead owners (engines/scratch.py) hold nearly all of it. Earlier releases left things in /tmp and /dev/shm as well; of
these only Ray's session folders, which name their driver, and files in shared memory that no process has mapped are proven to be unused.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from engines import scratch
from flows.words import size

_SESSION = re.compile(r"^session_[\d_-]+_(?P<pid>\d+)$")
_LOADS = re.compile(r"^sglang_loads_.+\.shm$")


@dataclass(frozen=True)
class Residue:
    """A file or directory that nothing needs."""

    kind: str
    path: Path
    bytes: int
    modified: float  # seconds since the epoch


def find(base: Path | None = None, ray: Path | None = None, shm: Path = Path("/dev/shm")) -> list[Residue]:
    """List what dead processes of this user have left, the oldest first. Nothing of a living process or another user.

    Args:
        base: where processes make their temporary directories; TMPDIR if not given.
        ray: Ray's own directory, where earlier releases and a Ray with long paths keep sessions; `ray` in `base` if not given.
        shm: shared memory.
    """
    base = base or scratch.base_directory()
    found = [_residue("temporary directory", path) for path in scratch.abandoned(base)]
    found += [_residue("Ray session", path) for path in _dead_sessions(ray or base / "ray")]
    found += [_residue("shared memory", path) for path in _unmapped(shm)]
    return sorted(found, key=lambda residue: residue.modified)


def remove(residue: Residue) -> bool:
    """Remove what was found, unless a process has come to use it meanwhile. Whether it is gone."""
    if residue.kind == "temporary directory":
        return scratch.remove(residue.path)
    if residue.kind == "Ray session":
        if residue.path not in _dead_sessions(residue.path.parent):
            return False
        shutil.rmtree(residue.path, ignore_errors=True)
        return not residue.path.exists()
    if residue.path not in _unmapped(residue.path.parent):
        return False
    residue.path.unlink(missing_ok=True)
    return True


def _dead_sessions(directory: Path) -> list[Path]:
    """Session folders of Ray whose driver, which their name holds, is dead, and which no process has as an argument or open."""
    candidates = [path for path in _ours(directory) if (match := _SESSION.match(path.name)) and not _lives(int(match["pid"]))]
    if not candidates:
        return []
    commands = _commands()
    return [path for path in candidates if not any(path.name in command for command in commands)]


def _unmapped(shm: Path) -> list[Path]:
    """Files of killed engines in shared memory that no process has mapped or open."""
    candidates = [path for path in _ours(shm) if _LOADS.match(path.name)]
    if not candidates:
        return []
    used = _mapped()
    return [] if used is None else [path for path in candidates if str(path) not in used]


def _ours(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if not path.is_symlink() and path.stat().st_uid == os.geteuid())


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _commands() -> list[str]:
    """Command lines of all processes: Ray's own name their session folder."""
    return [text for process in _processes() if (text := _read(process / "cmdline"))]


def _mapped() -> set[str] | None:
    """Paths that processes of this user have mapped; None if one that may be an engine cannot be looked at, so nothing is proven."""
    paths: set[str] = set()
    for process in _processes():
        try:
            if process.stat().st_uid != os.geteuid():
                continue
        except FileNotFoundError:  # it has ended
            continue
        maps = _read(process / "maps")
        if maps is None:
            if re.search("python|sglang", _read(process / "cmdline") or "python"):
                return None
            continue
        paths.update(
            line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") and len(line.split(maxsplit=5)) == 6
        )
    return paths


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(path: Path) -> str | None:
    """A file of /proc; empty if its process has ended, None if it may not be read."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except PermissionError:
        return None


def _residue(kind: str, path: Path) -> Residue:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return Residue(kind, path, sum(file.stat().st_size for file in files), path.stat().st_mtime)


def report(*, delete: bool) -> None:
    """Print what dead processes of this user have left on this machine; with `delete` remove it."""
    found = find()
    removed = [residue for residue in found if delete and remove(residue)]
    for residue in found:
        state = "" if not delete else " (removed)" if residue in removed else " (in use now, kept)"
        print(f"{residue.kind}  {residue.path}  {size(residue.bytes)}{state}")
