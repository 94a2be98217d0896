"""Real engines on a standing Ray: they outlive a killed driver, and the next one adopts them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engines.network import reserve_free_port

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def environment() -> dict[str, str]:
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def standing_ray(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Start a Ray that no driver owns, and yield its address."""
    port = reserve_free_port()
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=4"),
        "--object-store-memory=100000000",
    ]
    with (tmp_path / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    deadline = time.monotonic() + 60
    while b"Ray runtime started" not in (tmp_path / "ray.log").read_bytes():
        assert head.poll() is None and time.monotonic() < deadline, (tmp_path / "ray.log").read_text()
        time.sleep(0.2)
    yield f"127.0.0.1:{port}"
    family = psutil.Process(head.pid).children(recursive=True)
    head.terminate()
    head.wait(timeout=30)
    for process in psutil.wait_procs(family, timeout=15)[1]:
        process.kill()


def drive(what: str, *words: str, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, str(HERE / "engine_driver.py"), what, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def report(process: subprocess.Popen[bytes], path: Path, log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.1)
    return json.loads(path.read_text())


@pytest.mark.full
def test_engines_survive_a_killed_driver_and_belong_to_the_last_pool(
    standing_ray: str, environment: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "driver.log"
    words = (standing_ray, str(tiny_model), str(tmp_path))
    first = drive("hold", *words, log=log, environment=environment)
    held = report(first, tmp_path / "hold.json", log)
    first.kill()
    first.wait()

    second = drive("resume", *words, log=log, environment=environment)
    found = report(second, tmp_path / "resume.json", log)
    assert second.wait(timeout=60) == 0, log.read_text()[-5000:]
    assert held["adopted"] == [False, False] and found["adopted"] == [True, True]
    assert (found["urls"], found["pids"]) == (held["urls"], held["pids"])
    assert found["second_adopted"] == [[True, True], True]
    assert "another driver" in found["refusal"]
    assert found["survived"] == [True, True] and found["one_kept"] and found["gone"]
