"""Outages of Prefect during a run, which completes."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.flows.runtime.child_process import Service, choose_port
from penstock.flows.runtime.prefect_api import LAUNCHER, prefect_server
from penstock.storage.failpoints import VARIABLE

pytestmark = pytest.mark.integration

# A run that waits one second, not two minutes, for a server that is not coming back.
IMPATIENT = (
    "import sys; from penstock.flows import cli; from penstock.flows.runtime import prefect_api; "
    "prefect_api.PATIENCE = 1.0; sys.exit(cli.main(sys.argv[1:]))"
)
POINT = "convert-writing"  # in the stage: a flow run that is only being set up cannot do without its server


def until(what: Callable[[], Any], timeout: float, log: Path) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
    return found


@pytest.fixture
def home(prefect_home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prefect_home, tmp_path / "prefect")


def history(home: Path) -> list[tuple[str, int]]:
    """State and attempts of every flow run that Prefect knows. Not of tasks: those it hears of by events, late or
    never."""
    with sqlite3.connect(f"file:{home / 'prefect.db'}?mode=ro", uri=True, timeout=20) as database:
        return database.execute("select state_name, run_count from flow_run").fetchall()


def convert(model: Path, folder: Path, program: list[str], **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A conversion that stops in its only stage (see `stopped`)."""
    log, faults = folder / "log", folder / "faults"
    faults.mkdir()
    (faults / POINT).touch()
    command = [sys.executable, *program, "convert", "--hf-checkpoint", str(model), "--store", str(folder / "store")]
    own = {"PREFECT_HOME": str(folder / "prefect"), "XDG_STATE_HOME": str(folder / "state"), VARIABLE: str(faults)}
    with log.open("wb") as out:
        variables = {**os.environ, **own, **environment}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=variables, cwd=Path(__file__).parents[2])
    return process, log


def stopped(folder: Path) -> Path:
    """A file that exists while the conversion waits in its stage. Removing it lets the conversion continue."""
    return folder / "faults" / f"{POINT}.reached"


def server_of(pid: int) -> psutil.Process | None:
    """The run's own Prefect server, once it is there: a run that finds it dead starts it again at any moment."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if str(LAUNCHER) in child.cmdline():
                return child
    return None


def test_run_survives_a_kill_of_its_own_prefect_server(home: Path, tiny_model: Path, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    process, log = convert(tiny_model, tmp_path, ["-m", "penstock"])
    try:
        until(stopped(tmp_path).exists, 120, log)
        server = until(lambda: server_of(process.pid), 120, log)
        server.kill()
        stopped(tmp_path).unlink()
        assert process.wait(timeout=180) == 0, log.read_text()
    finally:
        process.kill()
    assert "is converted" in log.read_text()
    assert history(home) == [("Completed", 1)]
    assert not server.is_running()
    until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= before, 60, log)


@pytest.fixture
def server(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    service = prefect_server(choose_port("prefect", 0, 0))
    service.start()
    service.wait_ready()
    yield service
    service.stop()


@pytest.mark.full
def test_run_completes_if_the_prefect_server_never_comes_back(
    server: Service, tiny_model: Path, tmp_path: Path
) -> None:
    login = {name: server.environment[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
    process, log = convert(tiny_model, tmp_path, ["-c", IMPATIENT], **login)
    try:
        until(stopped(tmp_path).exists, 120, log)
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        stopped(tmp_path).unlink()
        until(lambda: "is converted" in log.read_text(), 120, log)
        assert process.wait(timeout=90) == 0, log.read_text()  # Prefect itself would wait minutes for the server
    finally:
        process.kill()
    assert "convert is complete, but its end could not be reported to Prefect" in log.read_text()
