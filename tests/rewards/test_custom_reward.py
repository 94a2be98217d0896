"""User-defined rewards in every form: how they are called, rejected before a run, and how they fail."""

import array
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.stages.rewards.custom_reward import load_custom_reward
from penstock.stages.rewards.grading import Grader, check_reward_options
from penstock.stages.rewards.outcome import Outcome, parse_reward, parse_rewards
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import InputError, PluginError, RewardError
from penstock.storage.samples.sample import Sample
from tests.forked_worker import forked_workers, fresh_workers  # noqa: F401 fixtures
from tests.rewards.make_grader import make_grader, samples

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


def not_a_list(args, samples):
    return 1.0


def odd_values(args, sample):
    class Hostile:
        def __float__(self):
            raise RuntimeError("no")
        def __repr__(self):
            raise RuntimeError("no")
    numbers = {"fine": 1, "inf": float("inf"), "dict": {"other": 1}}
    return (numbers | {"hostile": Hostile(), "lambda": lambda: 1, "text": "good"})[sample.response]


def row_reward(args, sample):
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


COMPUTE = "    def compute_reward(self, prompts, responses): ..."


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def row_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package from which rows may name rewards."""
    package = tmp_path / "packages" / "row_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "graders.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(package.parent))
    for name in ("row_rewards", "row_rewards.graders"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package


def group(*responses: str) -> list[Sample]:
    return samples(*responses, prompt="p")


def outcomes(grader: Grader, samples: list[Sample]) -> list[Outcome]:
    return [future.result(30) for future in grader.submit_group(samples)]


def test_group_reward_gets_all_samples_of_a_prompt_in_one_call(file: Path) -> None:
    with make_grader(custom_rm_path=f"{file}:rank", group_rm=True, arguments={"scale": 2}) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("aaa", "a", "aa"))] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("name", [pytest.param("rank", marks=pytest.mark.full), "rank_async"])
def test_hanging_group_reward_fails_only_its_group(file: Path, name: str) -> None:
    with make_grader(custom_rm_path=f"{file}:{name}", group_rm=True, timeout=0.1, arguments={"scale": 2}) as grader:
        grader.submit_group(group("warm"))[0].result(30)
        hanging, fine = grader.submit_group(group("hang", "a", "b", "c", "d")), grader.submit_group(group("aa", "a"))
        where = "" if name == "rank_async" else file
        assert all(f"timeout: more than 0.5 s in {where}" in str(future.result(30).error) for future in hanging)
        assert [future.result(30).reward for future in fine] == ([0.5, 0.0] if name == "rank" else [2.0, 2.0])


@pytest.mark.parametrize(
    ("name", "category"), [("two_of_three", "another number of rewards than samples: "), ("not_a_list", "no list: ")]
)
def test_group_reward_without_one_value_per_sample_fails_the_group(file: Path, name: str, category: str) -> None:
    with make_grader(custom_rm_path=f"{file}:{name}", group_rm=True) as grader:
        for outcome in outcomes(grader, group("a", "b", "c")):
            assert outcome.reward is None and f"{name} of {file}" in str(outcome.error)
            assert str(outcome.error).startswith(f"the reward function returned {category}")


@pytest.mark.usefixtures("fresh_workers")
def test_value_that_is_not_a_number_fails_its_sample(file: Path) -> None:
    with make_grader(custom_rm_path=f"{file}:odd_values") as grader:
        graded = outcomes(grader, group("fine", "hostile", "lambda", "text", "inf"))
        assert [outcome.reward for outcome in graded] == [1.0, None, None, None, None]
        for outcome, part in zip(graded[1:], ("RuntimeError", "function", "'good' (str)", "returned inf")):
            assert part in str(outcome.error) and "odd_values" in str(outcome.error)
        with pytest.raises(RewardError, match=r"odd_values.*other.*--reward-key"):
            grader.grade(group("dict"))


def test_submit_group_without_a_group_reward_grades_each_sample() -> None:
    with make_grader("exact_number") as grader:
        labelled = samples("1", "2", label="1")
        assert outcomes(grader, labelled) == [grader.submit(sample).result() for sample in labelled]
        assert [outcome.reward for outcome in outcomes(grader, labelled)] == [1.0, 0.0]
        assert grader.submit_group([]) == []


@pytest.mark.full
def test_custom_rm_path_of_a_row_takes_precedence_and_one_sample_with_group_rm(file: Path, row_package: Path) -> None:
    with_path = group("a", "b")
    for sample in with_path:
        sample.metadata |= {"custom_rm_path": "row_rewards.graders:row_reward", "rm_type": "random"}
    options: dict[str, Any] = {"arguments": {"scale": 1}, "allow_row_code": "row_rewards"}
    with make_grader(custom_rm_path=f"{file}:rank", group_rm=True, **options) as grader:
        assert [outcome.reward for outcome in outcomes(grader, with_path)] == [7.0, 7.0]
        assert [outcome.reward for outcome in outcomes(grader, group("aa", "b"))] == [1.0, 0.0]
    with_path[0].metadata["custom_rm_path"] = "row_rewards.graders:absent"
    with make_grader("random", **options) as grader, pytest.raises(PluginError, match="absent"):
        grader.grade(with_path[:1])


@pytest.mark.parametrize(
    ("named", "allowed"),
    [
        ("row_rewards.graders:row_reward", None),
        ("row_rewards.graders:row_reward", "row_reward"),
        ("row_rewards_2.graders:row_reward", "row_rewards"),
        ("os:getcwd", "row_rewards"),
        ("row_rewards/../graders.py:row_reward", "row_rewards"),
        ("row_rewards", "row_rewards"),
        (["row_rewards.graders:row_reward"], "row_rewards"),
    ],
)
def test_row_code_outside_the_allowed_package_is_rejected(
    file: Path, row_package: Path, named: Any, allowed: str | None
) -> None:
    (row_package / "graders.py").write_text(f"open({str(row_package / 'ran')!r}, 'w')\n" + REWARDS)
    sample = group("a")[0]
    sample.metadata["custom_rm_path"] = named.format(file) if isinstance(named, str) else named
    with make_grader("random", allow_row_code=allowed) as grader:
        assert not grader._takes_whole_group(sample)
        if named != "row_rewards":  # names no function, which only its process finds out
            assert grader.submit(sample).result(30).request_error is not None
            assert not (row_package / "ran").exists(), "nothing was imported"
        with pytest.raises(InputError):
            grader.grade([sample])


def test_row_code_imported_into_the_allowed_package_is_rejected(row_package: Path) -> None:
    (row_package / "graders.py").write_text("from os import system\nfrom shutil import copytree\n")
    for name in ("system", "copytree"):
        with pytest.raises(PluginError):
            load_custom_reward(f"row_rewards.graders:{name}", required_package="row_rewards")


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import os\nos._exit(0)", r"os\._exit"),
        pytest.param("import sys\nsys.exit()", r"sys\.exit", marks=pytest.mark.full),
        pytest.param(
            "class Model:\n    def __init__(self): raise SystemExit(0)\n"
            "    def compute_reward(self, prompts, responses): return [1]",
            "",
            marks=pytest.mark.full,
        ),
    ],
    ids=["os._exit", "sys.exit", "constructor"],
)
def test_reward_that_exits_at_its_start_is_rejected_with_a_short_error(tmp_path: Path, source: str, named: str) -> None:
    path = tmp_path / "exiting.py"
    path.write_text(source if "class" in source else f"{source}\ndef reward_func(args, sample): return 1.0\n")
    if named:  # the check does not construct a class
        with pytest.raises(PluginError, match=named) as error:
            check_reward_options(RolloutConfig(custom_rm_path=str(path)))
        assert "exiting.py" in str(error.value) and len(str(error.value)) < 400
    with make_grader(custom_rm_path=str(path)) as grader:
        with pytest.raises(PluginError, match="." if named else r"exiting\.py"):
            grader.grade(group("a"))


@pytest.mark.full
def test_class_reward_is_constructed_once_per_process(tmp_path: Path) -> None:
    path, log = tmp_path / "model.py", tmp_path / "log"
    path.write_text(MODEL)
    check_reward_options(RolloutConfig(custom_rm_path=str(path), rm_model_path=str(log)))
    assert not log.exists(), "the check must not construct the class"
    with make_grader(custom_rm_path=str(path), rm_model_path=str(log)) as grader:
        assert [outcome.reward for outcome in outcomes(grader, group("a", "bb"))] == [202.0, 203.0], "one call"
        assert grader.submit(group("a")[0]).result(30).reward == 102.0
        assert log.read_text().count("loaded") == 1
        for outcome in outcomes(grader, group("die", "a")):
            assert "the grading process died" in str(outcome.error) and "model.py" in str(outcome.error)
        assert outcomes(grader, group("a"))[0].reward == 102.0
        assert log.read_text().count("loaded") == 2
    log.unlink()
    with make_grader(custom_rm_path=str(path), rm_model_path=f"{tmp_path}/absent/log") as grader:
        with pytest.raises(PluginError, match=r"CustomRewardModel of .*model\.py.*FileNotFoundError"):
            grader.grade(group("a"))


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def f(completions, **kw): ...", r"\(completions, .*f\(args, sample\) -> float .*docs/coming-from.md"),
        ("def f(args, sample, extra): ...", "extra"),
        ("async def f(args, sample):\n    yield 1", "generator"),
        ("class F: ...", "compute_reward"),
        ("class F:\n    def compute_reward(self, prompts): ...", r"compute_reward.*\(self, prompts\)"),
        (f"class F:\n    def __init__(self, model_path): ...\n{COMPUTE}", "'model_path'.*--rm-model-path"),
        (f"class F:\n    def __init__(self, *, size): ...\n{COMPUTE}", "constructor.*size"),
    ],
)
def test_reward_with_a_wrong_signature_is_rejected_at_load(tmp_path: Path, source: str, part: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(PluginError, match=part):
        load_custom_reward(str(path))
    if "def f(" in source:
        with pytest.raises(PluginError, match=r"f\(args, samples\) -> list of floats|generator"):
            load_custom_reward(str(path), group_rm=True)


@pytest.mark.parametrize(
    "source",
    [
        "async def f(args, sample, **kwargs): ...",
        "f = lambda *args: 1.0",
        f"class F:\n    def __init__(self, path='m'): ...\n    async {COMPUTE.lstrip()}",
        f"def load(): ...\nclass F:\n{COMPUTE}",
        "def helper(): ...\ndef reward_func(args, sample): ...",
    ],
)
def test_reward_with_a_right_signature_is_accepted(tmp_path: Path, source: str) -> None:
    path = tmp_path / "good.py"
    path.write_text(source)
    assert load_custom_reward(str(path)).is_class == ("class" in source)
    assert load_custom_reward(str(path)).is_async == ("async" in source)


FORMS = r"""
import asyncio, functools


async def half(args, sample, scale=1.0):
    await asyncio.sleep(0)
    return 0.5 * scale


def returns_task_of_task(args, sample):
    async def outer():
        return half(args, sample)
    return outer()


def runs_its_own_loop(args, sample):
    return asyncio.run(half(args, sample))


partial_of_async = functools.partial(half, scale=1.0)


class Callable:
    async def __call__(self, args, sample):
        return await half(args, sample)


class ReturnsAwaitable:
    loop = None

    def __call__(self, args, sample):
        async def compute():
            loop = asyncio.get_running_loop()
            assert self.loop in (None, loop), "a client that the reward keeps belongs to one loop"
            self.loop = loop
            return 0.5
        return compute()


instance, awaiting_instance = Callable(), ReturnsAwaitable()


def one(args, sample):
    return globals()[sample.response](args, sample)


def nothing(args, sample):
    return asyncio.sleep(0)


async def halves(args, samples):
    return [0.5] * len(samples)


group_coroutine = lambda args, samples: halves(args, samples)


def several(args, samples):
    return globals()[samples[0].response](args, samples)


async def coroutine_of_coroutines(args, samples):
    return tuple(half(args, sample) for sample in samples)


class Model:
    def compute_reward(self, prompts, responses):
        return halves(None, responses)
"""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms") / "forms.py"
    path.write_text(FORMS)
    return path


@pytest.fixture(scope="module")
def one_by_one(forms: Path) -> Iterator[Grader]:
    """A grader whose reward calls the function that a response names."""
    with make_grader(custom_rm_path=f"{forms}:one") as grader:
        yield grader


@pytest.mark.parametrize(
    "name",
    [
        *("returns_task_of_task", "runs_its_own_loop", "partial_of_async", "instance", "awaiting_instance"),
    ],
)
def test_any_awaitable_is_awaited(one_by_one: Grader, name: str) -> None:
    found = outcomes(one_by_one, group(name, name))
    assert [(outcome.reward, outcome.error) for outcome in found] == [(0.5, None)] * 2


@pytest.mark.parametrize("name", ["partial_of_async", pytest.param("Model", marks=pytest.mark.full)])
def test_loaded_reward_may_return_awaitables(forms: Path, name: str) -> None:
    with make_grader(custom_rm_path=f"{forms}:{name}") as grader:
        found = outcomes(grader, group("a", "b"))
    assert [(outcome.reward, outcome.error) for outcome in found] == [(0.5, None)] * 2


def test_awaitable_of_none_fails_in_one_sentence(one_by_one: Grader) -> None:
    [outcome] = outcomes(one_by_one, group("nothing"))
    assert str(outcome.error).startswith("the reward function returned None")


def test_group_reward_may_return_awaitables(forms: Path) -> None:
    with make_grader(custom_rm_path=f"{forms}:several", group_rm=True) as grader:
        for name in ("group_coroutine", "coroutine_of_coroutines"):
            found = outcomes(grader, group(name, "b", "c"))
            assert [(outcome.reward, outcome.error) for outcome in found] == [(0.5, None)] * 3, name


@pytest.mark.parametrize(
    "value",
    [
        *(np.array([[0.5]], dtype=np.float32), np.array(0.5), Decimal("0.5"), Fraction(1, 2)),
        *(torch.tensor(0.5, requires_grad=True), torch.tensor([0.5], dtype=torch.bfloat16)),
    ],
    ids=lambda value: repr(value),
)
def test_number_of_any_type_is_a_reward(value: Any) -> None:
    assert parse_reward(value, None, "f") == Outcome(reward=0.5)
    assert parse_reward({"score": value, "other": value}, "score", "f").rewards == {"score": 0.5, "other": 0.5}


def test_true_is_the_reward_1() -> None:
    for value in (True, np.array([True]), torch.tensor(True)):
        assert parse_reward(value, None, "f") == Outcome(reward=1.0)


@pytest.mark.parametrize("key", ["train_reward", "overlong_penalty"])
def test_component_that_an_option_sets_is_refused(key: str) -> None:
    error = parse_reward({"score": 1.0, key: 0.0}, "score", "f").request_error
    assert error is not None and f"the key {key!r}, which is reserved for --" in error


@pytest.mark.parametrize(
    "value",
    [
        *(np.array([0.5, 1.0]), np.array(["0.5"]), "0.5", [0.5], 1j, torch.tensor([]), np.datetime64("2024-01-31")),
        lambda: 1,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_value_that_is_not_one_number_fails_in_one_sentence(value: Any) -> None:
    error = str(parse_reward(value, None, "f").error)
    assert error.startswith("the reward function returned no number: f returned ") and "\n" not in error


@pytest.mark.parametrize(
    "values",
    [
        *(np.full((3, 1), 0.5), torch.full((3,), 0.5), [np.array([0.5])] * 3, array.array("d", [0.5] * 3)),
    ],
    ids=lambda value: f"{type(value).__module__}-{getattr(value, 'shape', '')}",
)
def test_group_reward_may_be_an_array_or_tensor(values: Any) -> None:
    assert parse_rewards(values, 3, None, "f") == [Outcome(reward=0.5)] * 3
