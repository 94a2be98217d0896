"""Generate responses in which the model may run Python, as in ReTool (arXiv 2504.11536):
`--custom-generate-function-path examples/retool/python_tool.py`.

The model writes `<code>print(2**10)</code>` and stops, `<interpreter>1024</interpreter>` is appended, and the model
continues. The code runs in a sandbox that cannot reach the network, the files of this machine or other processes:

    this process -> supervisor (Linux namespaces, wall-clock limit) -> jail (file system, resource limits) -> python

The supervisor and the jail are this file, run as a script. Modules that they do not need are imported in functions, so
that they start faster. If the machine does not permit namespaces, importing this module fails, and a run is refused
before its engines start.
"""

import ctypes
import json
import os
import re
import resource
import signal
import struct
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

CALL = re.compile(r"<code>(?:\s*```(?:python)?\n)?(.*?)(?:```\s*)?</code>$", re.DOTALL)
NEW_USER, NEW_OTHERS = 0x10000000, 0x6C020000  # CLONE_NEW*: user; mount, UTS, IPC, PID and network
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18  # MS_*
DETACH, PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES, PIVOT_ROOT = 2, 1, 38, {"x86_64": 155, "aarch64": 41}
SECCOMP, FILTER, ALLOW, REFUSE, KILL = 22, 2, 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: with EPERM
# Architecture -> its audit number, and the numbers of system calls that give memory which RLIMIT_AS does not count
# (shmget, memfd_create, msgget, semget, memfd_secret) or that only widen the attack surface of the kernel (add_key,
# request_key, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup).
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, (29, 319, 68, 64, 447, 248, 249, 250, 321, 298, 323, 425)),
    "aarch64": (0xC00000B7, (194, 279, 186, 190, 447, 217, 218, 219, 280, 241, 282, 425)),
}
UNPRIVILEGED = 65534  # user and group id of the model's code if this process runs as root
OVERTIME, KILLED, FAILED = 124, 137, 125  # exit codes of the supervisor


class SandboxError(Exception):
    """Raised if the sandbox cannot be set up; the code has not run."""


class Limits(NamedTuple):
    """Limits of one program."""

    seconds: int = 10  # of wall-clock time
    processor_seconds: int = 5
    memory: int = 256 << 20  # bytes of address space
    disk: int = 16 << 20  # bytes of all files, which are kept in memory
    output: int = 2000  # characters that the model reads


DEFAULT_LIMITS = Limits()
PYTHON = os.path.realpath(sys.executable)  # without the packages of a virtual environment


async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        call = CALL.search(await engine.generate(sample, stop=["</code>"]))
        if call is None:
            break
        output = await run_in_turn(call[1])
        if not engine.append(sample, f"<interpreter>{output}</interpreter>"):
            break
    return sample


async def run_in_turn(code: str) -> str:
    """Run a program in the sandbox, at most one per processor at a time. Return its output."""
    import asyncio

    async with free_slots():
        return await asyncio.to_thread(run_python, code)


@cache
def free_slots():
    """Return the semaphore that limits how many sandboxes run at a time."""
    import asyncio

    return asyncio.Semaphore(os.cpu_count() or 1)


def run_python(code: str, limits: Limits = DEFAULT_LIMITS) -> str:
    """Run a Python program in the sandbox. Return what it prints, followed by the reason if it was stopped.

    Raises:
        SandboxError: this machine does not permit the sandbox.
    """
    import subprocess
    import tempfile

    source = Path(__file__).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root, tempfile.TemporaryFile() as file:
        command = [PYTHON, "-I", "-S", "-c", source, root, json.dumps(limits)]
        status = subprocess.run(command, input=code.encode(errors="replace"), stdout=file, stderr=file, check=False)
        file.seek(0)
        output = file.read(4 * limits.output + 1).decode(errors="replace").strip()
    if status.returncode not in (0, OVERTIME, KILLED):
        raise SandboxError(f"model-written Python cannot be run safely on this machine: {output[-1000:]}")
    if len(output) > limits.output:
        output = output[: limits.output] + " ... (cut)"
    if status.returncode == OVERTIME:
        output += f"\nstopped after {limits.seconds} s"
    elif status.returncode == KILLED:
        output += f"\nstopped after {limits.processor_seconds} s of processor time"
    return output.strip()


def supervise(root: str, limits: Limits) -> int:
    """Run the program of stdin as the first process of new namespaces, so that all of its processes end with it.

    Return 0 if the program ended, OVERTIME or KILLED if it exceeded its wall-clock or processor time, or FAILED if the
    sandbox could not be set up.
    """
    is_root, user, group = os.geteuid() == 0, os.getuid(), os.getgid()
    try:
        if not is_root:  # only in a user namespace may other users than root create the other namespaces
            system_call("unshare", NEW_USER)
            for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                Path("/proc/self", file).write_text(text)
        system_call("unshare", NEW_OTHERS)
    except OSError as error:
        print(f"{error.strerror}; permit namespaces (sysctl user.max_user_namespaces, the container's seccomp profile)")
        return FAILED
    reader, writer = os.pipe()  # for the error of a failed setup; exec closes the writer
    if (child := os.fork()) == 0:
        try:
            enter_jail(root, limits)
            become_nobody(is_root, limits)
            os.execve(PYTHON, ["python", "-I", "-B", "-"], {})
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(FAILED)
    os.close(writer)
    late: list[int] = []

    def kill_program(*_: object) -> None:
        late.append(child)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill_program)
    signal.signal(signal.SIGTERM, kill_program)
    system_call("prctl", PARENT_DEATH_SIGNAL, signal.SIGTERM)
    signal.alarm(limits.seconds)
    _, status = os.waitpid(child, 0)
    if message := os.read(reader, 1000):
        print(message.decode())
        return FAILED
    return OVERTIME if late else KILLED if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else 0


def enter_jail(root: str, limits: Limits) -> None:
    """Replace the file system by an empty one in memory, in which only Python's own files can be read."""
    os.umask(0o022)
    mount(None, "/", RECURSIVE | PRIVATE)
    mount("tmpfs", root, NO_SUID | NO_DEV, f"size={limits.disk},nr_inodes=1000")
    jail = Path(root, "jail")
    for folder in (sys.base_prefix, "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        target = Path(f"{jail}{folder}")
        if Path(folder).is_dir() and not target.exists():
            target.mkdir(parents=True)
            mount(folder, str(target), BIND | RECURSIVE)
            locked = os.statvfs(folder).f_flag & (NO_SUID | NO_DEV | NO_EXEC)
            mount(None, str(target), REMOUNT | BIND | READ_ONLY | locked)
    (jail / "tmp").mkdir()
    (jail / "tmp").chmod(0o777)
    os.chdir(root)
    system_call("syscall", PIVOT_ROOT[os.uname().machine], b".", b".")
    system_call("umount2", b".", DETACH)  # the file system of this machine


def become_nobody(is_root: bool, limits: Limits) -> None:
    """Drop all rights of this process, and set its limits, by which it cannot start other processes."""
    if is_root:
        os.setgroups([])
        os.setgid(UNPRIVILEGED)
        os.setuid(UNPRIVILEGED)
    system_call("unshare", NEW_USER)  # without a map of users: exec then drops all capabilities
    os.chroot("/jail")  # the kernel refuses further user namespaces to a process in a chroot
    os.chdir("/tmp")
    system_call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    forbid_system_calls()
    for name, value in (
        ("CPU", limits.processor_seconds),
        ("AS", limits.memory),
        ("FSIZE", limits.disk // 4),
        ("NOFILE", 16),
        ("NPROC", 1),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    system_call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL)


def forbid_system_calls() -> None:
    """Install a seccomp filter that refuses SYSTEM_CALLS, and kills a program that uses other architectures' calls."""
    architecture, numbers = SYSTEM_CALLS[os.uname().machine]
    load, equal, at_least, result = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (result, 0, 0, KILL)]
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (result, 0, 0, KILL)]  # x32
    for number in numbers:
        program += [(equal, 0, 1, number), (result, 0, 0, REFUSE)]
    program.append((result, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    system_call("prctl", SECCOMP, FILTER, struct.pack("HP", len(program), ctypes.addressof(code)), 0, 0)


def mount(source: str | None, target: str, flags: int, options: str = "") -> None:
    """Call mount(2). `source` is the folder to show at `target` with BIND, the type of a new file system, or None to
    change the flags of `target`."""
    name = source.encode() if source else None
    system_call("mount", name, target.encode(), name, flags, options.encode())


def system_call(name: str, *arguments: object) -> int:
    """Call a function of the C library. Raises OSError with its name if it returns -1."""
    converted = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*converted)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], Limits(*json.loads(sys.argv[2]))))
run_python("")  # fails here, before anything starts, if this machine does not permit the sandbox
