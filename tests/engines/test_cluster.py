"""Ray: calls in a process of their own, and who gets which GPU."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from engines.cluster import cpu_count, cpu_threads, free_port

if TYPE_CHECKING:
    from engines.cluster import Cluster


def test_free_port_can_be_bound() -> None:
    ports = {free_port() for _ in range(5)} | {free_port(highest=20_100)}
    assert min(ports) <= 20_100
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_thread_budget() -> None:
    assert cpu_threads(3, sharers=8) == 3
    assert cpu_threads(None) == cpu_count()
    assert cpu_threads(None, sharers=10_000) == 1


@pytest.mark.integration
def test_run_in_another_process(cluster: Cluster) -> None:
    def where(offset: int) -> tuple[int, str | None]:
        return os.getpid() + offset, os.environ.get("OMP_NUM_THREADS")

    def wait() -> None:
        time.sleep(60)

    def refuse() -> None:
        raise ValueError("found 3 -> needed 4")

    pid, threads = cluster.run(where, 0, env={"OMP_NUM_THREADS": "2"}, timeout=60)
    assert pid != os.getpid()
    assert threads == "2"
    with pytest.raises(ValueError, match=r"^found 3 -> needed 4$"):
        cluster.run(refuse)
    with pytest.raises(TimeoutError, match="wait took longer than 1 s"):
        cluster.run(wait, timeout=1)


@pytest.mark.integration
def test_placement_on_gpus() -> None:
    """On GPUs that exist only in Ray's accounting: trainer ranks and engines share them, or lie behind each other."""
    program = """
import ray
from engines.cluster import Cluster

class Rank:
    def gpu(self):
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

cluster = Cluster.start(num_cpus=2, num_gpus=4)
ranks, engines = cluster.place(2), cluster.place(1, gpus_each=2)
assert [slot.gpu_ids for slot in ranks] == [("0",), ("1",)], ranks
assert [slot.gpu_ids for slot in engines] == [("0", "1")], engines
actors = [ray.remote(Rank).options(**slot.options).remote() for slot in [*ranks, *engines]]
assert ray.get([actor.gpu.remote() for actor in actors], timeout=60) == [["0"], ["1"], ["0"]]
behind = cluster.place(1, gpus_each=2, offset=2)
assert behind[0].gpu_ids == ("2", "3"), behind
try:
    cluster.place(5)
except ValueError as error:
    print(error)
cluster.stop()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    assert "the cluster has 4 GPUs, 5 are needed" in result.stdout


@pytest.mark.integration
def test_everything_of_our_own_ray_listens_on_loopback_alone(cluster: Cluster) -> None:
    cluster.run(cpu_count)  # a worker listens too
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [
        (process.name(), port.laddr.ip) for process in family for port in process.net_connections() if port.status == "LISTEN"
    ]
    assert {name for name, _ in listening} >= {"gcs_server", "raylet"}
    assert not [found for found in listening if not ipaddress.ip_address(found[1].removeprefix("::ffff:")).is_loopback], listening
