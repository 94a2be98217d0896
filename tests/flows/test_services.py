"""`make up`: everything starts, says where it is, and nothing outlives it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows import services


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
    found = services.choose_port("prefect", None, taken_port)
    assert found != taken_port
    assert services.choose_port("prefect", found, taken_port) == found


def test_a_service_that_dies_shows_the_end_of_its_log(tmp_path: Path) -> None:
    service = services.Service(
        "thing",
        [sys.executable, "-c", "print('no such table'); raise SystemExit(3)"],
        tmp_path / "log",
        ready="http://127.0.0.1:9",
    )
    service.start()
    with pytest.raises(RuntimeError, match=r"thing ended with status 3; .*\n.*no such table"):
        service.wait_ready(timeout=20)


def test_stopping_ends_grandchildren_and_the_deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STOP_TIMEOUT", 0.5)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {deaf!r}])"
    service = services.Service("thing", [sys.executable, "-c", program], tmp_path / "log")
    service.start()
    assert service.process is not None
    deadline = time.monotonic() + 20
    while "up" not in service.log_tail() and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(service.process.pid).children(recursive=True)
    assert len(family) == 1
    service.stop()
    assert not psutil.wait_procs(family, timeout=5)[1]


@pytest.mark.integration
def test_up_serves_and_nothing_outlives_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [
        sys.executable,
        "-m",
        "flows.services",
        "up",
        "--store",
        str(tmp_path),
        "--prefect-port",
        "0",
        "--mlflow-port",
        "0",
    ]
    with (tmp_path / "out").open("wb") as out:
        up = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 120
        while "Ctrl-C" not in (text := (tmp_path / "out").read_text()):
            assert up.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for link in re.findall(r"http://\S+", text)[:2]:
            assert b"<html" in opener.open(link.split("#")[0], timeout=30).read().lower()
        family = psutil.Process(up.pid).children(recursive=True)
        assert len(family) >= 3
        up.send_signal(signal.SIGKILL)
        up.wait(timeout=60)
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        up.kill()
