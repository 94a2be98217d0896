"""Script that runs one SGLang server: `python launch.py <sglang flags>`, with the server's Python interpreter.

The interpreter may differ from the trainer's, so the script does not import Penstock. Before it runs SGLang's own entry
point, the script
- requests SIGKILL for the server and its child processes when the process that started the script dies;
- adds the folder `<sys.prefix>/sglang-site` to the import path if it exists (torchvision is installed there, because in
  site-packages it breaks transformers on CPU);
- imports the shims of `cpu_site/` on a machine without CUDA;
- applies small patches, one function each.

The steps that child processes need, too, are at top level: with CUDA, SGLang spawns its child processes, which import
this module again; without CUDA they are forked.
"""

import ctypes
import faulthandler
import gc
import importlib.util
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARENT_VARIABLE = "PENSTOCK_SERVER_PARENT"  # pid of the process that started this one
KEY_VARIABLE = "PENSTOCK_SERVER_KEY"
PR_SET_PDEATHSIG = 1
# Packages that SGLang and transformers import if they are installed, for features that a server does not use.
NOT_NEEDED = ("sklearn", "megatron")
# The user's flags come after these on the command line and override them.
CPU_FLAGS = [
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--lora-backend", "torch_native"),
    "--sleep-on-idle",  # otherwise an idle server uses a whole core
    *("--max-total-tokens", "16384"),  # otherwise SGLang allocates most of the machine's memory for the KV cache
]


def die_with_parent() -> None:
    """Request SIGKILL for this process when its parent dies (PR_SET_PDEATHSIG); exit if the parent is already dead.

    Called in the server's main process and in each of SGLang's child processes.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"exiting: the process {parent} that started this server has died")
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the child processes of this process


def print_stacks_on_signal() -> None:
    """Make this process and its forks append the Python stacks of their threads to a file in TMPDIR when they get
    SIGUSR2, as `engines/scratch.py` does for the trainer's processes."""
    directory = Path(tempfile.gettempdir()) / "stacks"
    with suppress(OSError):  # a full disk, or a TMPDIR that another user shares: the server also works without this
        directory.mkdir(exist_ok=True)
        faulthandler.register(signal.SIGUSR2, (directory / f"{os.getpid()}.txt").open("a"))


def prepare_imports() -> bool:
    """Set the import path and, on a machine without CUDA, import the CPU shims, so that SGLang can be imported.
    Return whether the machine has CUDA."""
    # Remove this script's folder, which Python adds: its modules must not shadow others.
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != HERE]
    side = Path(sys.prefix) / "sglang-site"
    if side.is_dir() and str(side) not in sys.path:
        sys.path.append(str(side))
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # Python's way to mark a module as missing

    import torch

    # Bytes for the embeddings of images that later requests use again. SGLang keeps none for Qwen3-VL on a Hopper GPU.
    os.environ.setdefault("SGLANG_VLM_CACHE_SIZE_MB", "256")
    if torch.cuda.is_available():
        # SGLang refuses GPUs with unequal free memory, but a trainer rank may be allocating on one of them.
        os.environ.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
        return True
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "penstock_cpu_models")
    # torch.compile of an MoE router takes 15 s, needs a C++ compiler, and does not speed up a small model.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    shims = str(HERE / "cpu_site")
    if shims not in sys.path:
        sys.path.insert(0, shims)
    import sglang_cpu_shim  # noqa: F401

    return False


def import_only_needed_models(argv: list[str]) -> None:
    """Make SGLang import only the files that define the model's architecture, instead of all its 200 model files. With
    a draft model (--speculative-*), which may have another architecture, all files are imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None or any(argument.startswith("--speculative") for argument in argv):
        return
    config = Path(argv[argv.index("--model-path") + 1]) / "config.json"
    classes = [f"\nclass {name}".encode() for name in json.loads(config.read_bytes())["architectures"]]
    files = {path.stem: path.read_bytes() for path in Path(spec.origin).parent.glob("srt/models/*.py")}
    needed = {name for name, source in files.items() if any(line in source for line in classes)}
    if needed:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(files.keys() - needed)))


def make_sglang_fork() -> None:
    """Make SGLang fork its child processes instead of spawning them, after importing the modules that they need.

    This reduces the CPU time of a start from 23 to 8 s, and the memory of SGLang's three processes to a fifth. Forking
    is not possible with CUDA, which cannot be used after a fork.
    """
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from sglang.srt.entrypoints import engine

    set_envs = engine._set_envs_and_config

    def set_envs_and_fork(server_args: object) -> None:
        set_envs(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_fork
    os.register_at_fork(after_in_child=die_with_parent)
    gc.freeze()  # otherwise garbage collection writes to all pages that are shared with the children


def import_only_needed_processor() -> None:
    """Make SGLang import the image processor of Qwen-VL only, instead of the processors and models of all its 80
    multimodal architectures, most of which cannot be imported on a machine without CUDA."""
    from sglang.srt.managers import multimodal_processor

    def import_qwen_vl(package: str, overwrite: bool = False) -> None:
        processor = importlib.import_module(f"{package}.qwen_vl").QwenVLImageProcessor
        multimodal_processor.PROCESSOR_MAPPING.update(dict.fromkeys(processor.models, processor))

    multimodal_processor.import_processors = import_qwen_vl


def disable_pinned_memory() -> None:
    """Make SGLang allocate the host buffer of routed experts, and the indices of LoRA batches, in unpinned memory,
    because pinned memory needs CUDA: without this patch the server cannot start on a machine without CUDA."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda *args, **options: common.alloc_with_host_register(
        *args, **{**options, "pin_memory": False}
    )
    for name in ("tensor", "zeros", "empty"):
        create = getattr(torch, name)
        setattr(torch, name, lambda *args, create=create, pin_memory=False, **options: create(*args, **options))
    tensor_class: Any = torch.Tensor
    tensor_class.pin_memory = lambda self, device=None: self


def write_load_snapshots_to_tmpdir() -> None:
    """Make SGLang write its load-snapshot files (counters of running requests) to TMPDIR instead of /dev/shm.

    SGLang 0.5.21 memory-maps a file of some kilobytes per server in /dev/shm, which a killed server leaves behind. The
    parent process removes TMPDIR when it ends.
    """
    try:
        from sglang.srt.managers import load_snapshot
    except ImportError:  # SGLang before 0.5.21 does not write load snapshots
        return
    path_in_shm = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda ipc_name: str(Path(tempfile.gettempdir()) / Path(path_in_shm(ipc_name)).name)


def bind_rendezvous_to_its_address() -> None:
    """Make torch's TCPStore, the rendezvous of the server's ranks, listen on its `hostname` only: loopback, or the
    address of the node if the server spans nodes.

    Unpatched, TCPStore listens on all interfaces for any `hostname`, so every host in the network could write to the
    store.
    """
    from torch.distributed import TCPStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
    create = rendezvous._create_c10d_store

    def create_on_address(
        hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
    ) -> Any:
        if rank != 0 or rendezvous._torchelastic_use_agent_store():
            return create(hostname, port, rank, world_size, timeout, use_libuv)
        family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
        listener = socket.create_server((hostname, port), family=family).detach()
        return TCPStore(
            hostname, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listener, use_libuv=use_libuv
        )

    rendezvous._create_c10d_store = create_on_address


def separate_prefixes_by_weights() -> None:
    """Make SGLang's scheduler use keys, values and embeddings of images again only with the weights that computed them.

    A weight update in place keeps running requests and thus the prefix cache (docs/design/0025). So the key of every
    cache entry begins with the number of weight loads of this process. A request that was running during a load inserts
    nothing, because old and new weights computed its keys and values. Every load discards the embeddings of images.
    """
    try:
        import sglang.srt.utils.weight_versions  # noqa: F401
    except ImportError:  # SGLang before 0.5.21: Penstock never updates it in place, and every update empties the cache
        return
    from sglang.srt.managers import mm_schedule
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    num_loads = 0
    load: Any = SchedulerWeightUpdaterManager._observe_weight_load  # entered by all four routes that load weights
    match: Any = Req.init_next_round_input
    insert: Any = UnifiedRadixCache.insert_req
    insert_unfinished: Any = UnifiedRadixCache.cache_unfinished_req

    def load_and_count(updater: Any, source: str) -> Any:
        nonlocal num_loads
        num_loads += 1
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()
        return load(updater, source)

    def match_and_note_weights(req: Any, *args: Any, **options: Any) -> None:
        if not req.kv.holds_kv:
            req.computed_with = num_loads
        match(req, *args, **options)

    def insert_if_unmixed(cache: Any, req: Any, **options: Any) -> None:
        if req.computed_with == num_loads:
            insert(cache, req, **options)

    def insert_unfinished_if_unmixed(cache: Any, req: Any, **options: Any) -> None:
        if req.computed_with == num_loads:
            insert_unfinished(cache, req, **options)
        else:
            cache.advance_unpublished_req(req, **options)

    SchedulerWeightUpdaterManager._observe_weight_load = load_and_count
    Req.computed_with = -1  # value of `num_loads` when the request's first key was computed; -1: no key yet
    Req.extra_key = property(
        lambda req: f"{num_loads}:{req.client_key or ''}", lambda req, key: setattr(req, "client_key", key)
    )
    Req.init_next_round_input = match_and_note_weights
    UnifiedRadixCache.insert_req = insert_if_unmixed
    UnifiedRadixCache.cache_unfinished_req = insert_unfinished_if_unmixed


die_with_parent()
print_stacks_on_signal()
HAS_CUDA = prepare_imports()
bind_rendezvous_to_its_address()
write_load_snapshots_to_tmpdir()
if __name__ != "__main__":  # one of SGLang's child processes
    separate_prefixes_by_weights()

if __name__ == "__main__":
    if HAS_CUDA:
        import_only_needed_models(sys.argv)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    if not HAS_CUDA:
        disable_pinned_memory()
        import_only_needed_processor()
        separate_prefixes_by_weights()
        make_sglang_fork()
    argv = ([] if HAS_CUDA else CPU_FLAGS) + sys.argv[1:]
    key = os.environ.pop(KEY_VARIABLE, "")
    # One key for both: /server_info shows the admin key to every client that has the API key.
    args = prepare_server_args([*argv, "--api-key", key, "--admin-api-key", key])  # with --help the process exits here
    if not key:
        sys.exit(f"{KEY_VARIABLE} is not set: a server needs an API key, because its control routes execute code")
    try:
        run_server(args)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # an ordinary exit would wait for SGLang's child processes, which run until this one ends
