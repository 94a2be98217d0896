"""Options of [debug], --custom-config-path and --plugin-args: values, refusals, and what a run records of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.config import Flow, PostTrainConfig, config_hash, derive, options_by_mutability, validate_config
from penstock.flows.debug_options import debug_rules
from penstock.flows.options.flags import parse_config
from penstock.flows.options.paths import with_absolute_paths
from penstock.storage.errors import OptionError, check_rules
from tests.forked_worker import forked_workers  # noqa: F401 fixture

BASE = ["--run", "r", "--hf-checkpoint", "model", "--num-rollout", "20"]


def test_debug_options_do_not_change_the_config_hash() -> None:
    config = parse_config(BASE)
    assert not any(name.startswith("debug.") for name in options_by_mutability(config, "identity"))
    traced = parse_config([*BASE, "--use-pytorch-profiler", "--dump-details", "d", "--ci-test"])
    assert config_hash(traced) == config_hash(config)
    assert config_hash(parse_config([*BASE, "--plugin-args", "a=1"])) != config_hash(config)


def test_dump_details_names_both_dumps_and_explicit_paths_win() -> None:
    debug = parse_config([*BASE, "--dump-details", "d"]).debug
    assert debug.rollout_dump == "d/rollout_data/{rollout_id}.pt"
    assert debug.diagnostics.save_debug_train_data == "d/train_data/{rollout_id}_{rank}.pt"
    own = ["--save-debug-rollout-data", "a_{rollout_id}", "--save-debug-train-data", "b_{rollout_id}"]
    debug = parse_config([*BASE, "--dump-details", "d", *own]).debug
    assert (debug.rollout_dump, debug.diagnostics.save_debug_train_data) == ("a_{rollout_id}", "b_{rollout_id}")
    assert parse_config(BASE).debug.rollout_dump is None


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--save-debug-rollout-data", "a_{rollout_id}.pt", "--dump-details", "d"]
    words += ["--use-pytorch-profiler", "--profile-dir", "traces", "--num-rollout", "20"]
    debug = with_absolute_paths(parse_config([*BASE, *words])).debug
    assert debug.save_debug_rollout_data == f"{tmp_path}/a_{{rollout_id}}.pt"
    assert (debug.dump_details, debug.profile_dir) == (f"{tmp_path}/d", f"{tmp_path}/traces")


def test_loading_rollouts_starts_no_engines() -> None:
    config = derive(parse_config([*BASE, "--load-debug-rollout-data", "d_{rollout_id}.pt"]))
    assert config.run.debug_train_only
    assert PostTrainConfig.model_validate_json(config.model_dump_json()) == config
    check_rules(debug_rules(Flow.TRAIN, config))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--save-debug-rollout-data d.pt", r"no \{rollout_id\}"),
        ("--save-debug-rollout-data s3://b/{rollout_id}.pt", "is a URI"),
        ("--save-debug-rollout-data {rollout_id:03d}.pt", r"placeholder \{rollout_id:03d\}"),
        ("--ci-save-grad-norm {rollout_id}.pt", r"no \{step_id\}"),
        ("--profile-target train_actor", "--profile-target has no effect without --use-pytorch-profiler"),
        ("--use-pytorch-profiler --profile-target train_overall train_actor", "train_overall contains the others"),
        ("--use-pytorch-profiler --profile-step-start 3 --profile-step-end 3", "so no round is traced"),
        ("--memory-snapshot-num-steps 2", "has no effect without --record-memory-history"),
        ("--record-memory-history --memory-recorder memray", "needs --memory-snapshot-num-steps"),
        ("--ci-disable-kl-checker", "has no effect without --ci-test"),
        ("--ci-save-grad-norm {rollout_id}_{step_id} --ci-load-grad-norm {rollout_id}_{step_id}", "-norm writes"),
        ("--load-debug-rollout-data-subsample 0.5", "has no effect without --load-debug-rollout-data"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        parse_config([*BASE, *words.split(" ")])


@pytest.mark.parametrize(
    ("words", "flow", "culprit"),
    [
        ("--load-debug-rollout-data d.pt --debug-rollout-only", "train", "--debug-rollout-only"),
        ("--load-debug-rollout-data d.pt --check-weight-update-equal", "train", "--check-weight-update-equal"),
        ("--load-debug-rollout-data d.pt --loss-type sft_loss", "sft", "`sft`"),
        ("--use-pytorch-profiler", "evaluate", "`evaluate`"),
        ("--save-debug-train-data {rollout_id} --debug-rollout-only", "train", "--debug-rollout-only"),
        ("--ci-test --loss-type sft_loss", "sft", "--loss-type sft_loss"),
        ("--ci-save-grad-norm {rollout_id}_{step_id} --advantage-estimator ppo", "train", "{role}"),
        ("--use-pytorch-profiler --profile-step-start 20 --profile-step-end 21", "train", "--num-rollout 20"),
        ("--record-memory-history", "train", "needs a GPU, which this machine does not have"),
        (
            "--record-memory-history --memory-recorder memray --memory-snapshot-num-steps 1",
            "train",
            "pip install memray",
        ),
    ],
)
def test_options_that_do_not_fit_the_flow_or_the_machine_are_refused(
    words: str, flow: str, culprit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config([*BASE, *words.split()])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=re.escape(culprit)):
        check_rules(debug_rules(Flow(flow), config))


# ---- --custom-config-path --------------------------------------------------------------------------------------------


def with_yaml(tmp_path: Path, text: str, *words: str) -> PostTrainConfig:
    file = tmp_path / "custom.yaml"
    file.write_text(text)
    return parse_config([*BASE, *words, "--custom-config-path", str(file)])


def test_custom_config_sets_options_of_all_families_and_arguments_of_functions(tmp_path: Path) -> None:
    text = """
        lr: 1e-4
        rollout-temperature: 0.7
        rollout_stop: [a, b]
        sglang_mem_fraction_static: 0.4
        recompute_granularity: full
        search_url: http://127.0.0.1:1
        tools: {python: {limit: 3}}
    """
    config = with_yaml(tmp_path, text, "--lr", "1e-6", "--sglang-log-level", "info")
    assert (config.train.lr, config.rollout.rollout_temperature) == (1e-4, 0.7)  # overrides the flag
    assert config.rollout.rollout_stop == ["a", "b"]
    assert config.rollout.engine_options == {"log_level": "info", "mem_fraction_static": 0.4}
    assert config.train.megatron.model_dump() == {"recompute_granularity": "full"}
    assert config.rollout.plugin_args == {"search_url": "http://127.0.0.1:1", "tools": {"python": {"limit": 3}}}
    assert config.debug.custom_config_path is None  # the run records the values
    again = parse_config([*BASE, "--lr", "1e-4", "--rollout-temperature", "0.7", "--rollout-stop", "a", "b",
                          "--recompute-granularity", "full", "--plugin-args", "search_url=http://127.0.0.1:1",
                          'tools={"python": {"limit": 3}}'])  # fmt: skip
    assert config_hash(again) == config_hash(config)
    assert validate_config(config.model_dump(mode="json")) == config
    switches = "no_bias_dropout_fusion: true\nrecompute_activations: false\nsglang_server_concurrency: 7"
    config = with_yaml(tmp_path, switches)
    assert config.train.megatron.model_dump() == {"bias_dropout_fusion": False}
    assert (config.rollout.engine_concurrency, config.rollout.plugin_args) == (7, {})


def test_custom_config_is_named_in_toml_as_well(tmp_path: Path) -> None:
    (tmp_path / "custom.yaml").write_text("max_turns: 3\nown: 1\n")
    (tmp_path / "run.toml").write_text(f'[debug]\ncustom_config_path = "{tmp_path}/custom.yaml"\n')
    config = parse_config([*BASE, "--config", str(tmp_path / "run.toml")])
    assert (config.rollout.max_turns, config.rollout.plugin_args) == (3, {"own": 1})
    with pytest.raises(OptionError, match="command line only"):
        validate_config({"debug": {"custom_config_path": str(tmp_path / "custom.yaml")}})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: fast", "--lr 'fast'"),
        ("- lr", "not a mapping"),
        ("search_api_key: abc", "looks like a secret"),
        ("not a name: 1", "not a Python name"),
        ("custom_config_path: x.yaml", "command line only"),
    ],
)
def test_custom_config_with_invalid_content_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        with_yaml(tmp_path, text)


def test_functions_of_users_get_plugin_args_as_attributes(tmp_path: Path) -> None:
    from penstock.stages.rollout.group import make_grader
    from penstock.stages.rollout.plugins.hooks import Hooks
    from penstock.stages.rollout.prompts.data_source import open_data_source
    from penstock.storage.samples.sample import Sample, Status

    file = tmp_path / "functions.py"
    file.write_text(
        "def reward_func(args, sample): return args.bonus\n"
        "def sample_hook(args, sample): sample.metadata['bonus'] = args.bonus\n"
        "class Source:\n"
        "    def __init__(self, args): self.bonus = args.bonus\n"
        "    def get_samples(self, num_samples): return []\n"
    )
    words = ["--plugin-args", "bonus=2.5", "--custom-rm-path", f"{file}:reward_func", "--rollout-sample-hook-path",
             f"{file}:sample_hook", "--data-source-path", f"{file}:Source"]  # fmt: skip
    config = parse_config([*BASE, *words]).rollout
    sample = Sample("s", "g", "t", 0, token_ids=[1, 2], loss_mask=[0, 1], rollout_logprobs=[0.0, -1.0])
    sample.status = Status.COMPLETED
    Hooks(config).run_sample_hook(sample)
    assert sample.metadata == {"bonus": 2.5}
    dataset: Any = None
    assert vars(open_data_source(config, dataset))["bonus"] == 2.5
    assert config.plugin_arguments()["bonus"] == 2.5 and config.plugin_arguments()["max_turns"] == config.max_turns
    with make_grader(config) as grader:
        [future] = grader.submit_group([sample])
        assert future.result().reward == 2.5
