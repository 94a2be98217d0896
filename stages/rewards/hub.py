"""Table of the built-in rewards; docs/rewards.md describes each reward.

A built-in reward is a function that takes a sample and returns a number, or a dictionary of numbers from which
`--reward-key` selects one. A reward that waits for a server is async and gets `args` as its first argument, like a
user-defined reward. To add a built-in reward, write a file in builtin/ and add an entry to REWARDS; user-defined
rewards (custom_reward.py) need no entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.stages.rewards.builtin.boxed import last_boxed
from penstock.stages.rewards.builtin.coin import random_reward
from penstock.stages.rewards.builtin.dapo import dapo
from penstock.stages.rewards.builtin.deepscaler import deepscaler
from penstock.stages.rewards.builtin.exact_number import exact_number
from penstock.stages.rewards.builtin.gpqa import gpqa
from penstock.stages.rewards.builtin.ifbench import ifbench
from penstock.stages.rewards.builtin.math_answer import math_answer
from penstock.stages.rewards.builtin.remote import remote_rm
from penstock.stages.rewards.builtin.token_f1 import token_f1
from penstock.stages.rewards.builtin.zero import zero_reward
from penstock.storage.errors import RewardError
from penstock.storage.near_names import nearest_name

BOXED_PREFIX = "boxed_"


@dataclass(frozen=True)
class BuiltinReward:
    """A built-in reward: its function, and how to call the function."""

    function: Callable[..., Any]  # takes a sample, or (args, sample) if `remote`
    in_process: bool = False  # takes microseconds and cannot hang, so it is called without a grading process
    remote: bool = False  # async function that requests the reward from the server at --rm-url
    options: tuple[str, ...] = ()  # fields of RewardSettings that are passed as keyword arguments
    keys: tuple[str, ...] = ()  # keys of the returned dictionary; --reward-key must name one of them


REWARDS: dict[str, BuiltinReward] = {
    "dapo": BuiltinReward(dapo, keys=("score", "acc")),
    "deepscaler": BuiltinReward(deepscaler, options=("evaluated_integers",)),
    "exact_number": BuiltinReward(exact_number, in_process=True),
    "f1": BuiltinReward(token_f1),
    "gpqa": BuiltinReward(gpqa),
    "ifbench": BuiltinReward(ifbench),
    "math": BuiltinReward(math_answer, options=("evaluated_integers",)),
    "random": BuiltinReward(random_reward, in_process=True),
    "remote_rm": BuiltinReward(remote_rm, remote=True),
    "zero": BuiltinReward(zero_reward, in_process=True),
}


def get_builtin_reward(name: str) -> BuiltinReward:
    """Return the built-in reward named `name` (--rm-type). The prefix `boxed_` selects a variant that grades only the
    content of the last \\boxed{} in the response.

    Raises:
        RewardError: there is no built-in reward of this name.
    """
    base_name = name.removeprefix(BOXED_PREFIX)
    if base_name not in REWARDS:
        near = nearest_name(base_name, REWARDS)
        hint = f"did you mean {near}?" if near else "choose a built-in reward, or give --custom-rm-path"
        raise RewardError(f"reward {name!r} is unknown; the built-in rewards are {', '.join(REWARDS)}: {hint}")
    reward = REWARDS[base_name]
    if name == base_name:
        return reward

    def grade_boxed_content(*args_and_sample: Any, **options: Any) -> Any:
        *args, sample = args_and_sample
        return reward.function(*args, replace(sample, response=last_boxed(sample.response) or ""), **options)

    return replace(reward, function=grade_boxed_content)


def get_checked_builtin_reward(name: str, rm_url: str | None, reward_key: str | None) -> BuiltinReward:
    """Return the built-in reward `name`. Raises RewardError if it is unknown, or a flag that it needs is missing."""
    reward = get_builtin_reward(name)
    if reward.keys and reward_key not in reward.keys:
        raise RewardError(
            f"the reward {name} returns a dictionary with the keys {', '.join(reward.keys)}: "
            f"select one of them with --reward-key (now {reward_key})"
        )
    if reward.remote and not rm_url:
        raise RewardError(f"the reward {name} needs a server: give the server's URL with --rm-url")
    return reward
