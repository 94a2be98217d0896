"""Checks of a reward before a run starts: on rows of the data, and by calling it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.stages.rewards import grading
from penstock.stages.rewards.builtin import exact_number, gpqa
from penstock.stages.rewards.reward_preflight import (
    RewardRow,
    check_reward_rows,
    try_reward_on_test_samples,
    unrequested_format_warning,
    unrewarded_labels_warning,
)
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import InputError, RewardError
from penstock.storage.samples.sample import Sample
from tests.forked_worker import forked_workers  # noqa: F401 fixture

GOOD = RewardRow("train.jsonl row 0", "5", prompt="2 + 3 =")
EVIL = RewardRow("d.jsonl row 7", "5", {"custom_rm_path": "evil.py:f"})
FOUR = {"choices": ["a cell", "the Sun", "ion", "Moon"]}


def options(**fields: Any) -> RolloutConfig:
    return RolloutConfig(**{"reward_timeout": 1.0, "reward_start_timeout": 30.0, **fields})


def reward_file(directory: Path, code: str) -> str:
    (directory / "mine.py").write_text(code)
    return str(directory / "mine.py")


@pytest.mark.parametrize(
    ("fields", "row", "named"),
    [
        ({}, GOOD, "--rm-type"),
        ({"rm_type": "math"}, RewardRow("d.jsonl row 7", "5", {"rm_type": "mathh"}), "mathh"),
        ({"rm_type": "math"}, RewardRow("d.jsonl row 7"), "--label-key"),
        ({"rm_type": "math", "label_key": "answer"}, RewardRow("d.jsonl row 7", " "), "answer"),
        ({"rm_type": "boxed_f1"}, RewardRow("d.jsonl row 7"), "boxed_f1"),
        ({"rm_type": "dapo", "reward_key": "score"}, RewardRow("d.jsonl row 7", "East"), "East"),
        ({"rm_type": "math"}, RewardRow("d.jsonl row 7", "5", {"rm_type": "dapo"}), "--reward-key"),
        ({"rm_type": "math"}, RewardRow("d.jsonl row 7", "5", {"rm_type": "remote_rm"}), "--rm-url"),
        ({"rm_type": "gpqa"}, RewardRow("d.jsonl row 7", "", {"choices": ["a", "b"]}), "gpqa"),
        ({"rm_type": "ifbench"}, RewardRow("d.jsonl row 7"), "instruction_id_list"),
        ({"rm_type": "ifbench"}, RewardRow("d.jsonl row 7", "", {"instruction_id_list": ["no:such"]}), "no:such"),
        ({"rm_type": "math"}, EVIL, "--allow-row-code"),
        ({"custom_rm_path": "good.py"}, EVIL, "--allow-row-code"),
        ({"rm_type": "math", "allow_row_code": "mine"}, EVIL, "evil.py"),
    ],
)
def test_row_that_cannot_be_graded_is_rejected_by_name(fields: dict[str, Any], row: RewardRow, named: str) -> None:
    with pytest.raises(InputError) as error:
        check_reward_rows(options(**fields), [row])
    assert named in str(error.value) and str(error.value).startswith(row.where) and len(str(error.value)) < 400
    assert error.value.code == ("plugin" if "custom_rm_path" in row.metadata else "reward")


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"rm_type": "math"}, GOOD),
        ({"rm_type": "random"}, RewardRow("r")),
        ({}, RewardRow("r", "5", {"rm_type": "boxed_math"})),
        ({"custom_rm_path": "mine.py"}, RewardRow("r")),
        ({"rm_type": "gpqa"}, RewardRow("r", "", {"correct_letter": "B"})),
        ({"rm_type": "ifbench"}, RewardRow("r", "", {"instruction_id_list": ["punctuation:no_comma"]})),
        ({"rm_type": "dapo", "reward_key": "score"}, RewardRow("r", "3.5")),
        # labels that only look like JSON
        *(({"rm_type": "math"}, RewardRow("r", label)) for label in ("{1, 2}", "[1, 2]", "[0, 1)")),
        # labels that name a choice, by its letter, index or text
        *(({"rm_type": "gpqa"}, RewardRow("r", label, FOUR)) for label in ("D", "3", "3.0", "moon", "a paraphrase")),
        ({"rm_type": "gpqa"}, RewardRow("r", "E")),
        ({"rm_type": "gpqa"}, RewardRow("r", "9", FOUR | {"correct_letter": "B"})),
        ({"rm_type": "math", "allow_row_code": "mine"}, RewardRow("r", "", {"custom_rm_path": "mine.graders:f"})),
    ],
)
def test_row_that_can_be_graded_is_accepted(fields: dict[str, Any], row: RewardRow) -> None:
    check_reward_rows(options(**fields), [row])


@pytest.mark.parametrize("label", ["1,234", "1.5", "1e3", "5 apples", "NaN"])
def test_label_that_no_last_integer_can_equal_is_rejected(label: str) -> None:
    row = RewardRow("d.jsonl row 7", label)
    for name in ("exact_number", "boxed_exact_number"):
        with pytest.raises(RewardError, match=r"^d.jsonl row 7: the label .* is not an integer"):
            check_reward_rows(options(rm_type=name), [row])
    assert unrewarded_labels_warning(options(rm_type="math"), [row]) is None


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        (" 5\n", "so 5", 1),
        ("2.00", "it is 2", 1),
        ("2.0", "it is 3", 0),
        ("+7", "7", 1),
        ("-3.", "-3", 1),
        ("7", "007", 0),
    ],
)
def test_label_that_is_an_integer_can_be_equalled(label: str, response: str, reward: float) -> None:
    check_reward_rows(options(rm_type="exact_number"), [RewardRow("r", label)])
    assert exact_number(Sample("s", "g", "s", 0, response=response, label=label)) == reward


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("math", '{"style": "rule", "ground_truth": "4"}'),
        ("gpqa", '["4", "four"]'),
        ("boxed_math", ' [{"a": 1}]'),
        ("dapo", "{}"),
    ],
)
def test_label_that_is_a_structure_is_rejected_by_rewards_that_compare_text(name: str, label: str) -> None:
    with pytest.raises(RewardError, match=r"^d.jsonl row 7: the label .*--label-key COLUMN.ENTRY"):
        check_reward_rows(options(rm_type=name, reward_key="score"), [RewardRow("d.jsonl row 7", label)])
    check_reward_rows(options(custom_rm_path="mine.py"), [RewardRow("r", label)])
    check_reward_rows(options(rm_type="random"), [RewardRow("r", label)])


@pytest.mark.parametrize(
    ("label", "metadata"),
    [("4", FOUR), ("E", FOUR), ("X", {"choices": {"P": "a", "Q": "b"}})],
)
def test_label_that_names_none_of_the_choices_is_rejected(label: str, metadata: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"^d.jsonl row 7: the label '.' names none of the . choices"):
        check_reward_rows(options(rm_type="gpqa"), [RewardRow("d.jsonl row 7", label, metadata)])


def test_index_of_a_choice_may_be_stored_as_a_float() -> None:
    assert gpqa(Sample("s", "g", "s", 0, response="The answer is B.", label="1.0", metadata=FOUR)) == 1


@pytest.mark.parametrize(
    ("name", "labels", "warned"),
    [
        ("f1", ["the", "...", "a"], True),
        ("f1", ["the", "Paris"], False),
        ("math", [r"\frac{1}{2", "}{"], True),
        ("math", [r"\frac{1}{2", "3"], False),
        ("deepscaler", ["{{"], True),
        ("boxed_f1", ["an", "the"], True),
        ("gpqa", ["!!", "?"], True),
        ("dapo", ["34.0", "-1"], False),
        ("random", ["", "the"], False),
        (None, ["the"], False),
    ],
)
def test_warning_if_no_label_of_the_sample_can_be_rewarded(name: str | None, labels: list[str], warned: bool) -> None:
    rows = [RewardRow(f"d.jsonl row {index}", label) for index, label in enumerate(labels)]
    fields = {"rm_type": name} if name else {"custom_rm_path": "mine.py"}
    warning = unrewarded_labels_warning(options(**fields), rows)
    assert (warning is not None) is warned
    assert not warned or ("d.jsonl row 0" in str(warning) and "--label-key" in str(warning))


@pytest.mark.parametrize("package", ["", "mine.py/x", "a..b"])
def test_allow_row_code_that_is_not_a_package_name_is_rejected(package: str) -> None:
    with pytest.raises(ValueError, match="--allow-row-code"):
        options(allow_row_code=package)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return 'good'", "'good'"),
        ("return {'score': 1.0}", "--reward-key"),
        ("while True: pass", "timeout"),
        pytest.param("import os; os._exit(0)", "died", marks=pytest.mark.full),
        pytest.param("raise SystemExit(0)", "SystemExit", marks=pytest.mark.full),
    ],
)
def test_reward_that_fails_every_test_sample_is_rejected(
    tmp_path: Path, body: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "GRACE_PERIOD", 0.0)
    path = reward_file(tmp_path, f"def reward_func(args, sample):\n    {body}\n")
    with pytest.raises(RewardError) as error:
        try_reward_on_test_samples(options(custom_rm_path=path, reward_timeout=0.1), [GOOD])
    assert named in str(error.value) and "\n" not in str(error.value)


def test_reward_that_fails_without_a_label_is_told_the_option(tmp_path: Path) -> None:
    code = "def reward_func(args, sample): return float(int(sample.label) == 5)\n"
    config = options(custom_rm_path=reward_file(tmp_path, code))
    with pytest.raises(RewardError, match=r"fix the reward, or name the column of its labels with --label-key;"):
        try_reward_on_test_samples(config, [RewardRow("r")])
    assert len(try_reward_on_test_samples(config, [GOOD])) == 3


def test_reward_is_called_on_finished_samples_and_may_fail_some(tmp_path: Path) -> None:
    code = (
        "def reward_func(args, sample):\n"
        "    assert args.rollout_batch_size == 32 and sample.prompt == '2 + 3 =' and sample.response_length > 0\n"
        "    return 1 / len(sample.response)\n"
    )
    config = options(custom_rm_path=reward_file(tmp_path, code))
    tried = try_reward_on_test_samples(config, [GOOD], config.model_dump())
    assert [(response, outcome.reward) for response, outcome in tried[1:]] == [("5", 1.0), (r"\boxed{5}", 1 / 9)]
    assert tried[0][0] == "" and "ZeroDivisionError" in tried[0][1].error, (
        "one failed sample must not reject the reward"
    )


def test_group_reward_is_called_on_one_group(tmp_path: Path) -> None:
    checked = "    assert len({s.label for s in samples}) == 1\n    return [1.0] * len(samples)\n"
    config = options(custom_rm_path=reward_file(tmp_path, f"def reward_func(args, samples):\n{checked}"), group_rm=True)
    tried = try_reward_on_test_samples(config, [GOOD, RewardRow("r", "6")])
    assert [outcome.reward for _, outcome in tried] == [1.0, 1.0, 1.0]


def test_reward_of_a_row_is_called_if_row_code_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "row_tried").mkdir()
    (tmp_path / "row_tried" / "graders.py").write_text("def broken(args, sample): raise KeyError('gone')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = RewardRow("r", "5", {"custom_rm_path": "row_tried.graders:broken"})
    with pytest.raises(RewardError, match="KeyError"):
        try_reward_on_test_samples(options(rm_type="math", allow_row_code="row_tried"), [row])
    with pytest.raises(InputError, match="--allow-row-code"):
        try_reward_on_test_samples(options(rm_type="math"), [row])


def test_reward_server_that_does_not_listen_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/grade"
        assert try_reward_on_test_samples(options(rm_type="remote_rm", rm_url=url), [GOOD]) == []
    for wrong in (url, "nonsense"):
        with pytest.raises(RewardError, match="--rm-url"):
            try_reward_on_test_samples(options(rm_type="remote_rm", rm_url=wrong), [GOOD])


@pytest.mark.parametrize(("name", "rewards"), [("math", [0, 0, 1]), ("exact_number", [0, 1, 1])])
def test_built_in_reward_grades_the_test_responses(name: str, rewards: list[float]) -> None:
    tried = try_reward_on_test_samples(options(rm_type=name), [GOOD])
    assert [response for response, _ in tried] == ["", "5", r"\boxed{5}"]
    assert [outcome.reward for _, outcome in tried] == rewards
    assert try_reward_on_test_samples(options(rm_type=name), []) == []


@pytest.mark.parametrize(
    ("fields", "prompts", "template", "named"),
    [
        ({"rm_type": "math"}, ["2 + 3 =", "1 + 1 ="], "", r"none of the first 2 prompts contains \boxed"),
        ({"rm_type": "boxed_f1"}, ["capital of Kenya?"], "{{ messages }}", "boxed_f1"),
        ({"rm_type": "dapo", "reward_key": "score"}, ["2 + 3 ="], "", "Answer:"),
        ({"rm_type": "math"}, ["2 + 3 =", r"1 + 1 = ? Use \boxed{}."], "", None),
        ({"rm_type": "math"}, ["2 + 3 ="], r"put your final answer within \\boxed{}", None),
        ({"rm_type": "exact_number"}, ["2 + 3 ="], "", None),
        ({"custom_rm_path": "mine.py"}, ["2 + 3 ="], "", None),
    ],
)
def test_warning_if_no_prompt_asks_for_the_graded_format(
    fields: dict[str, Any], prompts: list[str], template: str, named: str | None
) -> None:
    rows = [RewardRow("d.jsonl row 0", "5", prompt=prompt) for prompt in prompts]
    warning = unrequested_format_warning(options(**fields), rows, template)
    assert warning is None if named is None else named in (warning or "")


def test_warning_names_the_reward_of_the_rows() -> None:
    rows = [GOOD, RewardRow("d.jsonl row 1", "5", {"rm_type": "math"}, "2 + 3 =")]
    warning = unrequested_format_warning(options(rm_type="exact_number"), rows)
    assert warning is not None and "the reward math" in warning and "first 1 prompts" in warning
    rows[1].metadata["custom_rm_path"] = "package.module:function"
    assert unrequested_format_warning(options(rm_type="exact_number"), rows) is None
