"""Starting our own Ray while its processes die."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.engines import local_ray
from penstock.engines.local_ray import START_TRIES, ClusterLost, start_ray


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

        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: None))  # see test_cluster.py
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


def test_start_ray_raises_cluster_lost_after_its_tries(half_started: Callable[[int], list[Any]]) -> None:
    left = half_started(100)
    with pytest.raises(ClusterLost, match=r"3 tries.*timed out during startup"):
        start_ray(num_cpus=1)
    assert len(left) == START_TRIES
    for process in left:
        process.wait(10)


def test_start_ray_does_not_retry_wrong_options(half_started: Callable[[int], list[Any]]) -> None:
    left = half_started(0)
    with pytest.raises(ValueError, match="num_cpus"):
        start_ray(num_cpus=-1)
    assert left == []
