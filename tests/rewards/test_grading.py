"""Grading processes: user functions in every spelling, time limits, crashes, wrong requests."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.plugins import load_function
from stages.rewards import process
from stages.rewards.grading import Grader
from storage.errors import PluginError
from storage.sample import Sample, Status

REWARDS = r"""
import asyncio, os, re, time


async def reward_func(args, sample, **kwargs):
    await asyncio.sleep(0.2)
    return {"score": len(sample.response) * args.scale, "parts": 1, "note": "text"}


def moody(args, sample):
    if sample.response == "hang":
        time.sleep(3600)
    if sample.response == "hang in C":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if sample.response == "die":
        os._exit(1)
    if sample.response == "raise":
        raise KeyError("missing")
    return {"none": None, "nan": float("nan"), "text": "good"}.get(sample.response, 1)


async def slow(args, sample):
    await asyncio.sleep(3600 if sample.response == "hang" else 0)
    return True
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def samples(*responses: str) -> list[Sample]:
    return [Sample(f"{i}", "g", f"{i}", 0, response=r, status=Status.COMPLETED) for i, r in enumerate(responses)]


def test_spellings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    for spelling in (f"{file}", f"{file}:reward_func", "my_rewards:reward_func", "my_rewards.reward_func"):
        assert load_function(spelling).__name__ == "reward_func"
    assert load_function(f"{file}:moody").__name__ == "moody"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/absent.py", "absent.py does not exist"),
        ("{}/my_rewards.py:moodie", "has no function 'moodie'; it has reward_func, moody, slow"),
        ("{}/bad.py", "bad.py fails to import: ZeroDivisionError"),
        ("{}/two.py", "defines a, b: say which one is meant"),
        ("no_such_module.function", "module no_such_module fails to import"),
        ("word", "names no function"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_anything_starts(file: Path, path: str, message: str) -> None:
    (file.parent / "bad.py").write_text("1 / 0")
    (file.parent / "two.py").write_text("def a(): ...\ndef b(): ...\n")
    with pytest.raises(PluginError, match=message):
        load_function(path.format(file.parent))


def test_asynchronous_functions_run_side_by_side(file: Path) -> None:
    batch = samples(*["abc"] * 32)
    with Grader(custom_rm_path=str(file), reward_key="score", num_workers=1, arguments={"scale": 2}) as grader:
        grader.grade(batch[:1])  # starts the process
        start = time.perf_counter()
        grader.grade(batch)
        assert time.perf_counter() - start < 6.4, "32 waits of 0.2 s one after the other"
    assert {sample.reward for sample in batch} == {6.0}
    assert batch[0].rewards == {"score": 6.0, "parts": 1.0}


@pytest.mark.parametrize("bad", ["hang", "hang in C", "die"])
def test_what_hangs_or_dies_costs_one_sample(file: Path, bad: str) -> None:
    batch = samples("ok", bad, "raise", "none", "nan", "ok")
    with Grader(custom_rm_path=f"{file}:moody", num_workers=1, timeout=0.2) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [1.0, None, None, None, None, 1.0]
    assert [sample.status is Status.FAILED for sample in batch] == [False, True, True, True, True, False]
    reasons = [sample.metadata.get("error", "") for sample in batch]
    assert reasons[1].startswith("the grading process died: " if bad == "die" else "timeout: more than 0.2 s in ")
    assert reasons[2] == f"KeyError: 'missing' (raised by moody of {file})"
    assert reasons[3].startswith("the reward function returned None: ") and reasons[4].startswith(
        "the reward function returned nan: "
    )
    assert all("moody" in reason for reason in reasons[1:5]), "every message names the function"


def test_asynchronous_functions_have_the_same_limit(file: Path) -> None:
    batch = samples("ok", "hang", "ok")
    with Grader(custom_rm_path=f"{file}:slow", num_workers=1, timeout=0.2) as grader:
        grader.grade(batch)
    assert [sample.reward for sample in batch] == [1.0, None, 1.0]
    assert batch[1].metadata["error"].startswith("timeout")


def test_a_wrong_request_is_no_failed_sample(file: Path) -> None:
    with Grader(custom_rm_path=str(file), num_workers=1, arguments={"scale": 1}) as grader:
        with pytest.raises(ValueError, match=r"a dictionary with 'score', 'parts', 'note'.*--reward-key"):
            grader.grade(samples("a"))
    with Grader(custom_rm_path=f"{file}:absent", num_workers=1) as grader:
        with pytest.raises(ValueError, match="has no function 'absent'"):
            grader.grade(samples("a"))
    with pytest.raises(ValueError, match="there is no reward"):
        Grader().grade(samples("a"))


def test_a_row_chooses_its_reward() -> None:
    boxed, plain, unknown = samples(r"1 \boxed{2}", r"2 \boxed{1}", "2")
    for sample in (boxed, plain, unknown):
        sample.label = "2"
    boxed.metadata["rm_type"] = "boxed_exact_number"
    with Grader("exact_number") as grader:
        grader.grade([boxed, plain])
        assert (boxed.reward, plain.reward) == (1.0, 0.0)
        unknown.metadata["rm_type"] = "exactly"
        with pytest.raises(ValueError, match="reward 'exactly' is unknown"):
            grader.grade([unknown])


def test_a_stuck_process_dies_with_its_parent(file: Path) -> None:
    program = f"""
from stages.rewards.grading import Grader
from storage.errors import PluginError
from storage.sample import Sample
grader = Grader(custom_rm_path="{file}:moody", num_workers=1, timeout=3600)
grader.grade([Sample("0", "g", "0", 0, response="ok")])
grader.submit(Sample("1", "g", "1", 0, response="hang in C"))
import psutil, time
print(psutil.Process().children()[0].pid, flush=True)
time.sleep(3600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)  # it has begun
    parent.kill()
    parent.wait()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE  # a container may have nobody to reap it


def test_math_runs_in_a_process() -> None:
    [sample] = samples(r"\boxed{\sqrt{8}}")
    sample.label = r"2\sqrt{2}"
    with Grader("math", num_workers=1) as grader:
        grader.grade([sample])
    assert sample.reward == 1.0


def test_a_process_that_cannot_be_started_fails_what_is_pending(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that supervises it must not end while somebody waits for grades."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("cannot allocate memory")

    with Grader(custom_rm_path=f"{file}:moody", num_workers=1) as grader:
        monkeypatch.setattr(process.subprocess, "Popen", refuse)
        with pytest.raises(OSError, match="cannot allocate memory"):
            grader.grade(samples("ok"))
