"""Outages of Prefect or MLflow during a run: the run completes, and every record is delivered once."""

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
from penstock.flows.services.stack import mlflow_server
from penstock.storage.commit import Commit, FileRecord, RunKeys, commit_key, encode_commit
from penstock.storage.failpoints import VARIABLE
from penstock.storage.store import Store
from penstock.storage.tracking.delivery import RunTracking
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
from penstock.storage.tracking.tracker import TrackedRun

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
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **own, **environment},
            cwd=Path(__file__).parents[2],
        )
    return process, log


def stopped(folder: Path) -> Path:
    """Exists while the conversion stands in its stage; to remove it lets the conversion go on."""
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


@pytest.mark.full
def test_mlflow_outage_of_a_whole_run_is_delivered_once_afterwards(tmp_path: Path) -> None:
    keys, store = RunKeys("late"), Store(str(tmp_path / "store"))
    service = mlflow_server(choose_port("mlflow", 0, 0), f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "logs")
    uri = (service.ready or "").removesuffix("/health")

    def tracked(timeout: float, offered: list[tuple[str, Commit]]) -> int:
        run = TrackedRun("late", "1", store.uri)
        tracker = RunTracking(run, tmp_path / "outbox", [uri], {"run": {"num_rollout": 3}}).start()
        tracker.record_missing_commits(store, keys)
        for key, commit in offered:
            tracker.record_commit(key, commit)
        return tracker.close(timeout=timeout)

    offered = list(rounds(keys))
    for key, commit in offered:
        store.create(key, encode_commit(commit))  # not `commit`: the files that these name were never written
    assert tracked(0.5, offered) == len(offered) + 2  # its start and its end
    service.start()
    try:
        service.wait_ready()
        assert tracked(90, []) == 0
        assert tracked(90, offered) == 0  # a resumed run offers them all again
        client = MlflowOptions.connect(uri, TrackedRun("late", "1", store.uri)).client
        experiment = client.get_experiment_by_name("penstock")
        [run] = client.search_runs([experiment.experiment_id], "attributes.run_name = 'late'")
        for metric in ("rollout/raw_reward", "train/loss"):
            points = client.get_metric_history(run.info.run_id, metric)
            assert [(point.step, point.value) for point in points] == [(r, 0.5 * r) for r in range(3)]
    finally:
        service.stop()


def rounds(keys: RunKeys) -> Iterator[tuple[str, Commit]]:
    for r in range(3):
        shard = FileRecord(
            path=f"{keys.rollout_prefix(r)}/attempt-1/part-00000.parquet", bytes=10, xxh3=f"{r:032x}", rows=8
        )
        summaries = {"rollout": {"rollout/raw_reward": 0.5 * r}, "step": {"train/loss": 0.5 * r}}
        at = 1e9 + 100 * r
        attempt = f"{keys.rollout_prefix(r)}/attempt-1"
        yield (
            commit_key(keys.rollout_prefix(r)),
            Commit(
                kind="rollout", index=r, attempt=attempt, files=[shard], summary=summaries["rollout"], created_at=at
            ),
        )
        yield (
            commit_key(keys.step_prefix(r)),
            Commit(kind="step", index=r, policy_version=r + 1, summary=summaries["step"], created_at=at + 1),
        )
