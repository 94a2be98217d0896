"""Addresses and ports: where processes listen, and that two runs never get the same port, also not after a kill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from small_servers import JsonServer

from penstock.engines import network
from penstock.engines.network import is_free, reserve_free_port, reserve_ports
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import KEY_VARIABLE, ServerSpec
from penstock.engines.sglang import control
from penstock.engines.sglang.backend import LAUNCHER, SGLangServer
from penstock.storage.errors import EngineError


def test_an_address_belongs_to_the_interface_whose_network_contains_it() -> None:
    assert network.node_address("lo") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == network.interface_of("127.3.2.1") == "lo"
    assert network.interface_of("203.0.113.7") is None


def test_nccl_and_gloo_use_exactly_the_given_interface() -> None:
    exact = {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}  # "=": eth1, but not eth10
    assert network.socket_environment("eth1") == exact and network.socket_environment(None) == {}


def test_an_unknown_interface_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(EngineError, match=r"--network-interface ib7: .* it has .*lo"):
        network.node_address("ib7")


SPAN = ServerSpec(model_path="/model", tensor_parallel=4, num_nodes=2, several_nodes=True, network_interface="lo")


def flags(server: SGLangServer) -> dict[str, str]:
    words = server.command(30_000)[2:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_each_node_of_an_engine_gets_its_rank_and_one_rendezvous() -> None:
    servers = [SGLangServer(SPAN, gpu_ids=("0", "1"), node_rank=rank) for rank in range(2)]
    rendezvous = servers[0].choose_rendezvous()
    assert rendezvous.startswith("127.0.0.1:")  # of the interface lo
    for rank, server in enumerate(servers):
        server.rendezvous = rendezvous
        found = flags(server)
        assert (found["--nnodes"], found["--node-rank"], found["--dist-init-addr"]) == ("2", str(rank), rendezvous)
        assert found["--tp-size"] == "4" and "--nccl-port" not in found


def test_an_engine_on_one_node_has_no_rendezvous_address() -> None:
    found = flags(SGLangServer(ServerSpec(model_path="/model")))
    assert found["--host"] == "127.0.0.1" and not {"--nnodes", "--node-rank", "--dist-init-addr"} & set(found)


@pytest.mark.full
def test_a_server_without_a_key_does_not_start(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    environment["PENSTOCK_SERVER_PARENT"] = str(os.getpid())
    result = subprocess.run(
        [sys.executable, str(LAUNCHER), "--model-path", str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert result.returncode and KEY_VARIABLE in result.stderr, result.stderr[-2000:]


def test_every_server_has_a_key_of_its_own() -> None:
    spec = ServerSpec(model_path="/model", several_nodes=True)
    keys = {SGLangServer(spec, index).key for index in range(3)}
    assert len(keys) == 3 and all(len(key) == 64 for key in keys)
    assert len(SGLangServer(spec.model_copy(update={"args": {"api_key": ""}})).key) == 64


def test_requests_with_a_key_do_not_go_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, proxied = JsonServer(lambda path: {"weight_version": "run/1"}), list[str]()
    proxy = JsonServer(lambda path: proxied.append(path) or {})
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert control.weight_version(engine.url) == "run/1" and proxied == []
    for server in (engine, proxy):
        server.die()


CHOOSE = """
import sys
from penstock.engines.network import reserve_free_port
print(*(reserve_free_port(20_400) for _ in range(60)), flush=True)
sys.stdin.read()
"""


def chooser() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHOOSE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_parallel_runs_get_different_ports_and_a_killed_run_frees_its_own() -> None:
    runs = [chooser() for _ in range(3)]
    try:
        chosen = [[int(word) for word in run.stdout.readline().split()] for run in runs if run.stdout]
        everything = [port for ports in chosen for port in ports]
        assert len(everything) == 180 == len(set(everything)), "without reservations 180 of 401 numbers collide"
        assert not reserve_ports(chosen[0][:1])
        runs[0].kill()
        runs[0].wait()
        assert reserve_ports(chosen[0][:1])
    finally:
        for run in runs:
            run.kill()
            run.communicate()


def test_a_chosen_port_can_be_bound_and_is_not_chosen_again() -> None:
    port = reserve_free_port()
    assert not reserve_ports([port])
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not is_free(port)


def test_waiting_client_cannot_take_the_port_of_the_server_that_it_waits_for() -> None:
    """A client connects to itself if the kernel gives it the port that it tries to reach."""
    assert all(20_000 <= reserve_free_port() < int(network.OUTGOING_PORTS.read_text().split()[0]) for _ in range(50))


def test_a_port_whose_derived_port_is_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = other.getsockname()[1]
        assert not reserve_ports([free, taken])
        assert reserve_ports([free]), "a refused reservation reserves nothing"
    assert not is_free(70_000)
    monkeypatch.setattr(network, "is_free", lambda port, host: False)
    with pytest.raises(RuntimeError, match="100 ports"):
        reserve_free_port()


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


@pytest.mark.integration
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


@pytest.mark.integration
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
