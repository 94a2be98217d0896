"""Rewards of the user's in every form: what is called with what, what is refused before anything starts, what a mistake costs."""

import sys
from pathlib import Path
from typing import Any

import pytest

from stages.rewards.forms import find_form
from stages.rewards.grading import Grader, check_reward
from stages.rewards.outcome import Outcome
from storage.errors import InputError, PluginError
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


@pytest.fixture
def row_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package from which rows may name rewards."""
    package = tmp_path / "packages" / "row_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "graders.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in ("row_rewards", "row_rewards.graders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


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


def test_a_row_names_its_own_function(file: Path, row_package: Path) -> None:
    """Also under --group-rm, where it still takes one sample; and before everything else."""
    own = group("a", "b")
    for sample in own:
        sample.metadata |= {"custom_rm_path": "row_rewards.graders:of_the_row", "rm_type": "random"}
    options: dict[str, Any] = {"num_workers": 1, "arguments": {"scale": 1}, "allow_row_code": "row_rewards"}
    with Grader(custom_rm_path=f"{file}:rank", group_rm=True, **options) as grader:
        assert [outcome.reward for outcome in outcomes(grader, own)] == [7.0, 7.0]
        assert [outcome.reward for outcome in outcomes(grader, group("aa", "b"))] == [1.0, 0.0]
    own[0].metadata["custom_rm_path"] = "row_rewards.graders:absent"
    with Grader("random", **options) as grader, pytest.raises(PluginError, match="absent"):
        grader.grade(own[:1])


@pytest.mark.parametrize(
    ("named", "allowed"),
    [
        ("{}:of_the_row", None),
        ("{}:of_the_row", "row_rewards"),
        ("row_rewards.graders:of_the_row", None),
        ("row_rewards.graders:of_the_row", "row_reward"),
        ("row_rewards_2.graders:of_the_row", "row_rewards"),
        ("os:getcwd", "row_rewards"),
        ("row_rewards/../graders.py:of_the_row", "row_rewards"),
        ("row_rewards.graders:os.system", "row_rewards"),
        ("row_rewards", "row_rewards"),
        (["row_rewards.graders:of_the_row"], "row_rewards"),
    ],
)
def test_row_code_is_refused_unless_it_is_below_the_allowed_package(
    file: Path, row_package: Path, named: Any, allowed: str | None
) -> None:
    (row_package / "graders.py").write_text(f"open({str(row_package / 'ran')!r}, 'w')\n" + REWARDS)
    sample = group("a")[0]
    sample.metadata["custom_rm_path"] = named.format(file) if isinstance(named, str) else named
    with Grader("random", num_workers=1, allow_row_code=allowed) as grader:
        assert not grader._grades_together(sample)
        if named != "row_rewards":  # which names no function: its process says so
            assert grader.submit(sample).result(30).wrong is not None
            assert not (row_package / "ran").exists(), "nothing was imported"
        with pytest.raises(InputError):
            grader.grade([sample])


def test_row_code_must_be_defined_in_the_package_not_only_imported_there(row_package: Path) -> None:
    (row_package / "graders.py").write_text("from os import system\nfrom shutil import copytree\n")
    for name in ("system", "copytree"):
        with pytest.raises(PluginError):
            find_form(f"row_rewards.graders:{name}", within="row_rewards")


EXITS = {
    "raise SystemExit(0)": "sys.exit", "import sys\nsys.exit()": "sys.exit", "import os\nos._exit(0)": "os._exit",
}  # fmt: skip


@pytest.mark.parametrize(
    "source", [pytest.param(source, marks=() if "_exit" in source else pytest.mark.full) for source in EXITS]
)
def test_reward_that_exits_at_import_is_refused_in_one_sentence(tmp_path: Path, source: str) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(f"{source}\ndef reward_func(args, sample): return 1.0\n")
    with pytest.raises(PluginError) as refused:
        check_reward(None, str(path))
    assert EXITS[source] in str(refused.value) and "leaving.py" in str(refused.value) and len(str(refused.value)) < 400
    with Grader(custom_rm_path=str(path), num_workers=1) as grader, pytest.raises(PluginError):
        grader.grade(group("a"))


@pytest.mark.parametrize("spelling", [pytest.param("def", marks=pytest.mark.full), "async def"])
def test_reward_that_exits_when_called_fails_its_sample(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(
        f"import sys\n{spelling} reward_func(args, sample):\n    sys.exit(0) if sample.response == 'exit' else None\n    return 1.0\n"
    )
    with Grader(custom_rm_path=str(path), num_workers=1) as grader:
        samples = group("a", "exit", "b")
        grader.grade(samples)
    assert [sample.status is Status.FAILED for sample in samples] == [False, True, False]
    assert "SystemExit" in samples[1].metadata["error"]


@pytest.mark.full
def test_class_whose_constructor_exits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leaving.py"
    path.write_text(
        "class Model:\n    def __init__(self): raise SystemExit(0)\n    def compute_reward(self, prompts, responses): return [1]\n"
    )
    with Grader(custom_rm_path=str(path), num_workers=1) as grader, pytest.raises(PluginError, match=r"leaving\.py"):
        grader.grade(group("a"))


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
    with pytest.raises(PluginError, match=message):
        find_form(str(path))


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
