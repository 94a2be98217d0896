"""Ports that are chosen now and bound later: two runs never get the same one, and a killed run's ports are free."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines import network
from penstock.engines.network import is_free, reserve_free_port, reserve_ports

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
    for _ in range(3):  # the reason: without a listener, this connection succeeds
        with socket.socket() as client:
            client.bind(("127.0.0.1", 0))
            client.connect(client.getsockname())
            assert not is_free(client.getsockname()[1])


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
