"""Define the settings of grading, select the reward that grades a sample, and list the built-in rewards, which
docs/rewards.md describes.

The reward of a sample is named by the first of these that is set: `custom_rm_path` in the row's metadata,
--custom-rm-path, `rm_type` in the row's metadata, --rm-type.

A built-in reward is a function that takes a sample and returns a number, or a dictionary of numbers from which
`--reward-key` selects one. A reward that waits for a server is async and gets `args` as its first argument, like a
user-defined reward. To add a built-in reward, write a function in builtin.py and add an entry to REWARDS; user-defined
rewards (custom_reward.py) need no entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from penstock.stages.rewards import builtin
from penstock.storage.errors import PluginError, RewardError, check_rules, nearest_name

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?::[A-Za-z_]\w*)?")


@dataclass(frozen=True)
class RewardSettings:
    """How samples are graded; every grading process receives these settings when it starts."""

    rm_type: str | None = None  # name of the built-in reward; a sample's metadata overrides it
    custom_rm_path: str | None = None  # user-defined function or class; takes precedence over built-in rewards
    reward_key: str | None = None  # key of the reward, if the reward function returns a dictionary
    timeout: float = 30.0  # seconds per sample
    start_timeout: float = 300.0  # seconds to import the reward and construct its class in a grading process
    group_rm: bool = False  # the function at custom_rm_path takes all samples of a prompt
    rm_url: str | None = None  # server of remote_rm
    rm_model_path: str | None = None  # constructor argument of a class at custom_rm_path
    arguments: dict[str, Any] = field(default_factory=dict)  # attributes of the `args` of a user-defined function
    allow_row_code: str | None = None  # package whose functions data rows may name as rewards; None: not allowed
    evaluated_integers: bool = False  # `math` and `deepscaler`: an integer label requires a number as the answer
    required_package: str | None = None  # package that must define the function at custom_rm_path


def builtin_reward_name(metadata: Mapping[str, Any], rm_type: str | None) -> str:
    """Return the name of the built-in reward that grades a row: `rm_type` in the row's metadata, else --rm-type, else
    ''."""
    return str(metadata.get("rm_type") or "").strip() or rm_type or ""


def row_reward_path(metadata: Mapping[str, Any], allowed: str | None) -> str | None:
    """Return the path of the user-defined reward that a row's metadata names (`custom_rm_path`), or None. It must be
    inside the package `allowed`; if that is None, rows may not name rewards."""
    path = metadata.get("custom_rm_path")
    if not path:
        return None
    is_path = isinstance(path, str) and _DOTTED_PATH.fullmatch(path)
    rules = [
        (
            allowed is None,
            f"a row's metadata names code to import, custom_rm_path {path!r:.100}, which is off by default: if you "
            "trust the data, give --allow-row-code PACKAGE, else remove custom_rm_path from the metadata",
        ),
        (
            not is_path or not path.startswith((f"{allowed}.", f"{allowed}:")),
            f"a row's custom_rm_path {path!r:.100} is not inside --allow-row-code {allowed}: write "
            f"{allowed}.module:name",
        ),
    ]
    check_rules(rules, PluginError)
    return str(path)


# ---- built-in rewards ------------------------------------------------------------------------------------------------


BOXED_PREFIX = "boxed_"


@dataclass(frozen=True)
class BuiltinReward:
    """A built-in reward: its function, and how to call the function."""

    function: Callable[..., Any]  # takes a sample, or (args, sample) if `remote`
    in_process: bool = False  # takes microseconds and cannot hang, so it is called without a grading process
    remote: bool = False  # async function that requests the reward from the server at --rm-url
    options: tuple[str, ...] = ()  # fields of RewardSettings that are passed as keyword arguments
    keys: tuple[str, ...] = ()  # keys of the returned dictionary; --reward-key must name one of them
    compares_label: bool = False  # compares the response with one text, the label, which every row must then have
    answer_fields: tuple[str, ...] = ()  # metadata fields that may have the answer in place of the label
    graded_format: str = ""  # text that a response must contain to get more than the lowest reward; "": none
    # called with a row's label and metadata; raises RewardError if the reward cannot grade responses to this row
    check_row: Callable[[str, dict[str, Any]], object] = lambda label, metadata: None


REWARDS: dict[str, BuiltinReward] = {
    "dapo": BuiltinReward(
        builtin.dapo,
        keys=("score", "acc"),
        compares_label=True,
        graded_format="Answer:",
        check_row=lambda label, metadata: builtin.to_minerva_number(label),
    ),
    "deepscaler": BuiltinReward(
        builtin.deepscaler, options=("evaluated_integers",), compares_label=True, graded_format=r"\boxed"
    ),
    "exact_number": BuiltinReward(
        builtin.exact_number,
        in_process=True,
        compares_label=True,
        check_row=lambda label, metadata: builtin.to_integer(label),
    ),
    "f1": BuiltinReward(builtin.token_f1, compares_label=True),
    "gpqa": BuiltinReward(
        builtin.gpqa,
        compares_label=True,
        answer_fields=("correct_letter", "correct_answer", "answer_text"),
        check_row=builtin.check_correct_option,
    ),
    "ifbench": BuiltinReward(builtin.ifbench, check_row=lambda label, metadata: builtin.read_instructions(metadata)),
    "math": BuiltinReward(
        lambda sample, **options: builtin.grade_math(sample.response, sample.label, **options),
        options=("evaluated_integers",),
        compares_label=True,
        graded_format=r"\boxed",
    ),
    # 0 or 1, derived from a hash of the sample id, so that grading again gives the same reward
    "random": BuiltinReward(
        lambda sample: float(xxhash.xxh3_64_intdigest(sample.sample_id.encode()) & 1), in_process=True
    ),
    "remote_rm": BuiltinReward(builtin.remote_rm, remote=True),
    "zero": BuiltinReward(lambda sample: 0.0, in_process=True),
}


def get_builtin_reward(name: str) -> BuiltinReward:
    """Return the built-in reward named `name` (--rm-type). The prefix `boxed_` selects a variant that grades only the
    content of the last \\boxed{} in the response."""
    base_name = name.removeprefix(BOXED_PREFIX)
    if base_name not in REWARDS:
        near = nearest_name(base_name, REWARDS)
        hint = f"did you mean {near}?" if near else "choose a built-in reward, or give --custom-rm-path"
        problem = f"reward {name!r} is unknown; the built-in rewards are {', '.join(REWARDS)}: {hint}"
        if not name:
            problem = "no reward is given: give --rm-type or --custom-rm-path, or an rm_type in every row's metadata"
        raise RewardError(problem)
    reward = REWARDS[base_name]
    if name == base_name:
        return reward

    def grade_boxed_content(*args_and_sample: Any, **options: Any) -> Any:
        *args, sample = args_and_sample
        return reward.function(*args, replace(sample, response=builtin.last_boxed(sample.response) or ""), **options)

    return replace(reward, function=grade_boxed_content, graded_format=r"\boxed")


def get_checked_builtin_reward(name: str, rm_url: str | None, reward_key: str | None) -> BuiltinReward:
    """Return the built-in reward `name`. Raises RewardError if it is unknown, or a flag that it needs is missing."""
    reward = get_builtin_reward(name)
    rules = [
        (
            reward.keys and reward_key not in reward.keys,
            f"the reward {name} returns a dictionary with the keys {', '.join(reward.keys)}: select one of them with "
            f"--reward-key (now {reward_key})",
        ),
        (reward.remote and not rm_url, f"the reward {name} needs a server: give the server's URL with --rm-url"),
    ]
    check_rules(rules, RewardError)
    return reward
