"""The built-in rewards, one file and one row of the table each, and which of them grades a sample.

A reward is a function from a sample to a number, or to a dictionary of numbers of which `--reward-key` names one; one that waits for
a server is `async` and gets `args` first, as a user's would. A reward of your own needs no row here (forms.py). docs/rewards.md
has the same table for readers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stages.rewards.boxed import last_boxed
from stages.rewards.coin import coin
from stages.rewards.dapo import dapo
from stages.rewards.deepscaler import deepscaler
from stages.rewards.exact_number import exact_number
from stages.rewards.gpqa import gpqa
from stages.rewards.ifbench import ifbench
from stages.rewards.math_answer import math_answer
from stages.rewards.remote import remote_rm
from stages.rewards.token_f1 import token_f1
from storage.errors import RewardError

BOXED = "boxed_"


@dataclass(frozen=True)
class Reward:
    """A row of the table."""

    function: Callable[..., Any]  # of a sample; of (args, sample) if `remote`
    instant: bool = False  # certain to end within microseconds: called in place, not in a grading process
    remote: bool = False  # asks the server at --rm-url: a coroutine, many at a time
    options: tuple[str, ...] = ()  # fields of Settings that the function takes by name
    keys: tuple[str, ...] = ()  # of the dictionary that it gives, if it does: --reward-key names one


REWARDS: dict[str, Reward] = {
    "dapo": Reward(dapo, keys=("score", "acc")),
    "deepscaler": Reward(deepscaler, options=("evaluated_integers",)),
    "exact_number": Reward(exact_number, instant=True),
    "f1": Reward(token_f1),
    "gpqa": Reward(gpqa),
    "ifbench": Reward(ifbench),
    "math": Reward(math_answer, options=("evaluated_integers",)),
    "random": Reward(coin, instant=True),
    "remote_rm": Reward(remote_rm, remote=True),
}


def reward_named(name: str) -> Reward:
    """The reward of a `--rm-type`; `boxed_` in front of a name grades the last \\boxed{} of the response alone.

    Raises:
        RewardError: no such reward.
    """
    bare = name.removeprefix(BOXED)
    if bare not in REWARDS:
        near = difflib.get_close_matches(bare, REWARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "or give a function of yours with --custom-rm-path"
        raise RewardError(f"reward {name!r} is unknown; the built-in ones are {', '.join(REWARDS)}: {hint}")
    reward = REWARDS[bare]
    return reward if name == bare else replace(reward, function=partial(_grade_box, reward.function))


def _grade_box(function: Callable[..., Any], *args_and_sample: Any, **options: Any) -> Any:
    *args, sample = args_and_sample
    return function(*args, replace(sample, response=last_boxed(sample.response) or ""), **options)
