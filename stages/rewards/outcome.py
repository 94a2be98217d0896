"""Define the result of grading one sample: a reward, the reason of a failure, or a configuration error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.stages.rewards.hub import RewardSettings, builtin_reward_name, get_builtin_reward
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import OVERLONG_PENALTY, TRAIN_REWARD, Sample, Status

# reward component -> option that sets it
RESERVED = {TRAIN_REWARD: "--custom-reward-post-process-path", OVERLONG_PENALTY: "--overlong-buffer-len"}


@dataclass(frozen=True)
class Outcome:
    """Result of grading a sample. Exactly one of these fields is set: `reward`; `error`, the reason why grading this
    sample failed; or `request_error`, an error in options or data that fails the whole run. `rewards` has the numbers
    of a reward that returned a dictionary.

    The text of `error` before the first colon becomes the name of a metric, `rollout/error_cat/*`: do not reword it.
    """

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    request_error: str | None = None

    def apply(self, sample: Sample) -> None:
        """Set the reward of `sample`, or its status FAILED and `metadata["error"]`. Raises RewardError if
        `request_error` is set."""
        if self.request_error is not None:
            raise RewardError(self.request_error)
        sample.reward, sample.rewards = self.reward, self.rewards
        if self.error is not None:
            sample.status = Status.FAILED
            sample.metadata["error"] = self.error


def outcome_of_exception(error: BaseException, name: str) -> Outcome:
    """Return the outcome of a sample for which the reward function `name` raised `error`."""
    return Outcome(error=f"{type(error).__name__}: {error} (raised by {name})")


def grade_builtin(sample: Sample, settings: RewardSettings) -> Outcome:
    """Grade a sample in the current process, with the built-in reward that its metadata or `settings` names."""
    name = builtin_reward_name(sample.metadata, settings.rm_type)
    try:
        reward = get_builtin_reward(name)
    except RewardError as error:
        return Outcome(request_error=str(error))
    try:
        value = reward.function(sample, **{option: getattr(settings, option) for option in reward.options})
    except Exception as error:
        return outcome_of_exception(error, name)
    return parse_reward(value, settings.reward_key, name)


def parse_rewards(values: Any, num_samples: int, reward_key: str | None, reward_name: str) -> list[Outcome]:
    """Return one outcome per sample from `values`, the list that the reward `reward_name` returned for all samples.
    `reward_key`: see `parse_reward`."""
    if hasattr(values, "tolist") and getattr(values, "ndim", None) != 0:  # an array, a tensor or a series
        values = list(values)
    if not isinstance(values, list | tuple):
        reason = f"no list: {reward_name} returned {_safe_repr(values)} for {num_samples} samples"
    elif len(values) != num_samples:
        reason = (
            f"another number of rewards than samples: {reward_name} returned {len(values)} rewards for {num_samples} "
            "samples"
        )
    else:
        return [parse_reward(value, reward_key, reward_name) for value in values]
    return [Outcome(error=f"the reward function returned {reason}")] * num_samples


def parse_reward(value: Any, reward_key: str | None, reward_name: str) -> Outcome:
    """Return the outcome of one sample from `value`, the number or dictionary that the reward `reward_name` returned.
    `reward_key`: key of the reward in a dictionary (--reward-key)."""
    rewards: dict[str, float] = {}
    if isinstance(value, Mapping):
        if reward_key is None or reward_key not in value:
            keys = ", ".join(map(repr, value))
            return Outcome(
                request_error=f"the reward of {reward_name} is a dictionary with the keys {keys}, but one number is "
                f"needed: select one key with --reward-key (now {reward_key})"
            )
        for key, flag in RESERVED.items():
            if key in value:
                return Outcome(
                    request_error=f"the reward of {reward_name} has the key {key!r}, which is reserved for {flag}: "
                    "rename it"
                )
        rewards = {str(key): number for key, part in value.items() if (number := _to_float(part)) is not None}
        value = value[reward_key]
    reward = _to_float(value)
    if value is None:
        return Outcome(error=f"the reward function returned None: {reward_name} must return a number")
    if reward is None:
        return Outcome(error=f"the reward function returned no number: {reward_name} returned {_safe_repr(value)}")
    if not math.isfinite(reward):
        return Outcome(error=f"the reward function returned {reward}: {reward_name} must return a finite number")
    return Outcome(reward=reward, rewards={key: part for key, part in rewards.items() if math.isfinite(part)})


def _to_float(value: Any) -> float | None:
    """Convert a number, or an array or tensor of one number (without importing NumPy or torch); return None for
    anything else."""
    try:
        number = value.item() if hasattr(value, "item") else value
        return float(number) if hasattr(number, "__float__") else None
    except Exception:  # a user-defined class may raise anything; an array of several numbers raises, too
        return None


def _safe_repr(value: Any) -> str:
    try:
        return f"{value!r:.100} ({type(value).__name__})"
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def penalize_overlong(sample: Sample, max_length: int, buffer: int, factor: float) -> None:
    """Add DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13) to the reward of a sample, and record it as the
    component OVERLONG_PENALTY of its rewards.

    It is 0 for a response of up to `max_length` - `buffer` tokens, falls linearly to -`factor` at `max_length` tokens,
    and stays there. A sample without a reward does not change, nor one that has the component.
    """
    if sample.reward is not None and OVERLONG_PENALTY not in sample.rewards:
        num_excess = min(max(sample.response_length - (max_length - buffer), 0), buffer)
        penalty = -num_excess / buffer * factor
        sample.reward, sample.rewards = sample.reward + penalty, {**sample.rewards, OVERLONG_PENALTY: penalty}
