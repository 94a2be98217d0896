"""Stored runs verify, replay to the same digests, and resume. tests/fixtures/make_stores.py made them.

Only `penstock` commands and files of the store are used here, so that these tests hold through any change inside.
"""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.make_stores import RUNS, STORES, cpu_name
from penstock_command import penstock

from penstock.flows.cli import main

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class StoredRun:
    """A fixture, unpacked."""

    name: str
    directory: Path
    environment: dict[str, str]
    record: dict[str, Any]

    def penstock(self, *words: str) -> str:
        """Run a command in the directory of the run. Returns what it printed; it must succeed."""
        return penstock(*words, env=self.environment, cwd=self.directory).stdout

    def commits(self) -> dict[str, bytes]:
        """Return path -> content of every commit record of the run, without journals, which end with their round."""
        run = self.directory / "store" / "runs" / self.name
        return {
            str(path.relative_to(run)): path.read_bytes()
            for path in run.rglob("*.commit.json")
            if ".journal/" not in str(path)
        }


def unpack(name: str, tmp_path: Path) -> Path:
    """Unpack a stored run and return its directory."""
    with tarfile.open(STORES / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return tmp_path / "run"


@pytest.fixture
def stored(request: pytest.FixtureRequest, prefect_api: dict[str, str], tmp_path: Path) -> StoredRun:
    """Return the run that the test's parameter names."""
    directory = unpack(request.param, tmp_path)
    environment = {
        **prefect_api,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    record = json.loads((STORES / f"{request.param}.json").read_text())
    return StoredRun(request.param, directory, environment, record)


def runs(first: str, *others: str) -> pytest.MarkDecorator:
    """Parametrize a test with stored runs; those after the first belong to the long tests."""
    long = [pytest.param(name, marks=pytest.mark.full) for name in others]
    return pytest.mark.parametrize("stored", [first, *long], indirect=True)


@pytest.mark.parametrize("name", RUNS)
def test_stored_run_verifies(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", name, "--store", str(unpack(name, tmp_path) / "store")]) == 0
    assert "no problems found" in capsys.readouterr().out


@runs("grpo", "ppo", "sft")
def test_stored_run_replays_within_tolerance_and_bit_for_bit_on_its_cpu(stored: StoredRun) -> None:
    before = stored.commits()
    words = ["replay", stored.name, "--store", "store", "--json", "replayed.json"]
    stored.penstock(*words)  # exit code 1 if beyond tolerance
    replayed = json.loads((stored.directory / "replayed.json").read_text())
    assert list(replayed) == list(stored.record["digests"])
    assert stored.commits() == before
    if (cpu_name(), torch.__version__) == (stored.record["cpu"], stored.record["torch"]):
        assert {round_id: result["digest"] for round_id, result in replayed.items()} == stored.record["digests"]
        assert {result["verdict"] for result in replayed.values()} == {"equal bit for bit"}  # the metrics are equal too


@runs("partial", "ppo", "sft")
def test_stored_run_resumes_after_its_last_commit(stored: StoredRun) -> None:
    before = stored.commits()
    stored.penstock(*stored.record["resume"])
    after = stored.commits()
    assert {path: after[path] for path in before} == before
    assert {"rollouts/000003.commit.json", "steps/000003.commit.json", "checkpoints/000004.commit.json"} <= set(after)
    if stored.name == "partial":
        interrupted = json.loads(after["rollouts/000002.commit.json"])
        assert interrupted["state"]["adopted_groups"], "the journal of the interrupted round was not used"
    assert "no problems found" in stored.penstock("verify", stored.name, "--store", "store")
