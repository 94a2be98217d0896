"""`make up`, piece by piece: ports, and child processes that are kept alive and stopped. test_deploy.py runs all of it."""

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

from flows import service, services
from flows.service import Service, choose_port


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_is_one_sentence(taken_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert services.main(["up", "--store", str(tmp_path), "--mlflow-port", str(taken_port)]) == 2
    error = capsys.readouterr().err
    assert f"port {taken_port} on 127.0.0.1 is taken: give --mlflow-port another one" in error
    assert error.count("\n") == 1


def test_a_port_that_nobody_asked_for_is_replaced(taken_port: int) -> None:
    found = choose_port("prefect", None, taken_port)
    assert found != taken_port
    assert choose_port("prefect", found, taken_port) == found


def test_a_service_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    thing = Service(
        "thing",
        [sys.executable, "-c", "print('no such table'); raise SystemExit(3)"],
        tmp_path / "log",
        ready="http://127.0.0.1:9",
    )
    thing.start()
    with pytest.raises(RuntimeError, match=r"thing ended with status 3; .*\n.*no such table"):
        thing.wait_ready(timeout=20)


def test_stopping_ends_grandchildren_and_the_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STOP_TIMEOUT", 0.5)
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


def test_a_service_that_dies_is_started_again_until_it_dies_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_RESTARTS", 2)
    program = "import time; print('began', flush=True); time.sleep(0.2); raise SystemExit(3)"
    kept = Service("thing", [sys.executable, "-c", program], tmp_path / "log", _restarts=deque(maxlen=2))
    kept.start()
    num_restarts = 0
    with pytest.raises(RuntimeError, match="thing ended with status 3"):
        while num_restarts < 9:
            assert kept.process is not None
            kept.process.wait()
            num_restarts += kept.keep()
    assert num_restarts == 2
    assert kept.log.read_text().count("began") == 3


def test_only_an_answer_counts(tmp_path: Path) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path[1:]))

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = {code: service.answers(f"http://127.0.0.1:{server.server_port}/{code}") for code in (401, 404, 500, 503)}
        server.shutdown()
    assert found == {401: True, 404: True, 500: False, 503: False}
    assert not service.answers(f"http://127.0.0.1:{server.server_port}/")
