"""Starts one SGLang server: a script, `python launch.py <sglang flags>`, for the server's interpreter.

That may be another one than the trainer's, so nothing of Penstock is imported. The script owns three things: the server dies with
the process that started it, SGLang's spawned children included; a folder `<prefix>/sglang-site` joins the import path if there is
one (torchvision lives there: among the others it breaks transformers on CPU); and without CUDA the door of `cpu_site/` opens.
With CUDA, SGLang imports `__main__` again in every child it spawns, so all of that is at top level and holds in the children too;
without CUDA they are forked.
"""

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARENT_VARIABLE = "PENSTOCK_SERVER_PARENT"  # pid of the process that started this one
KEY_VARIABLE = "PENSTOCK_SERVER_KEY"
PR_SET_PDEATHSIG = 1
# Imported where they are installed, for what no server on a CPU does: a curve of assisted generation, dumps of Megatron's tensors. Without them
# SGLang's import takes 7.9 s of processor time instead of 8.5.
NOT_NEEDED = ("sklearn", "megatron")
# The user's flags follow these on the command line, and the last one wins.
CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--sleep-on-idle",  # an idle server would burn a whole core
    *("--max-total-tokens", "16384"),  # SGLang would take most of the machine's memory for the cache
]


def die_with_parent() -> None:
    """SIGKILL for us when the parent goes, also if it went before we asked for that. SGLang's own children start here, too."""
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this server is gone")
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for those that we spawn


def prepare_imports() -> bool:
    """Arrange the import path and open the CPU door if this machine has no CUDA. Returns whether it has."""
    # This folder came along as the script's; its `server.py` or `args.py` must not shadow anybody's module.
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != HERE]
    side = Path(sys.prefix) / "sglang-site"
    if side.is_dir() and str(side) not in sys.path:
        sys.path.append(str(side))

    import torch

    if torch.cuda.is_available():
        return True
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's own way to say that there is none
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "penstock_cpu_models")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # a router takes 15 s and a C++ compiler, and a small model wins nothing
    door = str(HERE / "cpu_site")
    if door not in sys.path:
        sys.path.insert(0, door)
    import sglang_cpu_door  # noqa: F401

    return False


def fork_children() -> None:
    """Let SGLang fork its other processes, which it would spawn, and import here what they need.

    A start then costs 8 s of processor time instead of 23, and the three processes take a fifth of the memory. Not with CUDA, which
    does not survive a fork.
    """
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.entrypoints import engine

    prepare = engine._set_envs_and_config

    def then_fork(server_args: object) -> None:
        prepare(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = then_fork
    os.register_at_fork(after_in_child=die_with_parent)
    gc.freeze()  # collecting would write to every page that the children share


def leave_memory_unpinned() -> None:
    """SGLang registers the buffer of routed experts with CUDA, also on a CPU, where its start would end there."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(*args: object, **options: object) -> object:
        return common.alloc_with_host_register(*args, **{**options, "pin_memory": False})

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def keep_load_files_in_tmpdir() -> None:
    """SGLang 0.5.21 keeps its counters of running requests in files of /dev/shm, and a killed server leaves them there for ever. In TMPDIR
    they go with the process that has started this one. (It is a memory-mapped file of some kilobytes a server.)"""
    try:
        from sglang.srt.managers import load_snapshot
    except ImportError:  # an older release has none
        return
    path_in_shm = load_snapshot.shm_path_for

    def path_in_tmpdir(ipc_name: str) -> str:
        return str(Path(tempfile.gettempdir()) / Path(path_in_shm(ipc_name)).name)

    load_snapshot.shm_path_for = path_in_tmpdir


def meet_on_loopback() -> None:
    """torch's TCPStore listens on all interfaces, whatever address it is given: hand it a socket that is bound to loopback instead.

    Ranks of one server meet there; without this anybody who reaches the machine could write to the store.
    """
    from torch.distributed import TCPStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
    create = rendezvous._create_c10d_store

    def create_on_loopback(hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True) -> Any:
        if rank != 0 or hostname != "127.0.0.1" or rendezvous._torchelastic_use_agent_store():
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        listener = socket.create_server((hostname, port)).detach()
        return TCPStore(
            hostname, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listener, use_libuv=use_libuv
        )

    rendezvous._create_c10d_store = create_on_loopback


die_with_parent()
HAS_CUDA = prepare_imports()
meet_on_loopback()
keep_load_files_in_tmpdir()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    if not HAS_CUDA:
        leave_memory_unpinned()
        fork_children()
    words = ([] if HAS_CUDA else CPU_FLAGS) + sys.argv[1:]
    if key := os.environ.pop(KEY_VARIABLE, None):
        words += ["--api-key", key, "--admin-api-key", key]  # /server_info shows the second one to whoever has the first
    run_server(prepare_server_args(words))
