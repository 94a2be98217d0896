"""examples/retool: what model-written Python can reach, and what stops it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.stages.plugins import load_function
from penstock.storage.errors import PluginError

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "examples/retool/python_tool.py"
ESCAPES = """
import ctypes, json, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
attempts = {
    "read_home": lambda: os.listdir(HOME),
    "read_passwd": lambda: open("/etc/passwd").read(),
    "read_repository": lambda: os.listdir(REPOSITORY),
    "see_processes": lambda: os.listdir("/proc"),
    "signal_parent": lambda: os.kill(PARENT, 0),
    "write_library": lambda: open(os.__file__, "a"),
    "write_root": lambda: open("/file", "w"),
    "connect": lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2),
    "abstract_socket": lambda: socket.socket(socket.AF_UNIX).connect("\\0" + SOCKET),
    "resolve": lambda: socket.getaddrinfo("pypi.org", 443),
    "fork": os.fork,
    "thread": threading.Thread(target=int).start,
    "become_root": lambda: os.setuid(0),
    "leave_chroot": lambda: os.chroot("."),
    "new_namespace": lambda: libc.unshare(0x10000000) and os.listdir("/unshare-failed"),
    "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) and os.listdir("/mount-failed"),
}
done = []
for name, attempt in attempts.items():
    if name in NAMES:
        try:
            attempt()
            done.append(name)
        except (OSError, RuntimeError):
            continue
print(json.dumps([len(attempts), done]))
"""


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    """The module's functions."""
    try:
        return load_function(f"{TOOL}:run_python").__globals__
    except PluginError as error:
        pytest.skip(f"namespaces are not permitted here: {error}")


def test_code_reaches_neither_files_nor_network_nor_processes(tool: dict[str, Any]) -> None:
    harmless = [
        "read_passwd",
        "read_repository",
        "see_processes",
        "signal_parent",
        "connect",
        "abstract_socket",
        "thread",
    ]
    every = re.findall(r'^    "(\w+)":', ESCAPES, re.MULTILINE)
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind(f"\0penstock-{os.getpid()}")
        local.listen()
        values = {"HOME": str(Path.home()), "REPOSITORY": str(REPOSITORY), "PARENT": os.getpid()}
        values |= {"PORT": server.getsockname()[1], "SOCKET": f"penstock-{os.getpid()}"}
        header = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        outside = subprocess.run(
            [sys.executable, "-c", f"NAMES = {harmless}\n{header}{ESCAPES}"], capture_output=True, text=True, check=True
        )
        inside = tool["run_python"](f"NAMES = {every}\n{header}{ESCAPES}")
    assert json.loads(outside.stdout) == [len(every), harmless], "the attempts are real"
    allowed = ["read_home"] if Path(sys.base_prefix).is_relative_to(Path.home()) else []  # Python's own folder
    assert json.loads(inside) == [len(every), allowed]


def test_files_and_environment_are_empty_in_every_call(tool: dict[str, Any]) -> None:
    look = "import os; print(os.listdir('/tmp'), set(os.environ) - {'LC_CTYPE'}); open('/tmp/kept', 'w').write('x')"
    assert [tool["run_python"](look) for _ in range(2)] == ["[] set()"] * 2


FULL = pytest.mark.full
SHARED_MEMORY = "import ctypes; print(ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600))"  # is not in the address space


@pytest.mark.parametrize(
    ("code", "output", "limits"),
    [
        ("x = bytearray(1 << 30)", "MemoryError", {}),
        ("import os\nwhile True: os.fork()", "BlockingIOError", {}),
        ("while True: pass", "stopped after 1 s of processor time", {"processor_seconds": 1, "seconds": 60}),
        pytest.param("import time; time.sleep(60)", "stopped after 1 s", {"seconds": 1}, marks=FULL),
        pytest.param("open('x', 'wb').write(bytes(5 << 20))", "File too large", {}, marks=FULL),
        pytest.param("for i in range(20): open(str(i), 'wb').write(bytes(1 << 20))", "No space left", {}, marks=FULL),
        pytest.param(SHARED_MEMORY, "-1", {}, marks=FULL),
        pytest.param("import os; print(os.memfd_create('x'))", "PermissionError", {}, marks=FULL),
        pytest.param("while True: print('x' * 1000)", "... (cut)", {"seconds": 60}, marks=FULL),
        pytest.param("import os; os._exit(125)", "", {}, marks=FULL),
        pytest.param("1/0", "ZeroDivisionError", {}, marks=FULL),
    ],
)
def test_program_is_stopped_at_its_limits(tool: dict[str, Any], code: str, output: str, limits: dict[str, int]) -> None:
    before = set(psutil.Process().children(recursive=True))
    text = tool["run_python"](code, tool["Limits"](**limits))
    assert output in (text.splitlines() or [""])[-1] and len(text) < 2100, text
    assert set(psutil.Process().children(recursive=True)) <= before


@FULL
def test_program_ends_with_the_process_that_started_it(tool: dict[str, Any]) -> None:
    command = f"import sys; sys.path.append({str(TOOL.parent)!r})\nfrom python_tool import *\n"
    command += "run_python('while True: pass', Limits(seconds=60))"
    process = subprocess.Popen([sys.executable, "-c", command])
    family: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(family) < 2 and time.monotonic() < deadline:  # supervisor and program
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert len(family) == 2 and psutil.wait_procs(family, timeout=30)[1] == []


def test_machine_without_namespaces_is_refused(tool: dict[str, Any]) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs util-linux")
    load = f"from penstock.stages.plugins import load_function; load_function({str(TOOL)!r}, 'generate')"
    forbid = 'echo 0 > /proc/sys/user/max_mnt_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", load]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert result.returncode == 1 and "PluginError" in result.stderr.splitlines()[-1]
    assert "cannot be run safely on this machine" in result.stderr and "permit namespaces" in result.stderr
