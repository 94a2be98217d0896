"""The addresses at which processes listen, and which are never reachable without a key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_servers import JsonServer

from penstock.engines import network
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
