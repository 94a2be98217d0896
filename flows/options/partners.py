"""Options that have an effect only together with another option, and warnings if they are given without it; checks of
the rewards that an advantage estimator needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.flows.config import SECTIONS, PostTrainConfig
from penstock.flows.options.argv import flag_of_field
from penstock.stages.rewards.outcome import Outcome
from penstock.storage.errors import check_rules
from penstock.storage.samples.sample import OVERLONG_PENALTY


class Partner(NamedTuple):
    """Options of one section that have no effect without another option, their partner."""

    section: str
    names: str  # separated by spaces
    partner: str  # the needed option, as the end of the sentence "--x has no effect without ..."
    has_partner: Callable[[PostTrainConfig], object]


def _estimator(*names: str) -> Callable[[PostTrainConfig], bool]:
    return lambda config: config.train.advantage_estimator in names or bool(config.train.custom_advantage_function_path)


PARTNERS = (
    Partner(
        "eval",
        (
            "eval_interval n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_max_response_len "
            "eval_max_context_len eval_input_key eval_label_key eval_tool_key eval_rm_type eval_reward_key "
            "skip_eval_before_train pass_threshold"
        ),
        "a data set (--eval-prompt-data or --eval-config); the recipe may have set this",
        lambda config: config.eval.data_sets,
    ),
    Partner(
        "rollout",
        "eval_function_path",
        "a data set (--eval-prompt-data or --eval-config); the recipe may have set this",
        lambda config: config.eval.data_sets,
    ),
    Partner(
        "train",
        "gamma",
        "--advantage-estimator ppo or reinforce_plus_plus",
        _estimator("ppo", "reinforce_plus_plus"),
    ),
    Partner(
        "train",
        "disable_grpo_std_normalization",
        "--advantage-estimator grpo, gspo, cispo or gdpo",
        _estimator("grpo", "gspo", "cispo", "gdpo"),
    ),
    Partner("train", "lambd", "--advantage-estimator ppo", _estimator("ppo")),
    Partner(
        "train",
        "critic_lr critic_lr_warmup_iters value_clip num_critic_only_steps",
        "a critic: --advantage-estimator ppo",
        lambda config: config.train.advantage_estimator == "ppo",
    ),
    Partner("train", "vision_lr", "--no-freeze-vision", lambda config: not config.train.freeze_vision),
    Partner(
        "train",
        "kl_loss_type",
        "a reference: --use-kl-loss or --kl-coef",
        lambda config: config.train.use_kl_loss or config.train.kl_coef,
    ),
    Partner(
        "train",
        "tis_clip tis_clip_low",
        "--use-tis or --get-mismatch-metrics",
        lambda config: config.train.use_tis or config.train.get_mismatch_metrics,
    ),
    Partner(
        "rollout",
        "opd_teacher_key opd_hint_key",
        "a teacher (--opd-teacher-load, --opd-teacher-url or --opd-self)",
        lambda config: config.train.opd,
    ),
    Partner(
        "train",
        "min_lr",
        "--lr-decay-style linear or cosine",
        lambda config: config.train.lr_decay_style != "constant",
    ),
    Partner(
        "rollout",
        "max_turns generate_timeout agent_endpoint_port",
        "--custom-generate-function-path",
        lambda config: config.rollout.custom_generate_function_path or config.rollout.rollout_function_path,
    ),
    Partner(
        "rollout",
        "rm_url",
        "--rm-type remote_rm or --custom-rm-path",
        lambda config: config.rollout.rm_type == "remote_rm" or config.rollout.custom_rm_path,
    ),
    Partner("rollout", "rm_model_path", "--custom-rm-path", lambda config: config.rollout.custom_rm_path),
    Partner("rollout", "data_cache", "--streaming-data", lambda config: config.rollout.streaming_data),
    Partner(
        "rollout",
        "rollout_health_check_interval rollout_health_check_timeout rollout_health_check_failures engine_restarts",
        "--use-fault-tolerance",
        lambda config: config.rollout.use_fault_tolerance,
    ),
)


def options_without_partner(config: PostTrainConfig) -> Iterator[str]:
    """Yield a warning for each option, or group of options, that is given without the option it needs."""
    for row in PARTNERS:
        section, fields = getattr(config, row.section), SECTIONS[row.section].model_fields
        given = [
            name
            for name in row.names.split()
            if getattr(section, name) != fields[name].get_default(call_default_factory=True)
        ]
        if given and not row.has_partner(config):
            flags = ", ".join(map(flag_of_field, given))
            yield f"{flags} {'has' if len(given) == 1 else 'have'} no effect without {row.partner}"


def check_rewards_of_estimator(config: PostTrainConfig, outcomes: Sequence[Outcome]) -> None:
    """Check that a rollout gives the rewards that --advantage-estimator maxrl or gdpo needs, as far as the options and
    `outcomes`, those of test samples, show it. Raises OptionError."""
    train, rollout = config.train, config.rollout
    graded = [outcome for outcome in outcomes if outcome.reward is not None]
    of_user = train.custom_advantage_function_path or rollout.sets_train_rewards
    lowest = min((outcome.reward or 0.0 for outcome in graded), default=0.0)
    lowest -= rollout.overlong.overlong_penalty_factor if rollout.overlong else 0.0
    is_maxrl = train.advantage_estimator == "maxrl" and not (of_user or train.disable_rewards_normalization)
    names = set(train.gdpo_reward_weights)
    given = set.intersection(*(set(outcome.rewards) for outcome in graded)) if graded else names - {OVERLONG_PENALTY}
    given |= {OVERLONG_PENALTY} if rollout.overlong else set()
    missing = min(names - given, default="")
    rules: list[tuple[object, str]] = [
        (
            is_maxrl and lowest < 0,
            f"a reward may be {lowest:g}, but --advantage-estimator maxrl divides by the mean reward of a prompt's "
            "samples: use rewards of 0 or more without --overlong-buffer-len, or another estimator",
        ),
        (
            names and rollout.sets_train_rewards,
            "--advantage-estimator gdpo compares reward components, but a user-defined function sets one reward for "
            "training: omit --custom-reward-post-process-path and --custom-convert-samples-to-train-data-path, or use "
            "another estimator",
        ),
        (
            names and rollout.overlong and OVERLONG_PENALTY not in names,
            "--overlong-buffer-len has no effect with --advantage-estimator gdpo unless --gdpo-reward-weights names "
            f"the penalty: add {OVERLONG_PENALTY}=1 to the weights, or omit --overlong-buffer-len",
        ),
        (
            missing,
            f"--gdpo-reward-weights names {missing!r}, but the components of the rewards are "
            f"{', '.join(sorted(given)) or 'not given'}: name only keys of the dictionary that the reward function "
            "returns",
        ),
    ]
    check_rules(rules)
