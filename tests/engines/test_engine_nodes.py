"""A real SGLang engine of two server processes, as on two nodes: tensor parallel 2, one rank in each process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_sglang_server import DEVICE, TOLERANCE, sample, weights, worst_difference

from penstock.engines.cluster import Cluster
from penstock.engines.generation import WeightTransport
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import restart_dead_engines
from penstock.engines.sglang.client import SGLangClient

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pool(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    if cluster.num_gpus == 1:
        pytest.skip("needs two GPUs, or none")
    args = {"dtype": "bfloat16", "mem_fraction_static": 0.3} if cluster.num_gpus else {}
    cores = sorted(os.sched_getaffinity(0))
    spec = ServerSpec(
        model_path=str(tiny_model),
        args=args,
        tensor_parallel=2,
        num_nodes=2,
        # Without it SGLang wants a NUMA node for each rank on CPU.
        env={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
        log_dir=str(tmp_path_factory.mktemp("sglang")),
    )
    pool = EnginePool(cluster, spec)
    yield pool
    pool.stop()


def server_processes() -> list[psutil.Process]:
    """Return the main processes of the engine by node rank."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        words = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
        if "--node-rank" in words and words[0].endswith(("python", "python3")):
            found.setdefault(words[words.index("--node-rank") + 1], process)
    return [found[rank] for rank in sorted(found)]


def test_both_nodes_compute_with_the_published_weights_and_die_together(
    pool: EnginePool, tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    assert worst_difference(tiny_model, sample(pool)) < TOLERANCE
    over_disk = WeightTransport("disk", model_path=str(tiny_model), directory=str(tmp_path))
    transport = over_disk if DEVICE == "cuda" else WeightTransport()
    SGLangClient(pool.urls).update_weights(weights(other_tiny_model).items(), "test/1", transport)
    assert worst_difference(other_tiny_model, sample(pool)) < TOLERANCE
    assert len(pool.places(pool.urls)[pool.urls[0]].nodes) == 2

    first, second = server_processes()
    assert first.pid == pool.replicas[0].place().pid
    os.kill(second.pid, signal.SIGKILL)
    [replica] = pool.replicas
    deadline = time.monotonic() + 120
    while replica.alive():
        assert time.monotonic() < deadline, "the death of the second process was not noticed"
        time.sleep(0.1)
    assert "died (exit code -9)" in replica.exit_report()
    assert restart_dead_engines(pool.replicas)
    assert [replica.place().pid for replica in pool.replicas] != [first.pid] and not first.is_running()
    assert worst_difference(tiny_model, sample(pool)) < TOLERANCE
