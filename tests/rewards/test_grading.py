"""Grading processes: spellings of paths, time limits, crashes, invalid requests."""

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
from typing import Any

import psutil
import pytest

from penstock.stages import worker_process
from penstock.stages.plugins import load_function
from penstock.stages.rewards.hub import RewardSettings
from penstock.stages.rollout.text.templates import RenderLimits
from penstock.storage.errors import PluginError, RewardError
from penstock.storage.samples.sample import Sample, Status
from tests.forked_worker import forked_workers, fresh_workers  # noqa: F401 fixtures
from tests.rewards.make_grader import make_grader, samples

REWARDS = r"""
import asyncio, os, re


num_calls = 0


async def reward_func(args, sample, **kwargs):
    global num_calls
    num_calls += 1
    while num_calls < args.num_concurrent:
        await asyncio.sleep(0.01)
    return {"score": len(sample.response) * args.scale, "parts": 1, "note": "text"}


def misbehave(args, sample):
    if sample.response == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if sample.response == "die":
        os._exit(1)
    if sample.response == "exit":
        raise SystemExit(0)
    if sample.response == "raise":
        raise KeyError("missing")
    return {"none": None, "nan": float("nan"), "text": "good"}.get(sample.response, 1)


async def slow(args, sample):
    await asyncio.sleep(3600 if sample.response == "hang" else 0)
    if sample.response == "exit":
        raise SystemExit(0)
    return True
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def test_every_spelling_of_a_path_loads_the_function(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    for spelling in (f"{file}", f"{file}:reward_func", "my_rewards:reward_func", "my_rewards.reward_func"):
        assert load_function(spelling).__name__ == "reward_func"
    assert load_function(f"{file}:misbehave").__name__ == "misbehave"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("{}/my_rewards.py:misbehav", "misbehav.*reward_func, misbehave, slow"),
        ("{}/bad.py", r"bad\.py.*ZeroDivisionError"),
        ("{}/two.py", r"two\.py.*a, b"),
        ("no_such_module.function", "no_such_module"),
    ],
)
def test_path_that_does_not_load_raises_plugin_error(file: Path, path: str, part: str) -> None:
    (file.parent / "bad.py").write_text("1 / 0")
    (file.parent / "two.py").write_text("def a(): ...\ndef b(): ...\n")
    with pytest.raises(PluginError, match=part):
        load_function(path.format(file.parent))


@pytest.mark.usefixtures("fresh_workers")
def test_async_rewards_run_concurrently(file: Path) -> None:
    batch = samples(*["abc"] * 32)
    arguments = {"scale": 2, "num_concurrent": len(batch)}  # every call waits for all calls
    with make_grader(custom_rm_path=str(file), reward_key="score", arguments=arguments) as grader:
        grader.grade(batch)
    assert {sample.reward for sample in batch} == {6.0}
    assert batch[0].rewards == {"score": 6.0, "parts": 1.0}


@pytest.mark.parametrize("bad", ["hang in C", pytest.param("die", marks=pytest.mark.full)])
def test_reward_that_hangs_dies_raises_or_exits_fails_one_sample(file: Path, bad: str) -> None:
    batch = samples("ok", bad, "raise", "none", "nan", "exit", "ok")
    with make_grader(custom_rm_path=f"{file}:misbehave", timeout=0.2) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [1.0, None, None, None, None, None, 1.0]
    assert [sample.status is Status.FAILED for sample in batch] == [False, True, True, True, True, True, False]
    reasons = [sample.metadata.get("error", "") for sample in batch]
    assert reasons[1].startswith("the grading process died: " if bad == "die" else "timeout: more than 0.2 s in ")
    assert reasons[2] == f"KeyError: 'missing' (raised by misbehave of {file})"
    assert reasons[3].startswith("the reward function returned None: ")
    assert reasons[4].startswith("the reward function returned nan: ") and "SystemExit" in reasons[5]
    assert all("misbehave" in reason for reason in reasons[1:6]), "every reason must name the function"


def test_async_reward_that_hangs_or_exits_fails_one_sample(file: Path) -> None:
    batch = samples("ok", "hang", "exit", "ok")
    with make_grader(custom_rm_path=f"{file}:slow", timeout=0.2) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [1.0, None, None, 1.0]
    assert batch[1].metadata["error"].startswith("timeout") and "SystemExit" in batch[2].metadata["error"]


def test_invalid_request_raises_instead_of_failing_samples(file: Path) -> None:
    with make_grader(custom_rm_path=str(file), arguments={"scale": 1, "num_concurrent": 1}) as grader:
        with pytest.raises(RewardError, match=r"'score', 'parts', 'note'.*--reward-key"):
            grader.grade(samples("a"))
    with make_grader(custom_rm_path=f"{file}:absent") as grader:
        with pytest.raises(PluginError, match="absent"):
            grader.grade(samples("a"))
    with pytest.raises(RewardError, match="--rm-type"):
        make_grader().grade(samples("a"))


def test_rm_type_of_a_row_selects_its_reward() -> None:
    boxed, plain, unknown = samples(r"1 \boxed{2}", r"2 \boxed{1}", "2", label="2")
    boxed.metadata["rm_type"] = "boxed_exact_number"
    with make_grader("exact_number") as grader:
        grader.grade([boxed, plain])
        assert (boxed.reward, plain.reward) == (1.0, 0.0)
        boxed.metadata["rm_type"] = "math"  # graded in a process
        grader.grade([boxed])
        assert boxed.reward == 1.0
        unknown.metadata["rm_type"] = "exactly"
        with pytest.raises(RewardError, match="exactly"):
            grader.grade([unknown])


HANGING = {
    "a reward": """
import threading
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import RewardSettings
from penstock.storage.samples.sample import Sample
grader = Grader(RewardSettings(custom_rm_path="{file}:misbehave", timeout=3600), num_workers=1)
grader.grade([Sample("0", "g", "0", 0, response="ok")])
grader.submit(Sample("1", "g", "1", 0, response="hang in C"))
""",
    "a template": """
import threading
from penstock.stages.rollout.text.templates import RenderLimits, TemplateRenderer
loop = "{{% for i in range(10**5) %}}{{% for j in range(10**5) %}}{{% endfor %}}{{% endfor %}}"
render = TemplateRenderer(RenderLimits(cpu_seconds=3600.0)).render
threading.Thread(target=render, args=(loop, [([], None, False)]), daemon=True).start()
""",
}


@pytest.mark.full
@pytest.mark.parametrize("what", HANGING)
def test_hanging_process_dies_with_its_parent(what: str, file: Path) -> None:
    program = (
        HANGING[what].format(file=file, folder=file.parent)
        + """
import psutil, time
while not psutil.Process().children():
    time.sleep(0.01)
    assert threading.active_count() > 1, "the thread that starts the process has failed"
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(3600)
"""
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(2)  # until it hangs
    parent.kill()
    parent.wait()
    psutil.wait_procs([worker], timeout=10)
    # A container may have no process that reaps it.
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_process_that_cannot_start_fails_the_pending_jobs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("cannot allocate memory")

    with make_grader(custom_rm_path=f"{file}:misbehave") as grader:
        monkeypatch.setattr(worker_process.subprocess, "Popen", refuse)
        with pytest.raises(OSError, match="cannot allocate memory"):
            grader.grade(samples("ok"))


ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "penstock.stages.worker_process")
GRADING = "penstock.stages.rewards.grading:prepare_grading"
RENDERING = "penstock.stages.rollout.text.templates:prepare_rendering"
READY = (None, True, None)
Worker = tuple[subprocess.Popen[str], Connection]
SYNC = "import time\ndef reward_func(args, sample, **options):\n    time.sleep(0.5)\n    return 1.0\n"
ASYNC = (
    "import asyncio\nasync def reward_func(args, sample, **options):\n    await asyncio.sleep(0.5)\n    return 1.0\n"
)
BAD = "import time\ntime.sleep(0.5)\nraise ValueError('bad')\n"


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


@pytest.mark.full
def test_parent_that_closes_the_pipe_during_a_job_gets_no_traceback(worker: Worker, tmp_path: Path) -> None:
    process, connection = worker
    connection.send(settings(tmp_path, ASYNC))
    assert connection.recv() == READY
    connection.send((0, [Sample("s", "g", "t", 0, prompt="p", label="1", response="1")]))
    time.sleep(0.1)
    connection.close()
    assert ended_silently(process)


def test_parent_that_closes_the_pipe_while_a_reward_fails_to_load_gets_no_traceback(
    worker: Worker, tmp_path: Path
) -> None:
    process, connection = worker
    connection.send(settings(tmp_path, BAD))
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
