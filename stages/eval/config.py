"""Options of evaluation: data sets, interval, sampling. The default of most options is the rollout's option."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from penstock.stages.eval.data_sets import EvalFile, check_data_set_names, parse_eval_file, read_eval_file
from penstock.storage.config import StageConfig, option
from penstock.storage.errors import OptionError

_MEAN = r"(-pass@\d+|-majority@\d+)?(-ci_low|-ci_high)?"
_METRIC = re.compile(
    rf"{_MEAN}|-(truncated|failed)_ratio|/response_len/(mean|median|max)|/num_(samples|prompts)|/rewards/.+"
)


def is_eval_metric(metric: str, name: str, *, any_suffix: bool = False) -> bool:
    """Return whether `metric` is a metric of the data set `name` that scores.py computes; with `any_suffix`, return
    True also for names that a user-defined evaluation may add (`eval/<name>` with any suffix)."""
    start, suffix = f"eval/{name}", metric.removeprefix(f"eval/{name}")
    return metric.startswith(start) and bool(
        _METRIC.fullmatch(suffix) or (any_suffix and len(suffix) > 1 and suffix[0] in "-/")
    )


class EvalConfig(StageConfig):
    """Options of the evaluation of a policy on named data sets."""

    eval_prompt_data: list[tuple[str, str]] = option(default_factory=list, mutability="schedule")
    """Data sets as NAME PATH; may be repeated."""

    eval_config: EvalFile | None = option(None, mutability="schedule")
    """TOML or YAML file with further data sets, each with its own settings (docs/evaluation.md)."""

    eval_interval: int | None = option(None, mutability="schedule", ge=1)
    """Evaluate every N rounds, and also before the first and after the last round."""

    skip_eval_before_train: bool = option(False, mutability="schedule")
    """Do not evaluate before the first round."""

    eval_mode: Literal["between", "apart"] = option("between", mutability="schedule")
    """between: evaluate on the engines of the rollouts, between two weight updates; apart: on separate engines, while
    training continues."""

    eval_num_engines: int = option(1, mutability="placement", ge=1)
    """With --eval-mode apart: number of the run's engines that only evaluate (the last ones)."""

    n_samples_per_eval_prompt: int = option(1, mutability="schedule", ge=1)
    """Responses per prompt."""

    eval_temperature: float | None = option(None, mutability="schedule", ge=0)
    """Sampling temperature, 0 is greedy; default: --rollout-temperature."""

    eval_top_p: float | None = option(None, mutability="schedule", gt=0, le=1)
    """Probability mass of nucleus sampling; default: --rollout-top-p."""

    eval_top_k: int | None = option(None, mutability="schedule", ge=-1)
    """Number of most likely tokens to sample from; default: --rollout-top-k."""

    eval_max_response_len: int | None = option(None, mutability="schedule", ge=1)
    """Maximum number of tokens of a response; default: --rollout-max-response-len."""

    eval_input_key: str | None = option(None, mutability="schedule")
    """Column with the prompt; default: --input-key."""

    eval_label_key: str | None = option(None, mutability="schedule")
    """Column with the label; default: --label-key."""

    eval_tool_key: str | None = option(None, mutability="schedule")
    """Column with tool definitions; default: --tool-key."""

    eval_max_context_len: int | None = option(None, mutability="schedule", ge=2)
    """Maximum number of tokens of prompt and response together; default: --rollout-max-context-len."""

    eval_rm_type: str | None = option(None, mutability="schedule")
    """Built-in reward; default: the reward of the rollout."""

    eval_reward_key: str | None = option(None, mutability="schedule")
    """Key of the reward if the reward function returns a dictionary; default: --reward-key."""

    pass_threshold: float | None = option(None, mutability="schedule")
    """A response passes if its reward is at least this; needed for pass@k unless every reward is 0 or 1."""

    promote_to: str | None = option(None, mutability="schedule")
    """Name of a model in the registry of champions: after the last round, the last policy becomes the champion of this
    model if it is better than the current one."""

    promote_data_set: str | None = option(None, mutability="schedule")
    """Data set on which candidate and champion are compared for a promotion; default: the first data set of
    --eval-prompt-data."""

    promote_margin: float = option(0.0, mutability="schedule", ge=0)
    """Condition of a promotion: the lower bound of the 95 % confidence interval of the candidate's reward minus the
    champion's must be above this."""

    promote_guards: dict[str, float] = option(default_factory=dict, mutability="schedule")
    """Condition of a promotion: data sets, each with the amount by which the candidate may be worse than the champion
    (lower bound of the 95 % confidence interval of the difference)."""

    promote_min_reward: float | None = option(None, mutability="schedule")
    """Condition of a promotion if the model has no champion yet: the candidate's mean reward must be above this."""

    promote_refused: Literal["warn", "fail"] = option("warn", mutability="schedule")
    """If the promotion is refused: warn, or fail the flow run after everything else is done."""

    log_passrate: bool = option(False, mutability="schedule")
    """Fail if the rewards do not define pass@k; default: report no pass@k in that case."""

    @field_validator("eval_prompt_data", mode="before")
    @classmethod
    def _parse_pairs(cls, value: Any) -> Any:
        """Convert `{name: path}` and a flat `[name, path, name, path]` to pairs."""
        if isinstance(value, dict):
            return list(value.items())
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            if len(value) % 2:
                raise OptionError(
                    f"{str(value)[:80]} is not a list of NAME PATH pairs: give every data set a name and a path"
                )
            return list(zip(value[::2], value[1::2]))
        return value

    @field_validator("eval_prompt_data")
    @classmethod
    def _check_pair_names(cls, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
        check_data_set_names([name for name, _ in value])
        return value

    @field_validator("eval_config", mode="before")
    @classmethod
    def _read_file(cls, value: Any) -> Any:
        """Read the --eval-config file at a path, or validate the content of this file that run.json has recorded."""
        if isinstance(value, str):
            return read_eval_file(value)
        return parse_eval_file(value) if isinstance(value, dict) else value

    @field_validator("eval_config")
    @classmethod
    def _check_all_names(cls, value: EvalFile | None, info: ValidationInfo) -> EvalFile | None:
        own = value.names_and_paths if value else []
        check_data_set_names([name for name, _ in {*info.data.get("eval_prompt_data", []), *own}])
        return value

    @property
    def data_sets(self) -> list[tuple[str, str]]:
        """Return the name and the path of each data set: those of --eval-prompt-data, then those of --eval-config."""
        own = self.eval_config.names_and_paths if self.eval_config else []
        return [pair for pair in self.eval_prompt_data if pair not in own] + own

    def data_set_settings(self, name: str) -> dict[str, Any]:
        """Return the settings of the data set `name`, under their names in the --eval-config file. A setting comes from
        the data set's entry in that file, else from the file's [defaults], else from the --eval-* flag."""
        flags = {
            "n_samples_per_eval_prompt": self.n_samples_per_eval_prompt,
            "temperature": self.eval_temperature,
            "top_p": self.eval_top_p,
            "top_k": self.eval_top_k,
            "max_response_len": self.eval_max_response_len,
            "input_key": self.eval_input_key,
            "label_key": self.eval_label_key,
            "tool_key": self.eval_tool_key,
            "max_context_len": self.eval_max_context_len,
            "rm_type": self.eval_rm_type,
            "reward_key": self.eval_reward_key,
            "pass_threshold": self.pass_threshold,
        }
        given = {key: value for key, value in flags.items() if value is not None}
        return given | (self.eval_config.data_set_settings(name) if self.eval_config else {})

    def rollout_overrides(self, path: str, name: str = "") -> dict[str, Any]:
        """Return field name -> value for the fields of the rollout's config that an evaluation changes.

        Apply them with `rollout_config.model_copy(update=...)`, which does not validate: an evaluation may have
        temperature 0, a rollout may not.

        Args:
            path: path of the prompts.
            name: name of the data set; "" = use only the --eval-* flags, not the --eval-config file.
        """
        settings = self.data_set_settings(name)
        overrides: dict[str, Any] = {"group_rm": False, "prompt_data": [path], "rollout_shuffle": False}
        overrides |= {"opd_teacher_key": None, "opd_hint_key": None}
        if "rm_type" in settings:
            overrides["custom_rm_path"] = None
        return overrides | {ROLLOUT_FIELDS[key]: value for key, value in settings.items() if key in ROLLOUT_FIELDS}


ROLLOUT_FIELDS = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_response_len": "rollout_max_response_len",
    "max_context_len": "rollout_max_context_len",
    "input_key": "input_key",
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "tool_key": "tool_key",
    "rm_type": "rm_type",
    "reward_key": "reward_key",
}  # setting of a data set -> field of the rollout's config
