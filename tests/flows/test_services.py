"""The parts of `make up`: ports, and child processes that are restarted and stopped. test_deploy.py runs all of it."""

import http.server
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.flows.runtime import child_process
from penstock.flows.runtime.child_process import Service, choose_port
from penstock.flows.services import stack


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_taken_port_is_refused_in_one_line(taken_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stack.main(["up", "--store", str(tmp_path), "--mlflow-port", str(taken_port)]) == 2
    error = capsys.readouterr().err
    assert f"port {taken_port} on 127.0.0.1 is taken: give another --mlflow-port" in error
    assert error.count("\n") == 1


def test_taken_default_port_is_replaced_by_a_free_one(taken_port: int) -> None:
    found = choose_port("prefect", None, taken_port)
    assert found != taken_port
    assert choose_port("prefect", found, taken_port) == found


def test_error_of_a_dead_service_shows_the_end_of_its_log(tmp_path: Path) -> None:
    thing = Service(
        "thing",
        [sys.executable, "-c", "print('no such table'); raise SystemExit(3)"],
        tmp_path / "log",
        ready="http://127.0.0.1:9",
    )
    thing.start()
    with pytest.raises(RuntimeError, match=r"thing ended with status 3; .*\n.*no such table"):
        thing.wait_ready(timeout=20)


@pytest.mark.full
def test_stop_ends_grandchildren_that_ignore_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STOP_TIMEOUT", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    thing = Service("thing", [sys.executable, "-c", program], tmp_path / "log")
    thing.start()
    assert thing.process is not None
    deadline = time.monotonic() + 20
    while "up" not in thing.log_tail() and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(thing.process.pid).children(recursive=True)
    assert len(family) == 1
    thing.stop()
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_service_is_restarted_until_max_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MAX_RESTARTS", 2)
    program = "print('began', flush=True); raise SystemExit(3)"
    kept = Service("thing", [sys.executable, "-c", program], tmp_path / "log", _restarts=deque(maxlen=2))
    kept.start()
    num_restarts = 0
    with pytest.raises(RuntimeError, match="thing ended with status 3"):
        while num_restarts < 9:
            assert kept.process is not None
            kept.process.wait()
            num_restarts += kept.restart_if_ended()
    assert num_restarts == 2
    assert kept.log.read_text().count("began") == 3


def test_answers_accepts_4xx_and_rejects_5xx_and_silence(tmp_path: Path) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path[1:]))

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = {
            code: child_process.http_answers(f"http://127.0.0.1:{server.server_port}/{code}")
            for code in (401, 404, 500, 503)
        }
        server.shutdown()
    assert found == {401: True, 404: True, 500: False, 503: False}
    assert not child_process.http_answers(f"http://127.0.0.1:{server.server_port}/")
