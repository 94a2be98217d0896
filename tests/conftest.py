"""Fixtures that start real services once per session: a tiny model, Ray, one SGLang server."""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import setuptools  # noqa: F401  # torch cannot import it after the standard library's distutils, which a test may load first

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # started with `nohup`, programs of the tests would ignore it

if TYPE_CHECKING:
    from penstock.engines.cluster import Cluster
    from penstock.engines.serving.pool import EnginePool
    from penstock.storage.store import Store

# pytest puts this folder first on the import path, where its `engines`, `storage` and so on would hide the real
# packages.
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="penstock-tests-prefect-")  # not the user's database
os.environ.pop("PREFECT_API_URL", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode every process starts 2 s later
sys.dont_write_bytecode = False  # of this process: pytest would rewrite every assertion again, 10 s of each worker
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: Ray and SGLang need the cores too


class Loggers(dict[str, Any]):
    """The loggers of this process. pytest iterates over them at every phase of a test, without a lock, while threads of
    trackers import packages that create loggers: RuntimeError, dictionary changed size during iteration."""

    def values(self) -> list[Any]:  # type: ignore[override]
        return list(super().values())


logging.root.manager.loggerDict = Loggers(logging.root.manager.loggerDict)


# Of `make test-unit`, by processor time: xdist would start the files with the most tests first, and a long file that
# starts last keeps one worker alone.
LONG_FILES = (
    "tests/flows/test_bad_inputs.py",
    "tests/engines/test_megatron_optimizer.py",
    "tests/train/test_adapter_runs.py",
    "tests/rollout/test_stream.py",
    "tests/docs/test_snippets.py",
    "tests/engines/test_megatron_families.py",
    "tests/engines/test_shapes.py",
    "tests/flows/test_bad_kinds.py",
    "tests/flows/test_fork.py",
)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> None:
    """Let xdist keep the order of `pytest_collection_modifyitems`."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with the marker `gpu` where there is none. In a worker of xdist, put long files first, then those with
    the most tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {file: rank for rank, file in enumerate(LONG_FILES)}
        sizes = Counter(map(file_of, items))
        items.sort(key=lambda item: (ranks.get(file_of(item), len(ranks)), -sizes[file_of(item)], file_of(item)))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        for item in gpu_items if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def skip_fsync() -> Iterator[None]:
    """Do not wait for the disk in this process: no test cuts the power, and a store syncs several files per commit.
    Processes that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which fails on a bad descriptor as well
        yield


@pytest.fixture(scope="module", autouse=True)
def freeze_imported_modules() -> None:
    """Exclude the objects of imported modules from garbage collection: Megatron collects garbage at every save and
    load, which takes 0.4 s with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with its character tokenizer, as a Hugging Face directory. Read only."""
    from penstock.flows.commands.demo_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    from penstock.flows.commands.demo_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "other", seed=1)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PREFECT_HOME to copy, with its database, which takes a server 6 s of processor time to create. Read only."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # one for all xdist workers
    home, command = folder / "prefect-home", [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
    with (folder / "prefect-home.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            making = folder / "prefect-home.making"
            subprocess.run(command, env={**os.environ, "PREFECT_HOME": str(making)}, capture_output=True, check=True)
            making.rename(home)
    return home


@pytest.fixture(scope="session")
def prefect_api(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of runs that do not test Prefect: they share one server, which takes 5 s to start."""
    from penstock.flows.runtime.child_process import choose_port
    from penstock.flows.runtime.prefect_api import prefect_server

    home = shutil.copytree(prefect_home, tmp_path_factory.mktemp("prefect") / "home")
    server = prefect_server(choose_port("prefect", 0, 0))
    server.environment["PREFECT_HOME"], server.log = str(home), home / "server.log"
    server.start()
    server.wait_ready()
    login = {name: server.environment[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    yield {**os.environ, "PREFECT_HOME": str(home), **login}
    server.stop()


def num_event_loops() -> int:
    """Return the number of event loops that this process has open; a process group of gloo has one."""
    return sum(os.path.realpath(file).endswith("[eventpoll]") for file in Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Megatron process group of one rank: this process."""
    import torch

    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel  # isort: split
    from megatron.core.distributed import DistributedDataParallel

    gc.freeze()  # Megatron's modules
    threads, num_loops = torch.get_num_threads(), num_event_loops()
    init_parallel(0, 1, f"file://{tmp_path_factory.mktemp('world')}/meet")
    yield
    shutdown_parallel()
    torch.set_num_threads(threads)
    # The hooks of its parameters hold a model where the garbage collector does not see it, and the model holds the
    # process groups, which have 84 file descriptors.
    for model in gc.get_objects():
        if type(model) is DistributedDataParallel:
            vars(model).clear()
    gc.collect()
    assert num_event_loops() < num_loops + 10, "process groups are still open"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ray cluster of the session. A process can have only one, so a test of a whole flow runs it in a subprocess."""
    from penstock.engines.cluster import Cluster

    tmp_path_factory.getbasetemp()  # set before Cluster.start changes the TMPDIR of this process
    cluster = Cluster.start(namespace="penstock-tests", num_cpus=4)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def engine_pool(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """One real SGLang server of the tiny model; starting it takes 10 s or more. Tests publish the weights they need
    themselves."""
    from penstock.engines.serving.pool import EnginePool
    from penstock.engines.serving.server import ServerSpec

    args = {"dtype": "bfloat16", "mem_fraction_static": 0.3} if cluster.num_gpus else {}
    log_dir = str(tmp_path_factory.mktemp("sglang"))
    pool = EnginePool(cluster, ServerSpec(model_path=str(tiny_model), args=args, log_dir=log_dir))
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Return fsspec options of a real S3 server on this machine with the bucket `bucket`."""
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    no_proxy = {"proxies": {}}  # it could not reach this machine's loopback
    options = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test", "config_kwargs": no_proxy}
    S3FileSystem(**options).call_s3("create_bucket", Bucket="bucket")
    yield options
    server.stop()


@pytest.fixture
def object_store(s3_options: dict[str, Any], tmp_path: Path) -> Store:
    """Return an empty store behind a real S3 API."""
    from penstock.storage.store import Store

    return Store(f"s3://bucket/{tmp_path.name}", s3_options)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A separate file system of one megabyte, or of the size in an indirect parameter."""
    place, size = tmp_path / "small", getattr(request, "param", "1m")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def fill() -> Callable[[Path], Path]:
    """A function that fills a file system with a file, which it returns."""

    def take(place: Path) -> Path:
        filler = place / "filler"
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    return filler

    return take
