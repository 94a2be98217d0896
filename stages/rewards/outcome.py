"""What grading one sample gives: a reward, a reason why there is none, or a sentence about a wrong request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.rewards.hub import reward_named
from storage.errors import PluginError, RewardError
from storage.sample import Sample, Status

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?::[A-Za-z_]\w*)?")


@dataclass(frozen=True)
class Settings:
    """How to grade; what a grading process is told when it starts."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    timeout: float = 30.0  # seconds a sample
    start_timeout: float = 300.0  # seconds until a process has imported the function, and constructed the class
    group_rm: bool = False  # the function at custom_rm_path takes all samples of a prompt
    rm_url: str | None = None  # of remote_rm
    rm_model_path: str | None = None  # for the constructor of a class at custom_rm_path
    arguments: dict[str, Any] = field(default_factory=dict)  # `args` of a custom function
    allow_row_code: str | None = None  # package from which rows may name functions
    evaluated_integers: bool = False  # for math and deepscaler
    within: str | None = None  # package that the function at custom_rm_path must be defined in


@dataclass(frozen=True)
class Outcome:
    """One of the three: `reward`, `error` (this sample failed) or `wrong` (the request is wrong, for every sample)."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    wrong: str | None = None

    def apply(self, sample: Sample) -> None:
        """Write it into the sample. Raises RewardError if the request is wrong."""
        if self.wrong is not None:
            raise RewardError(self.wrong)
        sample.reward, sample.rewards = self.reward, self.rewards
        if self.error is not None:
            sample.status = Status.FAILED
            sample.metadata["error"] = self.error


def failed(reason: str) -> Outcome:
    """This sample has no reward."""
    return Outcome(error=reason)


def raised(error: BaseException, name: str) -> Outcome:
    """The function `name` has raised."""
    return failed(f"{type(error).__name__}: {error} (raised by {name})")


def outcome_of(sample: Sample, settings: Settings) -> Outcome:
    """Grade a sample by the built-in reward that its metadata or the settings name, here and now."""
    name = rm_type_of(sample, settings)
    if name is None:
        return Outcome(
            wrong="there is no reward: give --rm-type or --custom-rm-path, or an `rm_type` in the metadata of every row"
        )
    try:
        reward = reward_named(name)
    except RewardError as error:
        return Outcome(wrong=str(error))
    try:
        value = reward.function(sample, **{option: getattr(settings, option) for option in reward.options})
    except Exception as error:
        return raised(error, name)
    return outcome_from(value, settings.reward_key, name)


def rm_type_of(sample: Sample, settings: Settings) -> str | None:
    """Name of the built-in reward for this sample."""
    return str(sample.metadata.get("rm_type") or "").strip() or settings.rm_type


def row_code_of(metadata: Mapping[str, Any], allowed: str | None) -> str | None:
    """The `custom_rm_path` of a row; None if it has none.

    Raises:
        PluginError: rows may not name code (`allowed` is None), or this is not a name below the package `allowed`.
    """
    path = metadata.get("custom_rm_path")
    if not path:
        return None
    if allowed is None:
        raise PluginError(
            f"a row's metadata names code to import, custom_rm_path {path!r:.100}: data may not do so; if you trust it, give "
            "--allow-row-code PACKAGE, or drop the field"
        )
    if not isinstance(path, str) or not _DOTTED.fullmatch(path) or not path.startswith((f"{allowed}.", f"{allowed}:")):
        raise PluginError(
            f"a row's custom_rm_path {path!r:.100} is not below --allow-row-code {allowed}: write {allowed}.module:name"
        )
    return path


def custom_path_of(sample: Sample, settings: Settings) -> str | None:
    """Path of the custom reward for this sample: a row's own goes before the run's. Raises PluginError if a row may not name it."""
    return row_code_of(sample.metadata, settings.allow_row_code) or settings.custom_rm_path


def outcomes_from(values: Any, num_samples: int, reward_key: str | None, name: str) -> list[Outcome]:
    """One outcome per sample, from what the reward `name` has returned for all of them."""
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    if not isinstance(values, list | tuple):
        return [
            failed(f"the reward function returned no list: {name} gave {_shown(values)} for {num_samples} samples")
        ] * num_samples
    if len(values) != num_samples:
        reason = (
            f"the reward function returned another number of rewards than samples: {name} gave {len(values)} for {num_samples}"
        )
        return [failed(reason)] * num_samples
    return [outcome_from(value, reward_key, name) for value in values]


def outcome_from(value: Any, reward_key: str | None, name: str) -> Outcome:
    """The outcome for what the reward `name` has returned for one sample."""
    rewards: dict[str, float] = {}
    if isinstance(value, Mapping):
        if reward_key is None or reward_key not in value:
            known = ", ".join(map(repr, value))
            return Outcome(
                wrong=f"the reward of {name} is a dictionary with {known}, and one number is needed: "
                f"name one with --reward-key (now {reward_key})"
            )
        rewards = {str(key): number for key, part in value.items() if (number := _number(part)) is not None}
        value = value[reward_key]
    if value is None:
        return failed(f"the reward function returned None: {name} gave no number")
    reward = _number(value)
    if reward is None:
        return failed(f"the reward function returned no number: {name} gave {_shown(value)}")
    if not math.isfinite(reward):
        return failed(f"the reward function returned {reward}: {name} must give a finite number")
    return Outcome(reward=reward, rewards={key: part for key, part in rewards.items() if math.isfinite(part)})


def _number(value: Any) -> float | None:
    """Also of NumPy's and torch's scalars, without importing either."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except Exception:  # whatever a user's class may raise: an array of several numbers, a value that is not computed yet
        return None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100} ({type(value).__name__})"
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
