"""Functions of the user's that look at samples on their way, and may change them.

    def sample_hook(args, sample)                                each sample, generated and not yet graded
    def sample_filter(args, groups)                              the groups of a round: sets `remove_sample` on what is not trained on
    def process_all(args, groups, data_source)                   all groups of a round, those dropped included: looks only

With `async` or without. They are given samples in which slime's names work too (user_sample.py), as copies: what they have changed is
checked and then taken over. A sample that is removed keeps its reward, which still counts in its group's mean. They block their
caller, up to `--reward-timeout` a call: call them beside an event loop (`asyncio.to_thread`), not in it.
"""

from __future__ import annotations

import math
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from stages.plugins import Plugin
from stages.rollout.config import RolloutConfig
from stages.rollout.round import Group
from stages.rollout.user_sample import UserSample, taken
from storage.errors import PluginError
from storage.sample import Sample, Status

# Which sample it is, and who generated it, is not for a hook to say.
_FIXED = ("sample_id", "group_id", "trajectory_id", "rollout_id", "policy_versions", "routed_experts")
_CHANGEABLE = [field.name for field in fields(Sample) if field.name not in _FIXED]


class Hooks:
    """The hooks that a config names; those that it does not name do nothing. Raises PluginError if one does not load or fit."""

    def __init__(self, config: RolloutConfig) -> None:
        self._args = SimpleNamespace(**config.model_dump())

        def plugin(path: str | None, words: tuple[str, ...], usual_name: str) -> Plugin | None:
            return Plugin(path, words, usual_name=usual_name, timeout=config.reward_timeout) if path else None

        self._sample_hook = plugin(config.rollout_sample_hook_path, ("args", "sample"), "sample_hook")
        self._sample_filter = plugin(config.rollout_sample_filter_path, ("args", "groups"), "sample_filter")
        self._all_samples = plugin(config.rollout_all_samples_process_path, ("args", "groups", "data_source"), "process_all")

    def sample_hook(self, sample: Sample) -> None:
        """Before a sample is graded. If the hook raises, hangs or leaves nonsense behind, the sample has failed and says why."""
        if self._sample_hook is None:
            return
        view = UserSample.of(sample)
        try:
            _nothing_returned(self._sample_hook(self._args, view), view, self._sample_hook)
            _take_over([(sample, view)], self._sample_hook)
        except ValueError as error:
            sample.status, sample.metadata["error"] = Status.FAILED, str(error)

    def sample_filter(self, groups: list[Group]) -> None:
        """Before a round is written. Raises PluginError if the filter raises, hangs, or leaves nonsense behind."""
        if self._sample_filter is None:
            return
        views = _views(groups)
        given = [list(group) for group in views]
        _nothing_returned(self._sample_filter(self._args, given), given, self._sample_filter)
        if given != views:
            raise PluginError(f"{self._sample_filter.name} changes the list of samples: set `remove_sample` on them instead")
        pairs = [pair for group, seen in zip(groups, views) for pair in zip(group, seen)]
        _take_over(pairs, self._sample_filter)

    def all_samples(self, groups: list[Group], source: Any) -> None:
        """When a round has come to its end, whatever became of its groups. Raises PluginError if the function raises or hangs."""
        if self._all_samples is not None:
            self._all_samples(self._args, _views(groups), source)


def check_hooks(config: RolloutConfig) -> None:
    """Preflight: every hook loads and can be called as it will be. Raises PluginError."""
    Hooks(config)


def _views(groups: list[Group]) -> list[list[UserSample]]:
    return [[UserSample.of(sample) for sample in group] for group in groups]


def _nothing_returned(value: Any, given: Any, plugin: Plugin) -> None:
    """What is returned would be lost without a word."""
    if value is not None and value is not given:
        raise PluginError(f"{plugin.name} returned {type(value).__name__}: change what it is given, and return nothing")


def _take_over(pairs: list[tuple[Sample, UserSample]], plugin: Plugin) -> None:
    """What the user has changed becomes true; all of it or nothing."""
    try:
        changed = [(sample, taken(view)) for sample, view in pairs]
        for _, new in changed:
            _check_reward(new.reward)
    except ValueError as error:
        raise PluginError(f"{plugin.name} leaves a sample that cannot be used: {error}") from error
    for sample, new in changed:
        for name in _CHANGEABLE:
            setattr(sample, name, getattr(new, name))


def _check_reward(reward: Any) -> None:
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise PluginError(f"its reward is {reward!r:.100}: a finite number or None is needed")
