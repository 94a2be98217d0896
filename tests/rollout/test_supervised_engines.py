"""Real engines on a standing Ray: they outlive a killed driver, the next one takes them over, and a death in mid-round
costs nothing, neither with SGLang's router in front of them."""

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
from engine_driver import KEYS, NUM_PROMPTS, NUM_SAMPLES, WAVE

from penstock.engines.network import reserve_free_port
from penstock.storage.commit import BUFFER
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

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
        *(
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
            "--num-cpus=4",
            "--object-store-memory=100000000",
        ),
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


def check_rounds(store: Store) -> None:
    """Every prompt is in one place, and what was stopped in the first round was continued by the policy of the
    second."""
    first, second = (store.committed(KEYS.rollout_prefix(r)) for r in range(2))
    assert first is not None and second is not None
    trained, halves, continued = (
        read_samples(store, first),
        read_samples(store, first, BUFFER),
        read_samples(store, second),
    )
    issued = [f"{g:09d}-{i:02d}" for g in range(WAVE) for i in range(NUM_SAMPLES)]
    assert sorted(s.sample_id for s in trained + halves) == issued and len(trained) == NUM_PROMPTS * NUM_SAMPLES
    assert all(s.policy_versions == (0, 0) and sum(s.loss_mask) <= 128 for s in trained)
    assert len({s.sample_id for s in continued}) == NUM_PROMPTS * NUM_SAMPLES
    before = {s.sample_id: s for s in halves if s.status is Status.ABORTED and s.response}
    both = [s for s in continued if s.sample_id in before]
    assert both, "nothing was stopped half-way"
    for sample in both:
        half = before[sample.sample_id]
        assert sample.token_ids[: len(half.token_ids)] == half.token_ids and sample.policy_versions == (0, 1)
        assert sample.metadata["policy_spans"] == [
            [0, sum(half.loss_mask)],
            [1, sum(sample.loss_mask) - sum(half.loss_mask)],
        ]
        assert all(p < 0 for p, m in zip(sample.rollout_logprobs, sample.loss_mask) if m)


@pytest.mark.full
def test_engines_survive_killed_driver_and_round_survives_killed_engine(
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

    check_rounds(Store(str(tmp_path / "store")))
    direct, routed = found["direct"], found["routed"]
    assert (
        direct["killed"] == [held["pids"][0]]
        and direct["before"] == held["urls"]
        and sorted(routed["before"]) == sorted(direct["after"])
    )
    for r, seen in enumerate((direct, routed)):
        assert seen["published"][0] == seen["before"]
        assert seen["published"][1:] == [[url for url in seen["after"] if url not in seen["before"]]]
        assert len(seen["after"]) == 2 and seen["versions"] == [f"run/{r}"] * 2
        print(f"round {r} took {seen['seconds']:.1f} s; two engines again {seen['seconds_until_back']:.1f} s later")
    print(f"taken over in {found['seconds']:.1f} s, started in {held['seconds']:.1f} s")

    assert found["second_adopted"] == [[True, True], True]
    assert "another driver" in found["refusal"]
    assert found["survived"] == [True, True] and found["one_kept"] and found["gone"]
