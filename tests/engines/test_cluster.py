"""Ray: its start, calls in other processes, placement on GPUs, and the death of our own Ray."""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from penstock_command import HANG

import penstock.engines.cluster
from penstock.engines import local_ray
from penstock.engines.backends import engine_backend
from penstock.engines.cluster import (
    HTTP2_HELLO,
    SETTINGS,
    Cluster,
    check_speaks_http2,
    cpu_count,
    cpu_threads_per_process,
)
from penstock.engines.local_ray import START_TRIES, ClusterLost, start_ray
from penstock.engines.placement import Slot
from penstock.engines.serving.replica import RayReplica
from penstock.engines.serving.server import ServerSpec


class ScriptedNode:
    """Ray's record of its processes: all are alive in the first `looks` checks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def dead_processes(self) -> list[str]:
        self.looks -= 1
        return [] if self.looks >= 0 else ["raylet"]


@pytest.fixture
def silent_ray(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make Ray never answer. Returns the list of timeouts, in seconds, which is the clock, too."""
    limits: list[float] = []

    def wait(calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        limits.append(timeout)
        return [], calls

    # Not the real one: whether Ray asks for a token is decided at its import, and later tests of this process start a
    # Ray with one.
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(penstock.engines.cluster, "time", SimpleNamespace(monotonic=lambda: sum(limits)))
    return limits


@pytest.mark.parametrize("timeout", [None, 100.0, 0.1, 0.0])
def test_wait_raises_cluster_lost_when_the_local_ray_dies(silent_ray: list[float], timeout: float | None) -> None:
    cluster = Cluster(node=ScriptedNode(looks=7))
    with pytest.raises(ClusterLost) as lost:
        for _ in range(1000):
            cluster.wait(["a call"], timeout)
    assert lost.value.code == "cluster-lost"
    assert len(silent_ray) <= 7


def test_a_wait_on_a_live_ray_ends_at_its_timeout(silent_ray: list[float]) -> None:
    cluster = Cluster(node=ScriptedNode(looks=float("inf")))
    assert cluster.wait(["a call"], timeout=3.2) == ([], ["a call"])
    assert sum(silent_ray) == pytest.approx(3.2)


def test_a_dead_local_ray_is_never_called_again(silent_ray: list[float]) -> None:
    node = ScriptedNode(looks=0)
    cluster = Cluster(node=node)
    assert not cluster.alive()
    node.looks = 1000  # the processes of the next Ray of this process
    assert not cluster.alive()
    for use in (lambda: cluster.wait(["a call"]), lambda: cluster.get("a call"), lambda: cluster.call_ray(list)):
        with pytest.raises(ClusterLost):
            use()
    assert not silent_ray


def test_a_call_that_never_returns_is_abandoned_when_the_local_ray_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.engines.cluster, "POLL_SECONDS", 0.01)
    cluster, never = Cluster(node=ScriptedNode(looks=5)), threading.Event()
    with pytest.raises(ClusterLost):
        cluster.call_ray(never.wait)
    never.set()


def test_call_returns_or_raises_like_the_function() -> None:
    cluster = Cluster(node=ScriptedNode(looks=float("inf")))
    assert cluster.call_ray(max, 3, 4) == 4
    for error in (TimeoutError("of the function"), ValueError("wrong")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            cluster.call_ray(fail)


def test_engine_start_raises_cluster_lost_when_the_local_ray_dies(
    silent_ray: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted engine starts, our Ray dies, and the wait must not last for the whole start timeout."""
    actor = SimpleNamespace(start=SimpleNamespace(remote=lambda: "the start"))
    actor_class = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *args: actor))
    monkeypatch.setattr(sys.modules["ray"], "remote", lambda cls: actor_class, raising=False)
    cluster = Cluster(node=ScriptedNode(looks=20))
    spec = ServerSpec(model_path="/model", start_timeout=900)
    engine = RayReplica(cluster, spec, 0, lambda: [Slot()], "owner", engine_backend())
    with pytest.raises(ClusterLost):
        engine.wait_for_url()
    assert sum(silent_ray) < 20


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def answer_with(listener: socket.socket, data: bytes) -> threading.Thread:
    """Accept one connection in a thread, read what a gRPC client sends first, and answer with `data`."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received = connection.recv(len(HTTP2_HELLO), socket.MSG_WAITALL)
            assert received.startswith(b"PRI * HTTP/2.0")
            connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_address_where_nothing_listens_or_answers_is_not_ray(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.engines.cluster, "ANSWER_SECONDS", 0.05)
    with pytest.raises(ConnectionError, match=r"does not answer in 0\.05 s"):
        check_speaks_http2(*listener.getsockname())
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # reserved, but not listening
        host, port = bound.getsockname()
        with pytest.raises(ConnectionError, match=rf"^127\.0\.0\.1:{port}: Connection refused$"):
            check_speaks_http2(host, port)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"-ER"])
def test_server_of_another_protocol_is_not_ray(listener: socket.socket, answer: bytes) -> None:
    server = answer_with(listener, answer)
    with pytest.raises(ConnectionError, match="is not a Ray cluster"):
        check_speaks_http2(*listener.getsockname())
    server.join()


def test_http2_server_may_be_ray(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    server = answer_with(listener, bytes(3) + SETTINGS + bytes(5))
    check_speaks_http2(*listener.getsockname())
    server.join()
    monkeypatch.setenv("RAY_USE_TLS", "1")  # only the connection is checked
    check_speaks_http2(*listener.getsockname())


@pytest.mark.integration
def test_start_at_a_foreign_address_fails_with_one_error() -> None:
    """`auto` takes the address from RAY_ADDRESS here; Ray alone would try for minutes."""
    with socket.socket() as foreign:
        foreign.bind(("", 0))  # Ray replaces 127.0.0.1 by the machine's address
        foreign.listen()
        address = f"127.0.0.1:{foreign.getsockname()[1]}"
        program = (
            "import sys; from penstock.engines import cluster; cluster.ANSWER_SECONDS = 1.0\n"
            "try: cluster.Cluster.start('auto')\n"
            "except cluster.EngineError as error: sys.exit(str(error))"
        )
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=HANG,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_ADDRESS": address},
        )
    assert result.returncode == 1 and "no Ray cluster answers at 'auto'" in result.stderr, result.stderr
    assert "does not answer" in result.stderr and "--ray-address" in result.stderr and "Traceback" not in result.stderr


def test_cpu_threads_are_as_configured_or_an_even_share() -> None:
    assert cpu_threads_per_process(3, num_processes=8) == 3
    assert cpu_threads_per_process(None) == cpu_count()
    assert cpu_threads_per_process(None, num_processes=10_000) == 1


@pytest.mark.integration
def test_run_calls_in_another_process(cluster: Cluster) -> None:
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
    with pytest.raises(TimeoutError, match=r"wait .*1 s"):
        cluster.run(wait, timeout=1)


@pytest.mark.integration
def test_death_of_a_worker_during_a_task_is_logged_not_printed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray

    @ray.remote(max_retries=0, num_cpus=0)
    def die() -> None:
        os._exit(1)

    with caplog.at_level(logging.DEBUG, "penstock.engines.local_ray"):
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            cluster.get(die.remote())
        deadline = time.monotonic() + 60
        while not (messages := [record for record in caplog.records if "A worker died" in record.message]):
            assert time.monotonic() < deadline, "Ray sends no message"
            time.sleep(0.05)
    assert {record.levelname for record in messages} == {"DEBUG"}
    assert "worker died" not in capsys.readouterr().out


def test_workers_of_the_local_ray_have_normal_priority_unless_the_user_set_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(penstock.engines.cluster, "own_temp_directory", lambda: None)
    started: list[str | None] = []
    name = "RAY_worker_niceness"
    monkeypatch.setattr(penstock.engines.cluster, "import_ray", lambda: started.append(os.environ.get(name)))
    for given in ({}, {name: "7"}):
        monkeypatch.setattr(os, "environ", {**given})
        penstock.engines.cluster.import_ray_with_settings(is_local=True)
    assert started == ["0", "7"]


@pytest.mark.integration
def test_placed_processes_share_gpus_or_use_the_next_ones() -> None:
    """On GPUs that exist only in Ray's accounting."""
    program = """
import signal
from penstock.engines.cluster import Cluster

class Rank:
    def gpu(self):
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

def stop(number, frame): pass
signal.signal(signal.SIGTERM, stop)
cluster = Cluster.start(num_cpus=2, num_gpus=4)
import ray  # after the start, which sets the token that Ray reads when it is imported
assert signal.getsignal(signal.SIGTERM) is stop, "ray.init replaced the handler of SIGTERM"
ranks, engines = cluster.place_processes(2), cluster.place_processes(1, gpus_per_process=2)
assert [slot.gpu_ids for slot in ranks] == [("0",), ("1",)], ranks
assert [slot.gpu_ids for slot in engines] == [("0", "1")], engines
actors = [ray.remote(Rank).options(**slot.options).remote() for slot in [*ranks, *engines]]
assert ray.get([actor.gpu.remote() for actor in actors], timeout=60) == [["0"], ["1"], ["0"]]
behind = cluster.place_processes(1, gpus_per_process=2, first_gpu=2)
assert behind[0].gpu_ids == ("2", "3"), behind
try:
    cluster.place_processes(5)
except ValueError as error:
    print(error)
cluster.stop()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2]
    )
    assert result.returncode == 0, result.stderr
    assert "the cluster has 4 GPUs, but the run needs 5" in result.stdout


@pytest.mark.integration
def test_local_ray_listens_on_loopback_only_and_serves_nothing_over_http_without_its_token(cluster: Cluster) -> None:
    """Its metrics, which ask for no token, name every process and its memory."""
    cluster.run(cpu_count)  # a worker listens too
    children = psutil.Process().children(recursive=True)
    family = [psutil.Process(), *(child for child in children if is_of_ray(child))]  # not the servers of other tests
    listening = [(process.name(), address) for process in family for address in listening_addresses(process)]
    assert {name for name, _ in listening} >= {"gcs_server", "raylet"}
    assert all(ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for _, (ip, _) in listening), listening
    own = {address.port for address in listening_addresses(family[0])}
    ports = {address.port for _, address in listening} - own
    paths = ("/", "/metrics", "/api/v0/logs", "/logs/index")
    urls = [f"http://127.0.0.1:{port}{path}" for port in ports for path in paths]
    with ThreadPoolExecutor(len(urls)) as pool:  # ports that speak gRPC do not answer until the timeout
        assert not [url for url, status in zip(urls, pool.map(http_status, urls), strict=True) if status]


def is_of_ray(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it ends
        return any(part in word for word in process.cmdline() for part in ("/ray/", "ray::"))
    return False


def listening_addresses(process: psutil.Process) -> list[Any]:
    with suppress(psutil.NoSuchProcess, FileNotFoundError):  # it ends
        return [each.laddr for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    return []


def http_status(url: str) -> int | None:
    """Return the status of a page, or None if there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError, HTTPException):  # HTTP errors, and ports that speak gRPC
        return opener.open(url, timeout=10).status
    return None


@pytest.fixture
def half_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[subprocess.Popen[bytes]]]:
    """Make the first calls of `ray.init` fail as if the raylet was killed: the control service is left running."""
    gcs_server = Path(shutil.copy(shutil.which("sleep") or "", tmp_path / "gcs_server"))

    def script(num_failures: int) -> list[subprocess.Popen[bytes]]:
        started: list[subprocess.Popen[bytes]] = []

        def init(**options: Any) -> None:
            if options["num_cpus"] < 0:
                raise ValueError("num_cpus must be positive")
            if len(started) < num_failures:
                started.append(subprocess.Popen([gcs_server, "60"]))
                raise Exception("The current node timed out during startup.")

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: None))  # see `silent_ray`
        monkeypatch.setattr(local_ray, "connect_to_ray", init)
        monkeypatch.setattr(local_ray, "_patched_ray", nullcontext)
        monkeypatch.setattr(local_ray, "_ray_directory", lambda: str(tmp_path))
        return started

    return script


def test_start_ray_retries_after_a_process_died(half_started: Callable[[int], list[Any]]) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        left = half_started(START_TRIES - 1)
        start_ray(num_cpus=1)
        assert len(left) == START_TRIES - 1
        assert [process.wait(10) for process in left] == [-9] * len(left), "the half-started ones were ended"
        assert psutil.pid_exists(other.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_start_ray_raises_cluster_lost_after_its_tries_and_other_errors_at_once(
    half_started: Callable[[int], list[Any]],
) -> None:
    left = half_started(100)
    with pytest.raises(ClusterLost, match=r"3 tries.*timed out during startup"):
        start_ray(num_cpus=1)
    assert len(left) == START_TRIES
    for process in left:
        process.wait(10)
    with pytest.raises(ValueError, match="num_cpus"):
        start_ray(num_cpus=-1)  # not retried
