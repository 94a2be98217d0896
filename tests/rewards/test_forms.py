"""Rewards of the user's in every form: what is called with what, what is refused before anything starts, what a mistake costs."""

from pathlib import Path

import pytest

from stages.rewards.forms import find_form
from stages.rewards.grading import Grader, check_reward
from stages.rewards.outcome import Outcome
from storage.sample import Sample, Status

REWARDS = r"""
import asyncio, os, time


def rank(args, samples, **kwargs):
    if samples[0].response == "hang":
        time.sleep(3600)
    order = sorted(samples, key=lambda sample: len(sample.response))
    return [order.index(sample) / args.scale for sample in samples]


async def rank_async(args, samples):
    await asyncio.sleep(3600 if samples[0].response == "hang" else 0)
    return tuple(float(len(samples)) for sample in samples)


def two_of_three(args, samples):
    return [1.0] * 2


def no_list(args, samples):
    return 1.0


def odd_values(args, sample):
    class Rude:
        def __float__(self):
            raise RuntimeError("no")
        def __repr__(self):
            raise RuntimeError("no")
    return {"rude": Rude(), "lambda": lambda: 1, "text": "good", "inf": float("inf"), "fine": 1, "dict": {"other": 1}}[sample.response]


def of_the_row(args, sample):
    return 7.0
"""

MODEL = r"""
import os


def load_model(path):
    print("loaded", path, file=open(path, "a"))
    return len


class CustomRewardModel:
    def __init__(self, model_path):
        self.model = load_model(model_path)
        self.pid = os.getpid()

    def compute_reward(self, prompts, responses):
        if "die" in responses:
            os._exit(1)
        return [self.model(prompt + response) + 100 * len(responses) for prompt, response in zip(prompts, responses)]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def group(*responses: str) -> list[Sample]:
    return [Sample(f"{i}", "g", f"{i}", 0, prompt="p", response=r, status=Status.COMPLETED) for i, r in enumerate(responses)]


def outcomes(grader: Grader, samples: list[Sample]) -> list[Outcome]:
    return [future.result(30) for future in grader.submit_group(samples)]


def test_a_group_is_graded_in_one_call(file: Path) -> None:
    with Grader(custom_rm_path=f"{file}:rank", group_rm=True, num_workers=1, arguments={"scale": 2}) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("aaa", "a", "aa"))] == [1.0, 0.0, 0.5]
    with Grader(custom_rm_path=f"{file}:rank_async", group_rm=True, num_workers=1) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("a", "b"))] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["rank", "rank_async"])
def test_a_group_that_hangs_costs_the_group(file: Path, name: str) -> None:
    with Grader(custom_rm_path=f"{file}:{name}", group_rm=True, num_workers=1, timeout=0.1, arguments={"scale": 2}) as grader:
        grader.submit_group(group("warm"))[0].result(30)
        hanging, fine = grader.submit_group(group("hang", "a", "b", "c", "d")), grader.submit_group(group("aa", "a"))
        assert all(
            f"timeout: more than 0.5 s in {'' if name == 'rank_async' else file}" in str(f.result(30).error) for f in hanging
        )
        assert [future.result(30).error for future in fine] == [None, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two_of_three", "another number of rewards than samples: two_of_three of {} gave 2 for 3"),
        ("no_list", "no list: no_list of {} gave 1.0 (float) for 3 samples"),
    ],
)
def test_a_list_of_the_wrong_length_fails_the_group(file: Path, name: str, message: str) -> None:
    with Grader(custom_rm_path=f"{file}:{name}", group_rm=True, num_workers=1) as grader:
        for outcome in outcomes(grader, group("a", "b", "c")):
            assert outcome.reward is None and message.format(file) in str(outcome.error)


def test_values_that_are_no_numbers_fail_their_sample(file: Path) -> None:
    with Grader(custom_rm_path=f"{file}:odd_values", num_workers=1) as grader:
        found = outcomes(grader, group("fine", "rude", "lambda", "text", "inf"))
        assert [outcome.reward for outcome in found] == [1.0, None, None, None, None]
        for outcome, part in zip(found[1:], ("cannot be shown", "function", "'good' (str)", "returned inf")):
            assert part in str(outcome.error) and "odd_values" in str(outcome.error)
        with pytest.raises(ValueError, match=r"odd_values.* is a dictionary with 'other'.*--reward-key \(now None\)"):
            grader.grade(group("dict"))


def test_the_same_as_submit_where_no_group_form_is_in_use(file: Path) -> None:
    with Grader("exact_number") as grader:
        samples = group("1", "2")
        samples[0].label = samples[1].label = "1"
        assert outcomes(grader, samples) == [grader.submit(sample).result() for sample in samples]
        assert [outcome.reward for outcome in outcomes(grader, samples)] == [1.0, 0.0]
        assert grader.submit_group([]) == []
    with Grader(custom_rm_path=f"{file}:of_the_row", num_workers=1) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("1", "2"))] == [7.0, 7.0]


def test_a_row_names_its_own_function(file: Path) -> None:
    """Also under --group-rm, where it still takes one sample; and before everything else."""
    own = group("a", "b")
    for sample in own:
        sample.metadata |= {"custom_rm_path": f"{file}:of_the_row", "rm_type": "random"}
    with Grader(custom_rm_path=f"{file}:rank", group_rm=True, num_workers=1, arguments={"scale": 1}) as grader:
        assert [outcome.reward for outcome in outcomes(grader, own)] == [7.0, 7.0]
        assert [outcome.reward for outcome in outcomes(grader, group("aa", "b"))] == [1.0, 0.0]
    own[0].metadata["custom_rm_path"] = f"{file}:absent"
    with Grader("random", num_workers=1) as grader, pytest.raises(ValueError, match="has no function 'absent'"):
        grader.grade(own[:1])


def test_a_class_is_constructed_once_per_process(tmp_path: Path) -> None:
    path, log = tmp_path / "model.py", tmp_path / "log"
    path.write_text(MODEL)
    check_reward(None, str(path), rm_model_path=str(log))
    assert not log.exists(), "looking at it constructs nothing"
    with Grader(custom_rm_path=str(path), rm_model_path=str(log), num_workers=1) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("a", "bb"))] == [202.0, 203.0], "a group is one call"
        assert grader.submit(group("a")[0]).result(30).reward == 102.0
        assert log.read_text().count("loaded") == 1
        died = outcomes(grader, group("die", "a"))
        assert all("the grading process died" in str(outcome.error) and "model.py" in str(outcome.error) for outcome in died)
        assert outcomes(grader, group("a"))[0].reward == 102.0
        assert log.read_text().count("loaded") == 2
    log.unlink()
    with Grader(custom_rm_path=str(path), rm_model_path=f"{tmp_path}/absent/log", num_workers=1) as grader:
        with pytest.raises(ValueError, match=r"CustomRewardModel of .*model.py: its constructor raises FileNotFoundError"):
            grader.grade(group("a"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(sample): ...", r"f of .* has the signature \(sample\), but is called with \(args, sample\)"),
        ("def f(args, *, sample): ...", r"is called with \(args, sample\)"),
        ("def f(args, sample, extra): ...", "missing a required argument: 'extra'"),
        ("def f(args, sample):\n    yield 1", "f of .* is a generator and would never run: return"),
        ("async def f(args, sample):\n    yield 1", "is a generator"),
        ("class F: ...", r"F of .* is a class without compute_reward\(prompts, responses\)"),
        ("class F:\n    def compute_reward(self, prompts): ...", r"compute_reward has the signature \(self, prompts\)"),
        (
            "class F:\n    def __init__(self, model_path): ...\n    def compute_reward(self, prompts, responses): ...",
            "wants 'model_path' for its constructor: give --rm-model-path",
        ),
        (
            "class F:\n    def __init__(self, *, size): ...\n    def compute_reward(self, prompts, responses): ...",
            "its constructor has the signature .* missing a required",
        ),
    ],
)
def test_what_cannot_be_called_is_said_before_anything_starts(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(ValueError, match=message):
        check_reward(None, str(path))


@pytest.mark.parametrize(
    "source",
    [
        "def f(args, sample): ...",
        "async def f(args, sample, **kwargs): ...",
        "f = lambda *words: 1.0",
        "class F:\n    def compute_reward(self, prompts, responses): ...",
        "class F:\n    def __init__(self, model_path='m'): ...\n    async def compute_reward(self, prompts, responses): ...",
        "def load(): ...\nclass F:\n    def compute_reward(self, prompts, responses): ...",
        "def helper(): ...\ndef reward_func(args, sample): ...",
    ],
)
def test_what_can_be_called_is_accepted(tmp_path: Path, source: str) -> None:
    path = tmp_path / "good.py"
    path.write_text(source)
    assert find_form(str(path)).is_class == ("class" in source)
    assert find_form(str(path)).is_async == ("async" in source)
