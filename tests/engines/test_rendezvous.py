"""The rendezvous of ranks: torch's store listens on one address, on a port that is bound as soon as it is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.engines.serving.pool import EnginePool

pytestmark = pytest.mark.integration
RANK = """
import sys, psutil, torch.distributed as dist
from datetime import timedelta
from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel
from penstock.engines.network import listen_at
rank, address = int(sys.argv[1]), sys.argv[2]
listener = listen_at("127.0.0.1") if rank == 0 else None
if listener is not None:
    address = "tcp://127.0.0.1:%d" % listener.getsockname()[1]
    print(address, flush=True)
init_parallel(rank, 2, listener or address, timeout=timedelta(seconds=100), backend="gloo")
dist.barrier()
print(*sorted({c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}), flush=True)
dist.barrier()
shutdown_parallel()
"""


def test_the_rendezvous_listens_on_loopback_only() -> None:
    def rank(number: int, address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK, str(number), address]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], env=environment
        )

    ranks = [rank(0, "")]
    try:
        assert ranks[0].stdout is not None
        ranks.append(rank(1, ranks[0].stdout.readline().strip()))
        for process in ranks:
            out, _ = process.communicate(timeout=200)
            assert process.returncode == 0 and out.split() == ["127.0.0.1"]
    finally:
        for process in ranks:
            process.kill()


def test_an_engine_listens_on_loopback_only(engine_pool: EnginePool) -> None:
    assert engine_pool.urls
    server = psutil.Process(engine_pool.replicas[0].place().pid)
    family = [server, *server.children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in family
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    }
    assert listening == {"127.0.0.1"}
    mapped = {area.path for process in family for area in process.memory_maps()}
    assert not any(path.startswith("/dev/shm/sglang_loads_") for path in mapped), (
        "a killed engine would leave it behind"
    )
