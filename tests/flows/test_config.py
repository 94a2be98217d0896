"""The command line and the composed config: spellings, families of flags, invalid values."""

import importlib
from pathlib import Path

import pytest

from penstock.flows.config import (
    OPTIONS,
    RECIPES,
    Flow,
    PostTrainConfig,
    config_hash,
    derive,
    option_value,
    options_by_mutability,
    read_toml,
    recipe_names,
    validate_config,
)
from penstock.flows.options.flags import (
    parse_config,
    parse_values,
    penstock_flags,
    split_flags,
    update_config_from_argv,
)
from penstock.flows.options.partners import check_rewards_of_estimator, options_without_partner
from penstock.flows.options.paths import FILES, FUNCTIONS
from penstock.flows.options.refused import log_once
from penstock.flows.runtime.conversion import export_origin
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runner import ObservedFlow
from penstock.stages.rewards.outcome import Outcome
from penstock.storage.config import field_meta
from penstock.storage.errors import OptionError
from penstock.storage.store import Store

MODEL = ["--hf-checkpoint", "model"]


def test_every_flag_sets_one_option_and_every_option_has_a_sentence() -> None:
    assert len(penstock_flags()) >= len(OPTIONS)
    for section, name, field in OPTIONS:
        assert field.description and field.description.rstrip().endswith("."), f"{section}.{name} has no sentence"


def test_split_keeps_values_with_their_flag() -> None:
    flags = [("--a", ["1", "2"]), ("--b", []), ("--c", ["x"]), ("--d-e", ["-1"])]
    assert split_flags(["--a", "1", "2", "--b", "--c=x", "--d-e", "-1"]) == flags


def test_own_flags_set_converted_values_in_their_sections() -> None:
    config = parse_config([*MODEL, "--run", "r", "--num-rollout", "3", "--rollout-batch-size", "8",
                    "--n-samples-per-prompt", "4", "--lr", "1e-6", "--use-kl-loss", "--save-interval", "none",
                    "--rollout-stop", "a", "b"])  # fmt: skip
    assert (config.run.num_rollout, config.run.save_interval) == (3, None)
    assert (config.train.lr, config.train.use_kl_loss) == (1e-6, True)
    assert config.rollout.rollout_stop == ["a", "b"]
    train = derive(config).train
    assert (train.global_batch_size, train.num_steps_per_rollout) == (32, 1)
    assert (config.train.global_batch_size, config.train.num_steps_per_rollout) == (None, None), "as given"


def test_second_user_defined_function_replaces_the_first_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    words = ["--rollout-sample-hook-path", "a.py:f", "--rollout-sample-hook-path"]
    assert parse_values([*words, "a.py:f"])["rollout"]["rollout_sample_hook_path"] == "a.py:f"
    assert not caplog.records
    assert parse_values([*words, "b.py:f"])["rollout"]["rollout_sample_hook_path"] == "b.py:f"
    assert "--rollout-sample-hook-path: b.py:f replaces a.py:f" in caplog.text


def test_aliases_set_the_option_and_repeated_flags_extend_it() -> None:
    config = parse_config(
        [*MODEL, "--prompt-key", "question", "--eval-prompt-data", "a", "x.jsonl", "--eval-prompt-data", "b", "y.jsonl"]
    )
    assert config.rollout.input_key == "question"
    assert config.eval.data_sets == [("a", "x.jsonl"), ("b", "y.jsonl")]


def test_switch_can_be_turned_off_and_refuses_a_value(tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        "[train]\nuse_kl_loss = true\n[rollout.engine_options]\ncontext_length = 8192\n"
        '[eval]\neval_prompt_data = [["a", "x"]]\n'
    )
    words = ["--no-use-kl-loss", "--sglang-log-level", "info", "--eval-prompt-data", "b", "y"]
    config = parse_config([*MODEL, "--config", str(file), *words])
    assert not config.train.use_kl_loss
    assert config.rollout.engine_options == {"context_length": 8192, "log_level": "info"}
    assert config.eval.data_sets == [("b", "y")], "flags win over files"
    with pytest.raises(ValueError, match="--use-kl-loss is a switch"):
        parse_config([*MODEL, "--use-kl-loss", "yes"])


def test_engine_flags_reach_their_engines() -> None:
    words = "--sglang-mem-fraction-static 0.4 --recompute-granularity full --decoder-first-pipeline-num-layers 3"
    config = parse_config([*MODEL, *words.split()])
    assert config.rollout.engine_options == {"mem_fraction_static": 0.4}
    expected = {"recompute_granularity": "full", "num_layers_in_first_pipeline_stage": 3}
    assert config.train.megatron.model_dump() == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rollot-batch-size 3", r"unknown flag --rollot-batch-size: did you mean --rollout-batch-size\?"),
        ("--rollout-batch-size 0", r"--rollout-batch-size '0': input should be greater than or equal to 1"),
        ("--eval-prompt-data aime", "takes 2 values at a time"),
        (
            "--rollout-batch-size 3 --n-samples-per-prompt 3 --global-batch-size 4",
            "3 x --n-samples-per-prompt 3 = 9 samples, but",
        ),
    ],
)
def test_invalid_options_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_config([*MODEL, *words.split()])


def test_config_takes_the_name_of_a_bundled_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "demo-grpo" in recipe_names() and "qwen3-30B-A3B" in recipe_names()
    for name in recipe_names():
        assert parse_values(["--config", name]) == read_toml(RECIPES / f"{name}.toml")
    values = parse_values(["--config", "demo-grpo", "demo-gspo"])
    assert values["train"]["advantage_estimator"] == "gspo" and values["rollout"]["rm_type"] == "exact_number"


def test_file_wins_over_the_bundled_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-grpo").mkdir()
    assert parse_values(["--config", "demo-grpo"])["run"]["num_rollout"] == 60, "a directory is not a config file"
    (tmp_path / "1gpu").write_text("[run]\nnum_rollout = 3\n")
    assert parse_values(["--config", "1gpu"]) == {"run": {"num_rollout": 3}}


@pytest.mark.parametrize("path", ["configs/recipes/demo-grpo.toml", "demo-grop", "./demo-grpo"])
def test_missing_config_file_lists_the_bundled_recipes(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as error:
        parse_values(["--config", path])
    assert f"config file {path} does not exist" in str(error.value)
    assert f"the name of a bundled recipe ({', '.join(recipe_names())})" in str(error.value)


@pytest.mark.parametrize("name", recipe_names())
def test_bundled_recipe_has_no_path_of_a_file(name: str) -> None:
    """It is read in any directory, and the wheel has no examples."""
    base = ["demo-grpo"] if name.startswith("demo-") and name != "demo-sft" else []
    config = parse_config(["--config", *base, name])
    options = [(section, option) for section, names in FILES.items() for option in names if option != "store"]
    files = [option for section, option in options if option_value(config, section, option)]
    functions = [option_value(config, section, option) for section, options in FUNCTIONS.items() for option in options]
    assert files == [] and not config.eval.data_sets and config.eval.eval_config is None
    assert all(importlib.import_module(path.partition(":")[0]) for path in functions if path)
    assert all(path.startswith("penstock.") for path in functions if path)


def test_config_round_trips_through_json_and_its_hash_covers_identity_only() -> None:
    config = parse_config([*MODEL, "--run", "r", "--num-rollout", "3"])
    assert PostTrainConfig.model_validate_json(config.model_dump_json()) == config
    longer = validate_config(config.model_dump() | {"run": config.run.model_dump() | {"num_rollout": 9}})
    assert config_hash(longer) == config_hash(config)
    other = validate_config(config.model_dump() | {"train": config.train.model_dump() | {"lr": 1e-3}})
    assert config_hash(other) != config_hash(config)
    assert set(options_by_mutability(config, "identity")) | set(options_by_mutability(config, "schedule")) | set(
        options_by_mutability(config, "placement")
    ) == {f"{s}.{n}" for s, n, _ in OPTIONS}
    assert {field_meta(field).mutability for _, _, field in OPTIONS} == {"identity", "schedule", "placement"}


def test_flag_of_a_section_creates_it_and_its_switch_removes_it(tmp_path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[train.lora]\nlora_rank = 8\n")
    words = ["--config", str(file), "--lora-alpha", "16"]
    for config in (parse_config(words), parse_config(["--lora-alpha", "16", "--lora-rank", "8"])):
        assert config.train.lora is not None and config.train.lora.scale == 2
        assert options_by_mutability(config, "identity")["train.lora.lora_rank"] == 8
        assert update_config_from_argv(config, ["--no-lora"]).train.lora is None
    assert parse_config(["--use-opsm"]).train.opsm == parse_config(["--opsm-delta", "1e-4"]).train.opsm is not None
    for words in ("--use-opsm --no-use-opsm", "--use-opsm false", "--opsm-delta 1 --no-use-opsm"):
        assert parse_config(words.split()).train.opsm is None
    list_option = "--lora-rank 4 --lora-target-modules mlp"
    assert parse_config(f"{list_option} --no-lora {list_option}".split()).train.lora is not None
    assert parse_config(["--config", str(file), "--no-lora"]).train.lora is None and parse_config([]).train.lora is None
    assert options_by_mutability(parse_config([]), "identity")["train.lora.lora_rank"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lora-alpha 16 --lora-publish merged", "needs --lora-rank, but has only --lora-alpha, --lora-publish: add"),
        ("--lora", "needs --lora-rank: add --lora-rank, or omit the section"),
        ("--lora 1", "--lora is a switch and takes no value"),
    ],
)
def test_section_without_what_it_needs_is_refused(words: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_config(words.split())


def test_chat_template_kwargs_take_json_or_words_and_are_identity() -> None:
    base = ["--run", "r", "--num-rollout", "1"]
    expected = {"enable_thinking": False, "effort": "low"}
    for words in (['{"enable_thinking": false, "effort": "low"}'], ["enable_thinking=false", "effort=low"]):
        config = parse_config([*base, "--apply-chat-template-kwargs", *words])
        assert config.rollout.apply_chat_template_kwargs == expected
        assert options_by_mutability(config, "identity")["rollout.apply_chat_template_kwargs"] == expected
    with pytest.raises(OptionError, match="--apply-chat-template-kwargs"):
        parse_config([*base, "--apply-chat-template-kwargs", '{"enable_thinking": fals'])


def test_exports_of_a_run_with_speculative_decoding_keep_the_mtp_layers() -> None:
    speculative = parse_config([*MODEL, "--sglang-speculative-algorithm", "NEXTN"])
    for config, mtp in ((speculative, "keep"), (parse_config(MODEL), "skip")):
        assert export_origin(config.convert, keep_mtp=config.engine_facts.speculates).mtp == mtp


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--eval-interval 5 --eval-top-p 0.7", "--eval-interval, --eval-top-p have no effect without a data set"),
        ("--gamma 0.9", "--gamma has no effect without --advantage-estimator ppo or reinforce_plus_plus"),
        ("--vision-lr 1e-5", "--vision-lr has no effect without --no-freeze-vision"),
        ("--advantage-estimator ppo --gamma 0.9 --eval-prompt-data a b --eval-interval 5", None),
        ("", None),
    ],
)
def test_option_without_its_partner_is_named_once(flags: str, warning: str | None) -> None:
    warnings = list(options_without_partner(parse_config(flags.split())))
    assert [shown.partition(" (")[0] for shown in warnings] == ([warning] if warning else [])


GDPO = "--advantage-estimator gdpo --gdpo-reward-weights right=1 short=0.5"


@pytest.mark.parametrize(
    ("flags", "rewards", "message"),
    [
        ("--advantage-estimator maxrl", [{"reward": 1.0}, {"reward": -0.5}], "a reward may be -0.5"),
        ("--advantage-estimator maxrl --overlong-buffer-len 9", [], "a reward may be -1"),
        (f"{GDPO} --custom-reward-post-process-path x.py", [], "omit --custom-reward-post-process-path"),
        (f"{GDPO} --overlong-buffer-len 9", [], "add overlong_penalty=1 to the weights"),
        (GDPO, [{"right": 1.0, "short": 0.0}, {"right": 1.0}], "names 'short', but .* are right: name only"),
        (GDPO, [{}], "names 'right', but .* are not given: name only"),
    ],
)
def test_rewards_that_the_estimator_cannot_use_are_refused(
    flags: str, rewards: list[dict[str, float]], message: str
) -> None:
    outcomes = [Outcome(reward=parts.get("reward", 1.0), rewards=parts) for parts in rewards]
    with pytest.raises(OptionError, match=message):
        check_rewards_of_estimator(parse_config(flags.split()), outcomes)


@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator maxrl",
        "--advantage-estimator maxrl --overlong-buffer-len 9 --disable-rewards-normalization",
        f"{GDPO} overlong_penalty=1 --overlong-buffer-len 9",
    ],
)
def test_rewards_that_the_estimator_can_use_are_accepted(flags: str) -> None:
    failed, graded = Outcome(error="none"), Outcome(reward=0.5, rewards={"right": 1.0, "short": 0.0, "more": 2.0})
    outcomes = [failed] if "maxrl" in flags else [failed, graded]
    check_rewards_of_estimator(parse_config(flags.split()), outcomes)


@pytest.mark.parametrize("name", Flow)
def test_flow_that_is_observed_takes_a_config_as_json_or_the_plan_of_the_command(name: Flow) -> None:
    """The runner starts a copy of the flow, in whose module the names of the flow's annotations are unknown."""
    flow = ObservedFlow(getattr(importlib.import_module(f"penstock.flows.{name}"), name)).flow
    config = flow.validate_parameters({"config": {"run": {"run": "r"}}})["config"]
    assert config.train.loss_type == ("sft_loss" if name == "sft" else "policy_loss")
    plan = resolve(name, validate_config({"run": {"run": "r"}}), Store("memory://", probe=False))
    assert flow.validate_parameters({"config": plan})["config"] is plan
