"""A worker process ends without a message if its parent closes the pipe, and continues after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.stages.rewards.hub import RewardSettings
from penstock.stages.rollout.text.templates import RenderLimits
from penstock.storage.samples.sample import Sample

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "penstock.stages.worker_process")
GRADING = "penstock.stages.rewards.grading_process:prepare_grading"
RENDERING = "penstock.stages.rollout.text.templates:prepare_rendering"
READY = (None, True, None)
Worker = tuple[subprocess.Popen[str], Connection]
SYNC = "import time\ndef reward_func(args, sample, **options):\n    time.sleep(0.5)\n    return 1.0\n"
ASYNC = (
    "import asyncio\nasync def reward_func(args, sample, **options):\n    await asyncio.sleep(0.5)\n    return 1.0\n"
)
SLOW_IMPORT = "import time\ntime.sleep(1)\n" + SYNC
BAD = "import time\ntime.sleep(1)\nraise ValueError('bad')\n"


def start_worker(target: str, protocol: str) -> Worker:
    connection, child = Pipe()
    process = subprocess.Popen(
        [*COMMAND, str(child.fileno()), target, protocol, str(os.getpid())],
        pass_fds=[child.fileno()],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.close()
    return process, connection


@pytest.fixture
def worker() -> Iterator[Worker]:
    process, connection = start_worker(GRADING, "pickle")
    yield process, connection
    process.kill()
    process.communicate()


def settings(tmp_path: Path, source: str) -> RewardSettings:
    (tmp_path / "reward.py").write_text(source)
    return RewardSettings(custom_rm_path=str(tmp_path / "reward.py"))


def ended_silently(process: subprocess.Popen[str]) -> bool:
    return process.communicate(timeout=100)[1] == "" and process.returncode in (0, -signal.SIGKILL)


@pytest.mark.parametrize("source", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.full
def test_parent_that_closes_the_pipe_during_a_job_gets_no_traceback(
    worker: Worker, source: str, tmp_path: Path
) -> None:
    process, connection = worker
    connection.send(settings(tmp_path, source))
    assert connection.recv() == READY
    connection.send((0, [Sample("s", "g", "t", 0, prompt="p", label="1", response="1")]))
    time.sleep(0.1)
    connection.close()
    assert ended_silently(process)


@pytest.mark.parametrize("source", [SLOW_IMPORT, BAD], ids=["loads", "does not load"])
def test_parent_that_closes_the_pipe_while_the_reward_loads_gets_no_traceback(
    worker: Worker, source: str, tmp_path: Path
) -> None:
    process, connection = worker
    connection.send(settings(tmp_path, source))
    connection.close()
    assert ended_silently(process)


@pytest.mark.full
def test_parent_that_ends_before_it_sends_the_settings_gets_no_traceback(worker: Worker) -> None:
    process, connection = worker
    connection.close()
    assert ended_silently(process)


def test_ctrl_c_is_left_to_the_parent(worker: Worker, tmp_path: Path) -> None:
    process, connection = worker
    connection.send(settings(tmp_path, SYNC))
    assert connection.recv() == READY
    connection.send((0, [Sample("s", "g", "t", 0, prompt="p", label="1", response="1")]))
    process.send_signal(signal.SIGINT)
    number, is_result, outcomes = connection.recv()
    assert number == 0 and is_result and outcomes[0].reward == 1.0
    connection.close()
    assert ended_silently(process)


def test_rendering_process_whose_parent_has_ended_prints_no_traceback() -> None:
    process, connection = start_worker(RENDERING, "json")
    with process:
        connection.send(RenderLimits(memory_bytes=8 << 30))
        head = json.dumps({"template": "x", "mark": "", "options": {}, "now": 0})
        connection.send((0, (head, "[[], null, false]")))
        connection.close()
        assert ended_silently(process)
