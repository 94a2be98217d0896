"""The process of an engine's server: its environment, a port that another process has, adoption, and its death."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.engines.network import reserve_free_port
from penstock.engines.serving import server as server_module
from penstock.engines.serving.server import EngineServer, ServerSpec
from penstock.engines.sglang.backend import SGLangServer
from penstock.storage.errors import EngineError

REMOVED = (
    "DUMPER_SERVER_PORT",  # a port on all interfaces, or a route of the server
    "DUMPER_SOURCE_PATCHER_CONFIG",  # changes SGLang's source
    "SGLANG_GRPC_PORT",  # a second server, without the key
    "SGLANG_RUST_SERVER",  # another HTTP server
    "SGLANG_PORT",
    "SGLANG_BACKUP_PORT_BASE",
    "SGLANG_HOST_IP",
    "SGLANG_ZBAL_BOOTSTRAP_URL",
    "SGLANG_TEST_SCRIPTED_RUNTIME_IPC_ADDR",
    "SGLANG_TEST_RETRACT",  # as all settings of SGLang's tests
)
INHERITED = {"SGLANG_HEALTH_CHECK_TIMEOUT", "SGLANG_WAIT_PORT_TIMEOUT", "SGLANG_OPT_SKIP", "NCCL_DEBUG"}


def test_variables_that_open_a_port_or_run_code_do_not_reach_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []
    launch = lambda command, *, env, **streams: environments.append(env)
    monkeypatch.setattr(server_module, "subprocess", SimpleNamespace(Popen=launch, DEVNULL=None, STDOUT=None))
    for name in (*REMOVED, *INHERITED):
        monkeypatch.setenv(name, "of-the-run")
    SGLangServer(ServerSpec(model_path="model", log_dir=str(tmp_path)))._launch()
    assert {name for name, value in environments[0].items() if value == "of-the-run"} == INHERITED


# Binds as uvicorn does, when the file exists, and prints asyncio's message if the port is taken.
PROGRAM = """
import asyncio, pathlib, sys, time
port, go = int(sys.argv[1]), pathlib.Path(sys.argv[2])
async def answer(reader, writer):
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    await writer.drain()
    writer.close()
async def main():
    while not go.exists():
        await asyncio.sleep(0.01)
    try:
        await asyncio.start_server(answer, "127.0.0.1", port)
    except OSError as error:
        print("ERROR:   ", error, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


class LateServer(SGLangServer):
    go: Path

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-S", "-c", PROGRAM, str(port), str(self.go)]

    def is_ready(self) -> bool:
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return opener.open(self.url(), timeout=1).status == 200
        except OSError:
            return False


@pytest.fixture
def late(tmp_path: Path) -> Iterator[LateServer]:
    """A server that binds when the file `go` exists."""
    server = LateServer(ServerSpec(model_path="model", log_dir=str(tmp_path), start_timeout=3600))
    server.go = tmp_path / "go"
    yield server
    server.stop()


def with_port(server: EngineServer, port: int) -> None:
    server.spec = server.spec.model_copy(update={"port": port})


def take_port_when_launched(server: EngineServer) -> socket.socket:
    """Listen on the server's port once its process runs, then let it bind."""
    taken = socket.socket()

    def take() -> None:
        while not server._port or server._process is None:
            time.sleep(0.01)
        taken.bind(("127.0.0.1", server._port))
        taken.listen()
        server.go.touch()  # type: ignore[attr-defined]

    threading.Thread(target=take, daemon=True).start()
    return taken


def test_fixed_port_that_is_in_use_is_refused_without_a_start(
    late: LateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PORT_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        with_port(late, port := other.getsockname()[1])
        with pytest.raises(EngineError, match=f"port {port}.*--engine-port {port}"):
            late.start()
    assert late._process is None


def test_fixed_port_that_is_freed_in_time_is_used(late: LateServer) -> None:
    with_port(late, reserve_free_port())
    late.go.touch()
    dying = socket.create_server(("127.0.0.1", late.spec.port))
    threading.Timer(0.5, dying.close).start()
    assert late.start() == f"http://127.0.0.1:{late.spec.port}"


def test_fixed_port_taken_while_the_model_loads_is_one_error(late: LateServer) -> None:
    with_port(late, port := reserve_free_port())
    with take_port_when_launched(late), pytest.raises(EngineError, match=f"--engine-port {port}"):
        late.start()
    assert not late.alive()


def test_chosen_port_taken_while_the_model_loads_is_replaced(late: LateServer) -> None:
    with take_port_when_launched(late) as taken:
        url = late.start()
        assert late.is_ready() and int(url.rpartition(":")[2]) != taken.getsockname()[1]


def test_failed_start_is_reported_with_the_log(tmp_path: Path) -> None:
    class FailingServer(LateServer):
        def command(self, port: int) -> list[str]:
            return [sys.executable, "-S", "-c", "import sys; sys.exit('no such model')"]

    server = FailingServer(ServerSpec(model_path="model", log_dir=str(tmp_path)))
    with pytest.raises(RuntimeError, match=r"(?s)failed to start.*exit code 1.*no such model"):
        server.start()
    assert not server.alive()


@pytest.mark.integration
@pytest.mark.full
def test_sglang_that_cannot_bind_its_port_is_noticed(tiny_model: Path, tmp_path: Path) -> None:
    spec = ServerSpec(model_path=str(tiny_model), port=reserve_free_port(), log_dir=str(tmp_path))
    server = SGLangServer(spec)
    server.go = tmp_path / "go"  # type: ignore[attr-defined]
    with take_port_when_launched(server), pytest.raises(EngineError, match=f"--engine-port {spec.port}"):
        server.start()
    assert "bind on address" in next(tmp_path.glob("sglang-0-*.log")).read_text()


SPEC = ServerSpec(model_path="/model")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SGLangServer]:
    server = SGLangServer(SPEC, gpu_ids=("0",), owner="first")
    server._log = tmp_path / "server.log"
    server._log.write_text("".join(f"line {number}\n" for number in range(100)))
    server._process = subprocess.Popen(["sleep", "60"])
    yield server
    server.stop()


def test_a_server_with_an_equal_spec_is_adopted_and_refuses_its_first_owner(server: SGLangServer) -> None:
    assert server.alive("first")
    assert server.adopt("second", SPEC.digest(("0",))) == server.url()
    assert server.alive("second") and server.alive()
    with pytest.raises(RuntimeError, match="another driver"):
        server.alive("first")


def test_a_server_with_another_spec_is_not_adopted(server: SGLangServer) -> None:
    others = [SPEC.model_copy(update=change) for change in ({"args": {"dtype": "float16"}}, {"model_path": "/other"})]
    for digest in [SPEC.digest(("1",)), *(other.digest(("0",)) for other in others)]:
        assert server.adopt("second", digest) is None


def test_a_dead_server_is_not_adopted_and_reports_its_exit_code_and_log_tail(server: SGLangServer) -> None:
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert server.adopt("second", SPEC.digest(("0",))) is None
    report = server.exit_report()
    assert "exit code -9" in report and report.endswith("line 99")
    assert "line 74\n" not in report and "line 75\n" in report
