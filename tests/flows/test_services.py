"""The parts of `penstock up`: ports, and child processes that are restarted and stopped. test_deploy.py runs all."""

import fcntl
import http.server
import json
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from penstock.flows.runtime import child_process
from penstock.flows.runtime.child_process import Service, choose_port
from penstock.flows.services import stack
from penstock.storage.leases import process_start_time
from penstock.storage.store import Store


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory, in which no `penstock up` runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_taken_port_is_refused_in_one_line(taken_port: int, tmp_path: Path, printed: Callable[..., str]) -> None:
    error = printed("up", "--store", str(tmp_path), "--mlflow-port", str(taken_port), code=2)
    assert f"port {taken_port} on 127.0.0.1 is taken: give another --mlflow-port" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "--sotre", "x"], "unknown flag --sotre: did you mean --store?"),
        (["up", "--prefect-port", "x"], "--prefect-port takes an integer"),
        (["down", "all"], "takes no arguments; found 'all'"),
    ],
)
def test_bad_arguments_of_up_and_down_are_refused(words: list[str], message: str, printed: Callable[..., str]) -> None:
    assert message in printed(*words, code=2)


def test_store_used_last_is_shown_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stack.default_store() == "penstock-store"
    for number, name in enumerate(("a", "b", "c")):
        (tmp_path / name / "runs" / "r").mkdir(parents=True)
        (tmp_path / name / "runs" / "r" / "run.json").write_text("{}")
        if name != "c":
            (tmp_path / name / "mlflow").mkdir()
            (tmp_path / name / "mlflow" / "mlflow.db").touch()
            os.utime(tmp_path / name / "mlflow" / "mlflow.db", (1000 - number, 1000 - number))
    assert stack.default_store() == "a"
    assert "3 stores are here: a, b, c; give --store" in capsys.readouterr().out


def record_up(state: Path, process: psutil.Process, **pages: str) -> None:
    up = stack.Up(process.pid, process_start_time(process.pid), 4299, pages, None)
    stack.write_private(state / "penstock" / "services" / "up.json", json.dumps(asdict(up)))


def test_second_up_prints_the_links_of_the_first(state: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    store, other = Store(str(tmp_path / "s"), probe=False).uri, str(tmp_path / "other")
    page = "http://127.0.0.1:5099/#/experiments/1/runs?viewStateShareKey=penstock"
    record_up(state, psutil.Process(), **{store: page})
    out = printed("up", "--store", store)
    assert f"runs already (process {os.getpid()})" in out
    assert "http://127.0.0.1:4299/runs" in out and f"{page}  {store}" in out
    assert f"it does not show --store {other}" in printed("up", "--store", store, "--store", other, code=2)


def test_second_up_is_refused_while_the_first_one_starts(state: Path, printed: Callable[..., str]) -> None:
    lock = stack.up_path().with_name("up.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another `penstock up` is starting" in printed("up", "--store", str(state / "store"), code=2)


def test_down_ends_the_process_of_the_record_and_no_other(state: Path, printed: Callable[..., str]) -> None:
    assert "does not run" in printed("down")
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            process = psutil.Process(child.pid)
            record_up(state, process)
            up = json.loads(stack.up_path().read_text())
            stack.up_path().write_text(json.dumps(up | {"started": up["started"] + "0"}))  # the pid is another's now
            assert "does not run" in printed("down") and child.poll() is None
            record_up(state, process)
            assert f"(process {child.pid})" in printed("down")
            assert not process.is_running()
        finally:
            child.kill()


def test_taken_default_port_is_replaced_by_a_free_one(taken_port: int) -> None:
    found = choose_port("prefect", None, taken_port)
    assert found != taken_port
    assert choose_port("prefect", found, taken_port) == found


def test_error_of_a_dead_service_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo no such table; exit 3"]
    thing = Service("thing", command, tmp_path / "log", ready="http://127.0.0.1:9")
    thing.start()
    with pytest.raises(RuntimeError, match=r"thing ended with status 3; .*\n.*no such table"):
        thing.wait_ready(timeout=20)


@pytest.mark.full
def test_stop_ends_grandchildren_that_ignore_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STOP_TIMEOUT", 0.1)
    deaf = "trap '' TERM; echo up; sleep 60"
    thing = Service("thing", ["sh", "-c", f'sh -c "{deaf}"; true'], tmp_path / "log")
    thing.start()
    assert thing.process is not None
    deadline = time.monotonic() + 20
    while "up" not in thing.log_tail() and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(thing.process.pid).children(recursive=True)
    assert family
    thing.stop()
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_service_is_restarted_until_max_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = list[float]()
    monkeypatch.setattr(child_process.time, "sleep", delays.append)
    monkeypatch.setattr(child_process, "MAX_RESTARTS", 2)
    kept = Service("thing", ["sh", "-c", "echo began; exit 3"], tmp_path / "log", _restarts=deque(maxlen=2))
    kept.start()
    num_restarts = 0
    with pytest.raises(RuntimeError, match="thing ended with status 3"):
        while num_restarts < 9:
            assert kept.process is not None
            kept.process.wait()
            num_restarts += kept.restart_if_ended()
    assert num_restarts == 2 and delays == [0.0, 1.0]
    assert kept.log.read_text().count("began") == 3


def test_answers_accepts_4xx_and_rejects_5xx_and_silence(tmp_path: Path) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(int(self.path[1:]))

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        found = {code: child_process.http_answers(f"{root}/{code}") for code in (404, 500)}
        server.shutdown()
    assert found == {404: True, 500: False}
    assert not child_process.http_answers(root)
