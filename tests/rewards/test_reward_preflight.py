"""What is said about a reward before anything starts: on sampled rows, and by trying it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from stages.rewards.preflight import Row, check_rows, try_reward
from stages.rollout.config import RolloutConfig
from storage.errors import InputError, PluginError, RewardError

GOOD = Row("train.jsonl row 0", "5", prompt="2 + 3 =")


def options(**fields: Any) -> RolloutConfig:
    return RolloutConfig(**{"reward_timeout": 1.0, "reward_start_timeout": 30.0, **fields})


@pytest.mark.parametrize(
    ("fields", "row", "named"),
    [
        ({}, GOOD, "--rm-type"),
        ({"rm_type": "math"}, Row("d.jsonl row 7", "5", {"rm_type": "mathh"}), "mathh"),
        ({"rm_type": "math"}, Row("d.jsonl row 7"), "--label-key"),
        ({"rm_type": "math", "label_key": "answer"}, Row("d.jsonl row 7", " "), "answer"),
        ({"rm_type": "boxed_f1"}, Row("d.jsonl row 7"), "boxed_f1"),
        ({"rm_type": "dapo", "reward_key": "score"}, Row("d.jsonl row 7", "East"), "East"),
        ({"rm_type": "math"}, Row("d.jsonl row 7", "5", {"rm_type": "dapo"}), "--reward-key"),
        ({"rm_type": "math"}, Row("d.jsonl row 7", "5", {"rm_type": "remote_rm"}), "--rm-url"),
        ({"rm_type": "gpqa"}, Row("d.jsonl row 7", "", {"choices": ["a", "b"]}), "gpqa"),
        ({"rm_type": "ifbench"}, Row("d.jsonl row 7"), "instruction_id_list"),
        ({"rm_type": "ifbench"}, Row("d.jsonl row 7", "", {"instruction_id_list": ["no:such"]}), "no:such"),
        ({"rm_type": "math"}, Row("d.jsonl row 7", "5", {"custom_rm_path": "evil.py:f"}), "--allow-row-code"),
        ({"custom_rm_path": "good.py"}, Row("d.jsonl row 7", "5", {"custom_rm_path": "evil.py:f"}), "--allow-row-code"),
        ({"rm_type": "math", "allow_row_code": "mine"}, Row("d.jsonl row 7", "5", {"custom_rm_path": "evil.py:f"}), "evil.py"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(fields: dict[str, Any], row: Row, named: str) -> None:
    with pytest.raises(InputError) as refused:
        check_rows(options(**fields), [row])
    assert named in str(refused.value) and str(refused.value).startswith(row.where) and len(str(refused.value)) < 400
    assert refused.value.code == ("plugin" if "custom_rm_path" in row.metadata else "reward")


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"rm_type": "math"}, GOOD),
        ({"rm_type": "random"}, Row("r")),
        ({}, Row("r", "5", {"rm_type": "boxed_math"})),
        ({"custom_rm_path": "mine.py"}, Row("r")),
        ({"rm_type": "gpqa"}, Row("r", "", {"correct_letter": "B"})),
        ({"rm_type": "ifbench"}, Row("r", "", {"instruction_id_list": ["punctuation:no_comma"]})),
        ({"rm_type": "dapo", "reward_key": "score"}, Row("r", "3.5")),
        ({"rm_type": "math", "allow_row_code": "mine"}, Row("r", "", {"custom_rm_path": "mine.graders:f"})),
    ],
)
def test_rows_that_can_be_graded_are_accepted(fields: dict[str, Any], row: Row) -> None:
    check_rows(options(**fields), [row])


@pytest.mark.parametrize("package", ["", "a b", "mine.py/x", "a..b"])
def test_allow_row_code_wants_a_package_name(package: str) -> None:
    with pytest.raises(ValueError, match="--allow-row-code"):
        options(allow_row_code=package)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        pytest.param("raise KeyError('gone')", "KeyError", marks=pytest.mark.full),
        ("return 'good'", "'good'"),
        pytest.param("return None", "None", marks=pytest.mark.full),
        pytest.param("return float('nan')", "nan", marks=pytest.mark.full),
        ("return {'score': 1.0}", "--reward-key"),
        ("while True: pass", "timeout"),
        pytest.param("import os; os._exit(0)", "died", marks=pytest.mark.full),
        pytest.param("raise SystemExit(0)", "SystemExit", marks=pytest.mark.full),
    ],
)
def test_reward_without_a_number_is_refused(tmp_path: Path, body: str, named: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def reward_func(args, sample):\n    {body}\n")
    with pytest.raises(RewardError) as refused:
        try_reward(options(custom_rm_path=str(path), reward_timeout=0.1), [GOOD])
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_reward_is_tried_on_samples_that_look_finished(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward_func(args, sample):\n"
        "    assert args.rollout_batch_size == 32 and sample.prompt == '2 + 3 =' and sample.response_length > 0\n"
        "    return 1 / len(sample.response)\n"
    )
    config = options(custom_rm_path=str(path))
    [reason] = try_reward(config, [GOOD], config.model_dump())
    assert "ZeroDivisionError" in reason, "an empty response alone does not refuse the reward"


def test_group_reward_is_tried_on_one_group(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward_func(args, samples):\n    assert len({s.label for s in samples}) == 1\n    return [1.0] * len(samples)\n"
    )
    assert try_reward(options(custom_rm_path=str(path), group_rm=True), [GOOD, Row("r", "6")]) == []


def test_reward_of_a_row_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "row_tried").mkdir()
    (tmp_path / "row_tried" / "graders.py").write_text("def broken(args, sample): raise KeyError('gone')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = Row("r", "5", {"custom_rm_path": "row_tried.graders:broken"})
    with pytest.raises(RewardError, match="KeyError"):
        try_reward(options(rm_type="math", allow_row_code="row_tried"), [row])
    with pytest.raises(InputError, match="--allow-row-code"):
        try_reward(options(rm_type="math"), [row])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"absent\.py"):
        try_reward(options(custom_rm_path=str(tmp_path / "absent.py")), [GOOD])


def test_reward_server_is_asked_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/grade"
        assert try_reward(options(rm_type="remote_rm", rm_url=url), [GOOD]) == []
    for wrong in (url, "http://127.0.0.1:99999/x", "nonsense"):
        with pytest.raises(RewardError, match="--rm-url"):
            try_reward(options(rm_type="remote_rm", rm_url=wrong), [GOOD])


def test_built_in_rewards_need_no_process() -> None:
    assert try_reward(options(rm_type="math"), [GOOD]) == [] == try_reward(options(rm_type="math"), [])
