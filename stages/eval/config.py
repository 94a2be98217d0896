"""What can be said about evaluation: which data sets, how often, how sampled. What is not said is as in the rollout."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationInfo, field_serializer, field_validator, model_validator

from stages.eval.data_sets import EvalFile, check_names, eval_file, read_eval_file
from storage.config import StageConfig, option
from storage.errors import OptionError


class EvalConfig(StageConfig):
    """Named data sets, sampled from the policy and scored."""

    eval_prompt_data: list[tuple[str, str]] = option(default_factory=list, change="schedule")
    """Data sets as NAME PATH; may be repeated."""

    eval_config: EvalFile | None = option(None, change="schedule")
    """TOML file with further data sets, each with settings of its own (docs/evaluation.md)."""

    eval_interval: int | None = option(None, change="schedule", ge=1)
    """Evaluate every so many rounds, and always before the first and after the last."""

    n_samples_per_eval_prompt: int = option(1, change="schedule", ge=1)
    """Responses per prompt."""

    eval_temperature: float | None = option(None, change="schedule", ge=0)
    """Sampling temperature, 0 is greedy; as in the rollout if not given."""

    eval_top_p: float | None = option(None, change="schedule", gt=0, le=1)
    """Nucleus size; as in the rollout if not given."""

    eval_top_k: int | None = option(None, change="schedule", ge=-1)
    """Number of tokens to sample from; as in the rollout if not given."""

    eval_max_response_len: int | None = option(None, change="schedule", ge=1)
    """Most tokens of a response; as in the rollout if not given."""

    eval_input_key: str | None = option(None, change="schedule")
    """Column with the prompt; as in the rollout if not given."""

    eval_label_key: str | None = option(None, change="schedule")
    """Column with the label; as in the rollout if not given."""

    eval_rm_type: str | None = option(None, change="schedule")
    """Built-in reward; as in the rollout if not given."""

    eval_reward_key: str | None = option(None, change="schedule")
    """Which entry is the reward when the function returns a dictionary; as --reward-key if not given."""

    pass_threshold: float | None = option(None, change="schedule")
    """A response passes if its reward is at least this; needed for pass@k unless every reward is 0 or 1."""

    log_passrate: bool = option(False, change="schedule")
    """Insist on pass@k: an error if the rewards do not say what passes. Without it pass@k is given whenever they do."""

    @field_validator("eval_prompt_data", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """Also `{name: path}` and a flat `[name, path, name, path]`."""
        if isinstance(value, dict):
            return list(value.items())
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            if len(value) % 2:
                raise OptionError(f"{str(value)[:80]} is not NAME PATH pairs: give every data set a name and a path")
            return list(zip(value[::2], value[1::2]))
        return value

    @field_validator("eval_prompt_data")
    @classmethod
    def _names(cls, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
        check_names([name for name, _ in value])
        return value

    @field_validator("eval_config", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """A path, or what a file said when it was read."""
        if isinstance(value, str):
            return read_eval_file(value)
        return eval_file(value) if isinstance(value, dict) else value

    @field_validator("eval_config")
    @classmethod
    def _all_names(cls, value: EvalFile | None, info: ValidationInfo) -> EvalFile | None:
        own = _pairs_of(value)
        check_names([name for name, _ in {*info.data.get("eval_prompt_data", []), *own}])
        return value

    @model_validator(mode="after")
    def _join(self) -> EvalConfig:
        """`eval_prompt_data` names all data sets, those of the file too."""
        if own := _pairs_of(self.eval_config):
            self.eval_prompt_data = [pair for pair in self.eval_prompt_data if pair not in own] + own
        return self

    @field_serializer("eval_prompt_data")
    def _as_given(self, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Written down without those of the file: with another file they are others."""
        own = _pairs_of(self.eval_config)
        return [pair for pair in value if pair not in own]

    def settings(self, name: str) -> dict[str, Any]:
        """What is said about a data set, in the words of the file: by the set, by the file's defaults, by the flags."""
        flags = {
            "n_samples_per_eval_prompt": self.n_samples_per_eval_prompt,
            "temperature": self.eval_temperature,
            "top_p": self.eval_top_p,
            "top_k": self.eval_top_k,
            "max_response_len": self.eval_max_response_len,
            "input_key": self.eval_input_key,
            "label_key": self.eval_label_key,
            "rm_type": self.eval_rm_type,
            "reward_key": self.eval_reward_key,
            "pass_threshold": self.pass_threshold,
        }
        said = {key: value for key, value in flags.items() if value is not None}
        return said | (self.eval_config.settings(name) if self.eval_config else {})

    def overrides(self, path: str, name: str = "") -> dict[str, Any]:
        """What differs from the rollout when `path` is evaluated: use as `rollout_config.model_copy(update=...)`.

        A copy is not validated again, so that temperature 0 is allowed here and not in a rollout.

        Args:
            path: of the prompts.
            name: of the data set; without one only the flags are heard.
        """
        said = self.settings(name)
        fixed: dict[str, Any] = {"group_rm": False, "prompt_data": [path], "rollout_shuffle": False}
        if "rm_type" in said:
            fixed["custom_rm_path"] = None
        return fixed | {IN_ROLLOUT[key]: value for key, value in said.items() if key in IN_ROLLOUT}


IN_ROLLOUT = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_response_len": "rollout_max_response_len",
    "input_key": "input_key",
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "tool_key": "tool_key",
    "rm_type": "rm_type",
    "reward_key": "reward_key",
}  # setting of a data set -> field of the rollout's config


def _pairs_of(file: EvalFile | None) -> list[tuple[str, str]]:
    return [(one.name, one.path) for one in file.datasets] if file else []
