"""What grading one sample gives: a reward, a reason why there is none, or a sentence about a wrong request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.rewards.hub import reward_named
from storage.sample import Sample, Status


@dataclass(frozen=True)
class Settings:
    """How to grade; what a grading process is told when it starts."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    timeout: float = 30.0  # seconds a sample
    arguments: dict[str, Any] = field(default_factory=dict)  # `args` of a custom function


@dataclass(frozen=True)
class Outcome:
    """One of the three: `reward`, `error` (this sample failed) or `wrong` (the request is wrong, for every sample)."""

    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    wrong: str | None = None

    def apply(self, sample: Sample) -> None:
        """Write it into the sample. Raises ValueError if the request is wrong."""
        if self.wrong is not None:
            raise ValueError(self.wrong)
        sample.reward, sample.rewards = self.reward, self.rewards
        if self.error is not None:
            sample.status = Status.FAILED
            sample.metadata["error"] = self.error


def failed(reason: str) -> Outcome:
    """This sample has no reward."""
    return Outcome(error=reason)


def outcome_of(sample: Sample, settings: Settings, custom: Callable[[Sample], Any] | None = None) -> Outcome:
    """Grade a sample, here and now: by `custom`, else by its metadata's `rm_type`, else by the settings'."""
    function = custom
    if function is None:
        name = rm_type_of(sample, settings)
        if name is None:
            return Outcome(
                wrong="there is no reward: give --rm-type or --custom-rm-path, or an `rm_type` in the metadata of every row"
            )
        try:
            function = reward_named(name).function
        except ValueError as error:
            return Outcome(wrong=str(error))
    try:
        value = function(sample)
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
    return _as_outcome(value, settings.reward_key)


def rm_type_of(sample: Sample, settings: Settings) -> str | None:
    """Name of the built-in reward for this sample."""
    return sample.metadata.get("rm_type") or settings.rm_type


def _as_outcome(value: Any, key: str | None) -> Outcome:
    rewards: dict[str, float] = {}
    if isinstance(value, Mapping):
        if key is None or key not in value:
            known = ", ".join(map(repr, value))
            return Outcome(
                wrong=f"the reward is a dictionary with {known}, and one number is needed: name one with --reward-key (now {key})"
            )
        rewards = {str(name): float(part) for name, part in value.items() if _is_number(part)}
        value = value[key]
    if value is None:
        return failed("the reward function returned None")
    if not _is_number(value):
        return Outcome(
            wrong=f"the reward function returned {value!r} ({type(value).__name__}); return a number, or a dictionary of numbers"
        )
    if not math.isfinite(float(value)):
        return failed(f"the reward function returned {float(value)}")
    return Outcome(reward=float(value), rewards=rewards)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__")  # also NumPy's and torch's scalars, without importing either
