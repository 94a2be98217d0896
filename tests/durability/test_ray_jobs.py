"""`ray job submit` of a run, as docs/ray-jobs.md describes it: a stopped job is submitted again and resumes the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from harness import RAY, START_TIMEOUT, Pipeline, World, answers, tiny_flags
from matrix import verdict

from penstock.engines.network import reserve_free_port

ROUNDS = 3
NO_AGENT = "No available agent to submit job"


def ray_job(world: World, port: int, *words: str) -> str:
    """Run `ray job ...` and return its output. A submission is repeated until a node's agent, which starts after the
    dashboard, accepts it."""
    action, *rest = words
    command = [*RAY, "job", action, "--address", f"http://127.0.0.1:{port}", *rest]
    environment, deadline = {**os.environ, **world.environment}, time.monotonic() + START_TIMEOUT
    while True:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if NO_AGENT not in result.stderr or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("opencensus") is None, reason="needs the extra cluster")
def test_stopped_job_resumes_when_it_is_submitted_again(world: World) -> None:
    port = reserve_free_port()
    world.start_prefect()
    address = world.start_ray(port)
    pipeline = Pipeline(world, "job", str(world.root / "store"), tiny_flags(world, ROUNDS), ray_address=address)
    deadline = time.monotonic() + START_TIMEOUT
    while not answers(f"http://127.0.0.1:{port}/api/version"):  # also that the token is missing
        assert time.monotonic() < deadline, "Ray's dashboard does not start"
        time.sleep(0.5)
    # As on the page. Outside a job "auto" could find another Ray of this machine.
    flags = ["auto" if word == address else word for word in pipeline._flags]
    train = [sys.executable, "-m", "penstock", "train", *flags]
    ray_job(world, port, "submit", "--no-wait", "--submission-id", "first", "--", *train)
    while pipeline.store.committed(pipeline.keys.step_prefix(0)) is None:
        assert time.monotonic() < deadline, ray_job(world, port, "logs", "first")
        time.sleep(0.2)
    ray_job(world, port, "stop", "first")
    before = pipeline.commits()
    assert "succeeded" in ray_job(world, port, "submit", "--submission-id", "second", "--", *train)
    after = pipeline.commits()
    assert {key: after.get(key, before[key]) for key in before} == before  # --keep-checkpoints removes some
    assert verdict(pipeline)["num_samples"] == ROUNDS * 8 * 4
