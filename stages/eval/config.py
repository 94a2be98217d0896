"""What can be said about evaluation: which data sets, how often, how sampled. What is not said is as in the rollout."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from storage.config import StageConfig, option

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class EvalConfig(StageConfig):
    """Named data sets, sampled from the policy and scored."""

    eval_prompt_data: list[tuple[str, str]] = option(default_factory=list, change="schedule")
    """Data sets as NAME PATH; may be repeated."""

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
                raise ValueError(f"{value} is not NAME PATH pairs: give every data set a name and a path")
            return list(zip(value[::2], value[1::2]))
        return value

    @field_validator("eval_prompt_data")
    @classmethod
    def _names(cls, value: list[tuple[str, str]]) -> list[tuple[str, str]]:
        names = [name for name, _ in value]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot name a data set: use letters, digits, dot, dash and underscore")
            if names.count(name) > 1:
                raise ValueError(f"two data sets are named {name}: give each its own name")
        return value

    def overrides(self, path: str) -> dict[str, Any]:
        """What differs from the rollout when `path` is evaluated: use as `rollout_config.model_copy(update=...)`.

        A copy is not validated again, so that temperature 0 is allowed here and not in a rollout.
        """
        said = {
            "rollout_temperature": self.eval_temperature,
            "rollout_top_p": self.eval_top_p,
            "rollout_top_k": self.eval_top_k,
            "rollout_max_response_len": self.eval_max_response_len,
            "input_key": self.eval_input_key,
            "label_key": self.eval_label_key,
            "rm_type": self.eval_rm_type,
            "reward_key": self.eval_reward_key,
        }
        fixed = {"group_rm": False, "prompt_data": [path], "rollout_shuffle": False}
        fixed["n_samples_per_prompt"] = self.n_samples_per_eval_prompt
        if self.eval_rm_type is not None:
            fixed["custom_rm_path"] = None
        return fixed | {name: value for name, value in said.items() if value is not None}
