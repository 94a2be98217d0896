"""A real SGLang server, on the GPU if there is one: its death, restart and stop, and a scheduler that hangs; and an
engine of two server processes, as on two nodes: tensor parallel 2, one rank in each process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from families import hf_model, logprob_error
from safetensors.torch import load_file
from small_servers import generate_once

from penstock.engines.cluster import Cluster
from penstock.engines.generation import Generation, WeightTransport
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import restart_dead_engines
from penstock.engines.sglang import control
from penstock.engines.sglang.client import SGLangClient

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4 if DEVICE == "cpu" else 0.05  # fp32, bf16; two of the random models differ by 0.9
PROMPT = [2, 9, 12, 16, 14, 21, 1, 3]


def sample(pool: EnginePool) -> list[Generation]:
    return generate_once(pool.urls, PROMPT, {"max_new_tokens": 12, "ignore_eos": True}, n=4)


def worst_difference(model_path: Path, generations: list[Generation]) -> float:
    """Largest difference between the engine's log-probs and Hugging Face's, over all sampled tokens."""
    model = hf_model(model_path)
    return max(logprob_error(model, PROMPT, generation) for generation in generations)


def weights(model_path: Path) -> dict[str, torch.Tensor]:
    return load_file(model_path / "model.safetensors", device=DEVICE)


def test_a_killed_server_is_restarted(engine_pool: EnginePool, tiny_model: Path) -> None:
    assert not restart_dead_engines(engine_pool.replicas)
    old = engine_pool.replicas[0].place().pid
    family = psutil.Process(old).children(recursive=True)
    os.kill(old, signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)
    assert not any(child.is_running() for child in family)
    assert restart_dead_engines(engine_pool.replicas)
    assert [replica.weight_version() for replica in engine_pool.replicas] == ["default"]
    assert worst_difference(tiny_model, sample(engine_pool)) < TOLERANCE


def test_a_hung_scheduler_is_unhealthy_although_the_server_answers(engine_pool: EnginePool) -> None:
    url = engine_pool.urls[0]
    family = psutil.Process(engine_pool.replicas[0].place().pid).children(recursive=True)
    assert control.generates_tokens(url, timeout=30)
    for child in family:
        child.suspend()
    try:
        assert control.weight_version(url, timeout=5)
        assert not control.generates_tokens(url, timeout=3)
    finally:
        for child in family:
            child.resume()
    assert control.generates_tokens(url, timeout=60)


def test_server_dies_with_its_parent(tiny_model: Path, tmp_path: Path) -> None:
    """Also if the parent is killed during the start, before SGLang runs."""
    program = (
        "import signal; from penstock.engines.serving.server import ServerSpec\n"
        "from penstock.engines.sglang.backend import SGLangServer\n"
        f"server = SGLangServer(ServerSpec(model_path={str(tiny_model)!r}, log_dir={str(tmp_path)!r}))\n"
        "server._launch(); print(server._process.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1)
        parent.kill()
    assert not psutil.wait_procs([server], timeout=10)[1]


def test_stop_ends_a_server_that_is_still_starting(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    pool = EnginePool(cluster, ServerSpec(model_path=str(model), log_dir=str(tmp_path)))
    deadline = time.monotonic() + 60
    while not (servers := servers_of(model)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert servers
    pool.stop()
    psutil.wait_procs(servers, timeout=15)
    assert not servers_of(model)


def servers_of(model: Path) -> list[psutil.Process]:
    """Return the processes with the model on their command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(model) in (process.info["cmdline"] or [])]


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
