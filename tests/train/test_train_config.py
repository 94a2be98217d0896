"""Wrong training options are refused with the name of the flag."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.engines.lora import LoraOptions
from penstock.flows.config import derive, validate_config
from penstock.flows.options.flags import parse_config, update_config_from_argv
from penstock.stages.train.algorithm_config import PLUGINS
from penstock.stages.train.algorithms.advantages import ESTIMATES
from penstock.stages.train.algorithms.divergences import DIVERGENCE_TERMS
from penstock.stages.train.algorithms.losses import TOKEN_LOSSES
from penstock.stages.train.algorithms.registry import DIVERGENCES, ESTIMATORS, POLICY_LOSSES
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import OptionError

GDPO = {"advantage_estimator": "gdpo", "gdpo_reward_weights": {"right": 1.0, "short": 0.5}}


def test_every_user_defined_function_is_checked_before_anything_starts() -> None:
    assert set(PLUGINS) == {name for name in TrainConfig.model_fields if name.endswith("_path")}


@pytest.mark.parametrize(
    "options,named",
    [
        ({"actor_num_gpus_per_node": 6, "tensor_model_parallel_size": 4}, "--actor-num-gpus-per-node"),
        ({"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 4}, "--expert-model-parallel-size"),
        ({"actor_num_gpus_per_node": 4, "global_batch_size": 2}, "--global-batch-size 2"),
        ({"megatron": {"bf16": True}, "params_dtype": "fp32"}, "--bf16 .*--params-dtype fp32"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"policy_loss": "ppo"}, "policy_loss"),
        ({"advantage_estimator": "gspo", "policy_loss": "cispo"}, "--policy-loss cispo .*--advantage-estimator gspo"),
        ({"loss_type": "sft_loss", "policy_loss": "gspo"}, "--policy-loss gspo .*--loss-type sft_loss"),
        ({"policy_loss": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c 3.0 .*--policy-loss cispo: omit --eps-clip-c"),
        ({"policy_loss": "gmpo", "sapo_tau_neg": 2.0}, "--sapo-tau-neg 2.0 .*--policy-loss gmpo"),
        (
            {"disable_rewards_normalization": True} | GDPO,
            "--disable-rewards-normalization .*--advantage-estimator gdpo",
        ),
        (
            {"calculate_per_token_loss": True, "calculate_per_prompt_loss": True},
            "--calculate-per-token-loss and --calculate-per-prompt-loss define",
        ),
        ({"loss_type": "sft_loss", "loss_denominator": 8}, "--loss-denominator 8 has no effect"),
        (
            {"custom_pg_loss_reducer_function_path": "x.py", "loss_denominator": 8},
            "--loss-denominator 8 .*--custom-pg-loss-reducer-function-path",
        ),
        (
            {"use_routing_replay": True, "rollout_data_postprocess_path": "f.py"},
            "--use-routing-replay .*--rollout-data-postprocess-path",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainConfig(**options)


@pytest.mark.parametrize(
    "flags, schedule",
    [
        ("--lr-decay-style cosine --lr-warmup-fraction 0.25", (12, 3)),
        ("--lr-decay-style linear --lr-decay-iters 40 --lr-warmup-fraction 0.1", (40, 4)),
        ("--lr-warmup-iters 7", (None, 7)),
    ],
)
def test_schedule_follows_from_the_steps_of_the_run(flags: str, schedule: tuple[int | None, int]) -> None:
    words = ["--run", "r", "--num-rollout", "6", "--num-steps-per-rollout", "2", *flags.split()]
    config = derive(parse_config(words))
    assert (config.train.lr_decay_iters, config.train.lr_warmup_iters) == schedule
    assert validate_config(config.model_dump()) == config
    longer = derive(update_config_from_argv(config, ["--num-rollout", "60"]))  # as `penstock resume`
    assert (longer.train.lr_decay_iters, longer.train.lr_warmup_iters) == schedule


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--lr-decay-style cosine", "--lr-decay-style needs --lr-decay-iters"),
        ("--lr-warmup-fraction 0.1", "--lr-warmup-fraction needs --lr-decay-iters"),
        ("--num-rollout 100 --lr-warmup-fraction 0.1 --lr-warmup-iters 5", "--lr-warmup-fraction 0.1 is 10 steps"),
    ],
)
def test_schedule_without_its_steps_is_refused(flags: str, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        parse_config(["--run", "r", *flags.split()])


def test_sizes_and_dtype_follow_from_other_options() -> None:
    assert derive(parse_config(["--bf16"])).train.params_dtype == "bf16" and TrainConfig().params_dtype is None
    sizes = dict(tensor_model_parallel_size=2, context_parallel_size=2)
    config = TrainConfig(actor_num_nodes=2, actor_num_gpus_per_node=8, **sizes)
    assert (config.num_ranks, config.data_parallel_size) == (16, 4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimator_and_policy_loss_are_separate_choices(name: str) -> None:
    """The names gspo and cispo are presets of both."""
    extra = {"normalize_advantages": True} | (GDPO if name == "gdpo" else {})
    preset = TrainConfig(**extra | {"advantage_estimator": name})
    assert preset.policy_loss_name == (name if name in ("gspo", "cispo") else "ppo_clip")
    for loss in POLICY_LOSSES:
        if name not in ("gspo", "cispo"):
            chosen = TrainConfig(**extra | {"advantage_estimator": name, "policy_loss": loss})
            assert (chosen.advantage_estimator, chosen.policy_loss_name) == (name, loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"lora_rank": 8, "lora_dropout": 0.1}}, "--lora-dropout 0.1 is not supported.*omit it"),
        ({"freeze_params_name_list": ["embedding"]}, "cannot be combined with --lora-rank"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo.*without a critic"),
        ({"use_kl_loss": True, "ref_update_interval": 2}, "--ref-update-interval cannot be combined"),
    ],
)
def test_options_that_adapters_do_not_allow_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"lora": {"lora_rank": 8}} | options)


def test_config_with_adapters_survives_its_record() -> None:
    config = TrainConfig(lora=LoraOptions(lora_rank=8, lora_target_modules=["attention"]))
    assert TrainConfig(**config.model_dump()) == config
    assert config.lora is not None and (config.lora.alpha, config.lora.scale) == (8, 1)


def test_every_name_has_a_function() -> None:
    assert (ESTIMATORS.keys(), POLICY_LOSSES.keys()) == (ESTIMATES.keys(), TOKEN_LOSSES.keys())
    assert DIVERGENCE_TERMS.keys() == set(DIVERGENCES)
