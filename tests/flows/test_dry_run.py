"""`penstock train --dry-run` shows the first prompt, the rewards of test responses, and whether the run is ready."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.flows.config import PostTrainConfig, derive
from penstock.flows.inspect.dry_run import describe_engines, describe_weights
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import fp8_warning
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import Commit
from penstock.storage.store import Store
from tests.forked_worker import forked_workers  # noqa: F401 fixture

ROOT = Path(__file__).parents[2]
REWARDS = """
def broken(args, sample, **kwargs):
    return 1 / len(sample.response)

def zero(args, sample):
    return 0.0

def word(args, sample):
    return "good"
"""


ALL = {"hf-checkpoint": "{model}", "prompt-data": "{data}", "rm-type": "random", "num-rollout": "1", "run": "r"}
ALL |= {"rollout-max-response-len": "16"}


def small_run(model: Path, data: object, **changed: str) -> list[str]:
    """Return the arguments of a small run, ALL with the changed options (`rm_type`: --rm-type)."""
    options = ALL | {name.replace("_", "-"): value for name, value in changed.items()}
    words = [word for flag, value in options.items() for word in (f"--{flag}", value)]
    return ["train", *(word.format(model=model, data=data) for word in words)]


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def directory_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty directory with user-defined rewards the current one."""
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text(REWARDS)


@pytest.fixture
def planned(tiny_model: Path, printed: Callable[..., str]) -> Callable[[list[dict], str], list[str]]:
    """Returns the lines of the plan of the demo's recipe for the rows of data.jsonl and further options."""

    def plan(rows: list[dict], words: str) -> list[str]:
        data = write_rows(Path("data.jsonl"), *rows)
        argv = f"train --config demo-grpo --run r --hf-checkpoint {tiny_model} --prompt-data {data} {words} --dry-run"
        return [line.rstrip() for line in printed(*argv.split()).splitlines()]

    return plan


@pytest.mark.parametrize(
    ("prompt", "words", "shown"),
    [
        ("1+2=", "", "'<|user|>1+2=<|end|><|assistant|>'"),
        ("[/b] a [b]\n", "--apply-chat-template false", r"'[/b] a [b]\n'"),
    ],
)
def test_first_prompt_is_shown_as_the_model_gets_it(
    prompt: object, words: str, shown: str, planned: Callable[..., list[str]]
) -> None:
    lines = planned([{"prompt": prompt, "label": 3}, {"prompt": "?", "label": 4}], words)
    assert f"first prompt   {shown}" in lines and "its label      '3'" in lines


@pytest.mark.parametrize(
    ("row", "words", "text"),
    [
        ({"prompt": r"1+2= in \boxed{}", "label": 3}, "--rm-type math", None),
        ({"prompt": "1+2=", "label": 3}, "--rm-type math", r"none of the first 1 prompts contains \boxed"),
        ({"prompt": "1+2=", "label": "?"}, "--rm-type gpqa", "rewards none of the first 1 labels"),
        (
            {"prompt": "1+2=", "label": "", "answer": 3},
            "--rm-type none --custom-rm-path code.py:zero",
            "data.jsonl row 0 has no label, and the reward gives 0.0 to every test response: if the reward reads "
            "labels, name their column with --label-key (now 'label'); the columns are 'prompt', 'label', 'answer'",
        ),
        (
            {"prompt": "1+2=", "label": 3},
            "--rm-type none --custom-rm-path code.py:broken",
            "returned no number for a test sample (ZeroDivisionError",
        ),
    ],
)
def test_warnings_of_checks_are_printed_below_the_plan_like_all_others(
    row: dict[str, object], words: str, text: str | None, planned: Callable[..., list[str]]
) -> None:
    lines = planned([row], words)
    warnings = [line for line in lines[:-1] if line.startswith("warning: ")]
    assert lines[-1].startswith("ready: ") and lines[-1 - len(warnings) : -1] == warnings
    of_checks = [line for line in warnings if "--eval-interval" not in line]
    assert [line for line in of_checks if text and text in line] == of_checks and len(of_checks) == (text is not None)


@pytest.mark.parametrize(
    ("prompt", "has_template", "words", "warned"),
    [
        ("gbb?", True, "", True),
        ("<|user|>gbb?<|end|><|assistant|>", True, "", False),  # already rendered
        ("gbb?", True, "--apply-chat-template", False),
        ("gbb?", False, "", False),
    ],
)
def test_warning_if_plain_text_skips_the_chat_template_of_the_tokenizer(
    prompt: str, has_template: bool, words: str, warned: bool, tiny_model: Path, printed: Callable[..., str]
) -> None:
    model = Path(shutil.copytree(tiny_model, "model"))
    if not has_template:
        (model / "chat_template.jinja").unlink()
    data = write_rows(Path("data.jsonl").absolute(), {"input": prompt})
    out = printed(*small_run(model, data), *words.split(), "--dry-run")
    warnings = [line for line in out.splitlines() if "--apply-chat-template" in line and "warning" in line]
    assert [f"('gbb?' in {data} row 0): give --apply-chat-template, or" in line for line in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--rm-type none --custom-rm-path code.py:word", "returned no number"),
        ("--rm-type exact_number", "--rollout-max-response-len 1024 leaves no room for a prompt"),
    ],
)
def test_wrong_data_or_reward_is_reported_before_a_length(
    words: str, error: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    write_rows(Path("data.jsonl"), {"prompt": "1+2=", "label": 3})
    argv = f"train --config demo-grpo --run r --hf-checkpoint {tiny_model} --prompt-data data.jsonl {words}".split()
    for start in ("--dry-run", "--store=store"):
        err = printed(*argv, "--rollout-max-response-len", "1024", start, code=2)
        assert error in err and err.count("\n") == 1


def test_other_checks_run_although_a_file_or_a_key_is_missing(tiny_model: Path, printed: Callable[..., str]) -> None:
    words = small_run(tiny_model, "absent.jsonl", rollout_max_response_len="1024")
    assert "--rollout-max-response-len 1024 leaves no room" in printed(*words, "--dry-run", code=2)
    write_rows(Path("data.jsonl"), {"question": "1+1="})
    words = small_run(tiny_model, "data.jsonl", use_wandb="true", wandb_key="env:ABSENT")
    assert "data.jsonl:1 has no column 'input'; it has 'question'" in printed(*words, "--dry-run", code=2)


@pytest.mark.parametrize(
    ("gpus", "words", "shown"),
    [
        ([], "", "1 process on the CPU; on a machine with GPUs: 1 x 1 GPUs, on the trainer's GPUs"),
        ([], "--num-engines 2", "2 processes on the CPU; on a machine with GPUs: 1 x 1 GPUs, on the trainer's GPUs"),
        ([], "--ray-address ray://head:10001", "1 x 1 GPUs, on the trainer's GPUs"),
    ],
)
def test_plan_says_where_the_engines_run(
    gpus: list[int], words: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.flows.inspect.dry_run.visible_gpu_bytes", lambda: gpus)
    config = derive(parse_config(["--run", "r", "--hf-checkpoint", str(tmp_path), *words.split()]))
    assert describe_engines(config) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--rm-type boxed_exact_number", ["'' gets 0.0", "'3' gets 0.0", r"'\\boxed{3}' gets 1.0"]),
        (
            "--rm-type none --custom-rm-path code.py:broken",
            ["'' gets ZeroDivisionError: ", "'3' gets 1.0", r"'\\boxed{3}' gets 0.111"],
        ),
    ],
)
def test_rewards_of_the_test_responses_are_printed(
    words: str, shown: list[str], planned: Callable[..., list[str]]
) -> None:
    rows = [{"prompt": "1+2=", "label": 3}, {"prompt": "2+2=", "label": 4}, {"prompt": "2+3=", "label": 5}]
    lines = planned(rows, words)
    first = next(index for index, line in enumerate(lines) if line.startswith("test rewards"))
    for line, text in zip(lines[first : first + 3], shown):
        assert line.removeprefix("test rewards").strip().startswith(text)


GOOD_CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def sft_words(model: Path, messages: list[dict]) -> list[str]:
    """Return the arguments of a dry run of `penstock sft` with the conversation `messages` among many good ones."""
    rows = [{"messages": messages if row == 200 else GOOD_CHAT} for row in range(400)]
    data = write_rows(Path("chats.jsonl"), *rows)
    words = f"sft --run r --hf-checkpoint {model} --prompt-data {data} --input-key messages --num-rollout 1 --dry-run"
    return words.split()


def test_first_conversation_is_printed_with_what_is_trained(tiny_model: Path, printed: Callable[..., str]) -> None:
    lines = [line.rstrip() for line in printed(*sft_words(tiny_model, GOOD_CHAT)).splitlines()]
    [shown] = [line for line in lines if line.startswith("first row ")]
    assert shown.endswith(" <|user|>1+1=<|end|><|assistant|>«2<|end|>»")
    assert not any(line.startswith("test rewards") for line in lines)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([("user", "1" * 5000), ("assistant", "2")], "tokens, but the model has only"),
        (
            [("user", "1"), ("untrained", "2"), ("user", "1"), ("untrained", "3")],
            "no token of the conversation would be trained on",
        ),
    ],
)
def test_sft_refuses_rows_that_are_too_long_or_train_nothing(
    messages: list[tuple], said: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    rows = [{"role": "assistant" if role == "untrained" else role, "content": text} for role, text in messages]
    for row, (role, _) in zip(rows, messages):
        row |= {"step_loss_mask": 0} if role == "untrained" else {}
    err = printed(*sft_words(tiny_model, rows), code=2)
    assert "chats.jsonl row 200: " in err and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("changed", "last"),
    [
        ({}, "ready: the same command without --dry-run starts the run"),
        ({"prompt_data": "absent.jsonl"}, "not ready here: --prompt-data absent.jsonl does not exist here; prompts"),
        ({"custom_rm_path": "mine.py:f", "rm_type": "none"}, "not ready here: --custom-rm-path mine.py does not exist"),
        ({"use_wandb": "true", "wandb_key": "env:ABSENT"}, "not ready here: the trackers: "),
    ],
)
def test_last_line_says_whether_the_run_is_ready(
    changed: dict[str, str], last: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    write_rows(Path("data.jsonl"), {"input": "1+1="})
    out = printed(*small_run(tiny_model, "data.jsonl", **changed), "--dry-run")
    assert out.splitlines()[-1].startswith(last)
    assert "per GPU" not in out, "no table of GPUs on a machine without one"
    assert ("passes   " in out) == ("does not exist" not in last)


@pytest.mark.parametrize(
    ("flag", "name", "command"),
    [
        ("--hf-checkpoint", "Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("--use-opd --opd-teacher-load", "a/b", "hf download a/b --local-dir b"),
        ("--prompt-data", "openai/gsm8k", "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k"),
    ],
)
def test_name_on_the_hub_is_refused_with_the_download_command(
    flag: str, name: str, command: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    write_rows(Path("data.jsonl"), {"input": "1+1="})
    words = small_run(tiny_model, "data.jsonl")
    if flag in words:
        words[words.index(flag) + 1] = name
    else:
        words += [*flag.split(), name]
    for start in ("--dry-run", "--store=store")[: 2 if flag == "--hf-checkpoint" else 1]:
        error = printed(*words, start, code=2)
        assert command in error and error.count("\n") == 1
    assert not Path("store/runs").exists()


@pytest.mark.parametrize("words", ["--rollout-sampling-seeds", "--eval-mode apart --eval-prompt-data sums data.jsonl"])
def test_plan_without_the_gpus_that_the_engines_need_is_not_ready_here(
    words: str, planned: Callable[..., list[str]]
) -> None:
    lines = planned([{"prompt": "1+2=", "label": "3"}] * 8, words)
    [verdict] = [line for line in lines if "ready" in line]
    assert verdict.startswith("not ready here: the engines: --") and verdict.endswith("was checked")


@pytest.mark.parametrize("also", ["", "--eval-interval 5"])
def test_dry_run_of_an_evaluation_shows_its_first_prompt_and_no_training(
    also: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    data = write_rows(Path("held.jsonl"), {"question": "1+2=", "answer": 3})
    words = f"""eval --run r --hf-checkpoint {tiny_model} --eval-prompt-data held {data} --eval-input-key question
        --eval-label-key answer --rm-type exact_number --rollout-max-response-len 16 {also} --dry-run"""
    lines = [line.rstrip() for line in printed(*words.split()).splitlines()]
    rows = {line[:14].strip(): line[14:].strip() for line in lines}
    assert rows["first prompt"] == "'1+2='" and rows["its label"] == "'3'" and rows["test rewards"] == "'' gets 0.0"
    assert rows["evaluations"].startswith("held") and "None" not in rows["evaluations"] and "engines" in rows
    assert not {"rounds", "a round", "trainer", "a checkpoint", "asynchronous"} & rows.keys()
    assert lines[-1].startswith("ready: ") and not Path("penstock").exists()


def test_dry_run_of_an_evaluation_refuses_what_its_start_refuses(tiny_model: Path, printed: Callable[..., str]) -> None:
    write_rows(Path("held.jsonl"), {"input": "1+2="})
    words = f"eval --run r --hf-checkpoint {tiny_model} --rollout-max-response-len 16 --dry-run --rm-type".split()
    assert "--eval-prompt-data" in printed(*words, "math", code=2)
    for reward, culprit in (("math", "held.jsonl row 0: "), ("mth", "'mth'")):
        assert culprit in printed(*words, reward, "--eval-prompt-data", "held", "held.jsonl", code=2)


@pytest.mark.parametrize("flow", ["train", "sft", "evaluate"])
def test_dry_run_of_resume_plans_the_recorded_run(
    flow: str, tiny_model: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    data = write_rows(tmp_path / "held.jsonl", {"input": "1+2=", "label": 3})
    chats = write_rows(tmp_path / "chats.jsonl", {"input": GOOD_CHAT})
    words = ["--run", "r", "--store", str(tmp_path / "store"), "--hf-checkpoint", str(tiny_model)]
    words += ["--rm-type", "random", "--rollout-max-response-len", "16"]
    words += {
        "train": ["--prompt-data", str(data), "--num-rollout", "3"],
        "sft": ["--prompt-data", str(chats), "--num-rollout", "3", "--loss-type", "sft_loss"],
        "evaluate": ["--eval-prompt-data", "held", str(data)],
    }[flow]
    config = parse_config(words)
    store = Store(config.run.store)
    keys = open_run(store, resolve(flow, config, store))
    if flow != "evaluate":
        store.commit(keys.step_prefix(0), Commit(kind="step", index=0, policy_version=1))
    out = printed("resume", "r", "--store", config.run.store, "--dry-run")
    assert out.splitlines()[-1].startswith("ready: ")
    assert out.startswith("committed rounds: 1; ") == (flow != "evaluate")


@pytest.mark.parametrize("command", ["fork r --at 1 --name f", "convert", "verify r"])
def test_commands_without_dry_run_name_those_that_have_it(command: str, printed: Callable[..., str]) -> None:
    assert "--dry-run: train, sft, eval and resume have it" in printed(*command.split(), "--dry-run", code=2)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def checkpoint(directory: Path, quantization: dict[str, object] | None) -> PostTrainConfig:
    """A directory with one weight, in fp8 with scales or in bf16."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    weight = torch.zeros(2, 2, dtype=torch.float8_e4m3fn if quantization else torch.bfloat16)
    scales = {"w_scale_inv": torch.ones(1, 1)} if quantization else {}
    save_file({"w": weight, **scales}, directory / "model.safetensors")
    return parse_config(["--run", "r", "--hf-checkpoint", str(directory)])


@pytest.mark.parametrize(
    ("name", "quantization", "by_engines", "shown", "is_warned"),
    [
        ("Qwen3-4B-FP8", None, None, "BF16 in the files, not quantized", True),
        ("fp8", BLOCKS, None, "quantized in blocks of 128 x 128", False),
        ("plain", BLOCKS, None, "quantized in blocks of 128 x 128", False),
        ("plain", None, None, "BF16 in the files, not quantized", False),
        ("fp8", None, "fp8", "BF16 in the files, not quantized; the engines quantize to fp8", False),
    ],
)
def test_plan_reads_whether_the_weights_are_quantized(
    name: str, quantization: dict | None, by_engines: str | None, shown: str, is_warned: bool, tmp_path: Path
) -> None:
    config = checkpoint(tmp_path / name, quantization)
    if by_engines:
        config.rollout.engine_options["quantization"] = by_engines
    assert describe_weights(config).endswith(shown) and describe_weights(config)[:2] == ("F8" if quantization else "BF")
    assert [str(tmp_path / name) in warning for warning in fp8_warning(config)] == [True] * is_warned


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_printed_command_of_one_gpu_fits_the_model_of_the_demo_as_the_page_says(
    page: str, tiny_model: Path, printed: Callable[..., str]
) -> None:
    text = (ROOT / page).read_text().rpartition("## Your own model on one GPU")[2]
    [command] = re.findall(r"^penstock (train (?:.*\\\n)*.*--dry-run)", text, re.MULTILINE)
    [addition] = re.findall(r"add `(--rollout-max-response-len \d+)`", text)
    words = shlex.split(command.replace("\\\n", " "))
    words[words.index("--hf-checkpoint") + 1] = str(tiny_model)
    write_rows(Path("prompts.jsonl"), {"prompt": "1+2=", "label": 3})
    Path("my_reward.py").write_text("def grade(args, sample):\n    return 1.0\n")
    assert "--rollout-max-response-len 1024 leaves no room" in printed(*words, code=2)
    assert printed(*words, *addition.split()).splitlines()[-1].startswith("ready: ")
