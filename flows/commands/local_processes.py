"""What processes of this user hold or have left on this machine, outside the store: ports (`penstock doctor`), and
files of killed processes (`penstock gc`).

Most files are in the temporary directories of dead processes (engines/scratch.py). Ray's session folders in /tmp/ray,
where they are if TMPDIR is too long for Ray, are removed if their driver (the pid in the folder's name) is dead; files
of engines and torch in /dev/shm if no process has mapped them.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.engines import scratch
from penstock.flows.options.argv import format_bytes

# ---- ports -----------------------------------------------------------------------------------------------------------

# (substring of a command line, authentication of that process's ports, environment variable without which the ports
# have no authentication); the first match counts.
PROTECTIONS = (
    ("prefect_server.py", "login; checks Host and Origin", "PREFECT_SERVER_API_AUTH_STRING"),
    ("launch_router.py", "API key; none on its metrics, states and model names", "PENSTOCK_SERVER_KEY"),
    ("sglang/launch.py", "API key; none on ports between its processes", "PENSTOCK_SERVER_KEY"),
    ("mlflow_server", "login; checks Host and Origin", None),
    ("gcs_server", "Ray token", "RAY_AUTH_TOKEN"),
    ("raylet", "Ray token", "RAY_AUTH_TOKEN"),
    ("ray::", "Ray token; none on torch's TCPStore", "RAY_AUTH_TOKEN"),
    ("ray/", "Ray token", "RAY_AUTH_TOKEN"),
)
OURS = {"penstock", "penstock.flows.cli", "penstock.flows.services.stack"}  # modules started with `python -m`


@dataclass(frozen=True)
class ListeningPort:
    """A port that a process listens on."""

    address: str  # "127.0.0.1:4200"
    owner: str  # "gcs_server (pid 7)"
    command: str  # the command that the process belongs to: "train my-run (pid 5)"
    protection: str  # authentication, "" if there is none
    loopback: bool


def listening_ports(roots: Iterable[psutil.Process] | None = None) -> list[ListeningPort]:
    """Return the TCP ports that the processes `roots` and their descendants listen on, sorted by port number."""
    family: dict[int, tuple[psutil.Process, str]] = {}
    for root in penstock_processes_of_this_user() if roots is None else roots:
        with suppress(psutil.Error):
            command_name = f"{describe_command(root.cmdline())} (pid {root.pid})"
            processes = [root, *root.children(recursive=True)]
            family |= {each.pid: (each, command_name) for each in processes if each.pid not in family}
    ports: dict[tuple[str, int], ListeningPort] = {}
    for process, command_name in family.values():
        try:
            command, name = process.cmdline(), process.name()
            sockets = [each.laddr for each in process.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
            protection = describe_port_authentication(command, process.environ()) if sockets else ""
        except psutil.Error:  # the process has ended, or is another user's
            continue
        for host, port in sockets:
            host = host.removeprefix("::ffff:")
            owner = f"{name} (pid {process.pid})"
            loopback = ipaddress.ip_address(host).is_loopback
            ports.setdefault((host, port), ListeningPort(f"{host}:{port}", owner, command_name, protection, loopback))
    return sorted(ports.values(), key=lambda each: int(each.address.rpartition(":")[2]))


def penstock_processes_of_this_user() -> list[psutil.Process]:
    """Return this user's `penstock` processes: commands and `make up`."""
    me = psutil.Process().uids().real
    roots = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == me and is_penstock_command(process.cmdline()):
                roots.append(process)
        except psutil.Error:
            continue
    return roots


def is_penstock_command(command: list[str]) -> bool:
    """Return whether a command line starts `penstock` or one of its modules."""
    return any(word in OURS or word.endswith("bin/penstock") for word in command[:4])


def describe_command(command: list[str]) -> str:
    """Return the subcommand and the run's name of a `penstock` command line: "train my-run"; "make up" for the
    services, and the program's name for any other command."""
    start = next((number for number, word in enumerate(command[:4]) if is_penstock_command([word])), None)
    if start is None:
        return Path(command[0]).name if command else "?"
    if command[start].endswith("stack"):
        return "make up"
    words = command[start + 1 :]
    named = words[words.index("--run") + 1 :] if "--run" in words else words[1:]
    return " ".join([*words[:1], *(word for word in named[:1] if not word.startswith("-"))])


def describe_port_authentication(command: list[str], environment: dict[str, str]) -> str:
    """Return the authentication of a process's ports, by its command line (PROTECTIONS), or "" if there is none."""
    for mark, protection, variable in PROTECTIONS:
        if mark in " ".join(command):
            return protection if variable is None or environment.get(variable) else ""
    return "Ray token, session keys; none on --prometheus-port" if is_penstock_command(command) else ""


# ---- files -----------------------------------------------------------------------------------------------------------

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
    candidates = [path for path in entries if _ENGINE_FILE.match(path.name)]
    for path in entries:
        match = _TORCH_FILE.match(path.name)
        if match and not Path(f"/proc/{match['pid']}").exists():
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
