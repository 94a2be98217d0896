"""The built-in rewards, one file and one row of the table each, and which of them grades a sample.

A reward is a function from a sample to a number, or to a dictionary of numbers of which `--reward-key` names one. A reward of
your own needs no row here (custom.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stages.rewards.boxed import last_boxed
from stages.rewards.coin import coin
from stages.rewards.exact_number import exact_number
from stages.rewards.math_answer import math_answer
from storage.sample import Sample

RewardFunction = Callable[[Sample], float | Mapping[str, float]]
BOXED = "boxed_"


@dataclass(frozen=True)
class Reward:
    """A row of the table."""

    function: RewardFunction
    instant: bool  # certain to end within microseconds: called in place, not in a grading process


REWARDS: dict[str, Reward] = {
    "exact_number": Reward(exact_number, instant=True),
    "math": Reward(math_answer, instant=False),
    "random": Reward(coin, instant=True),
}


def reward_named(name: str) -> Reward:
    """The reward of a `--rm-type`; `boxed_` in front of a name grades the last \\boxed{} of the response alone.

    Raises:
        ValueError: no such reward.
    """
    bare = name.removeprefix(BOXED)
    if bare not in REWARDS:
        near = difflib.get_close_matches(bare, REWARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "or give a function of yours with --custom-rm-path"
        raise ValueError(f"reward {name!r} is unknown; the built-in ones are {', '.join(REWARDS)}: {hint}")
    reward = REWARDS[bare]
    return replace(reward, function=_in_box(reward.function)) if name != bare else reward


def _in_box(function: RewardFunction) -> RewardFunction:
    def graded(sample: Sample) -> float | Mapping[str, float]:
        return function(replace(sample, response=last_boxed(sample.response) or ""))

    return graded
