"""Call user-defined hooks with the samples of a round, and apply their changes.

    def sample_hook(args, sample)                 gets each sample after generation, before grading
    def sample_filter(args, groups)               gets the kept groups of a round; sets `remove_sample` on samples that
                                                  are not trained on
    def process_all(args, groups, data_source)    gets all groups of a round, also dropped ones; changes are ignored
    def log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time)
    def log_eval_rollout_data(rollout_id, args, data, extra_metrics)
                                                  get the samples of the round's commit; numbers that they add to the
                                                  metrics are recorded with it

Hooks may be `async`. They get copies of the samples (user_sample.py), whose fields also have their aliases; changes are
checked and then applied. A sample with `remove_sample` keeps its reward, which still counts in its group's mean. A hook
blocks the calling thread for up to `--reward-timeout` seconds; from an event loop, use `asyncio.to_thread`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from penstock.stages.plugins import DEFAULT_NAMES, Plugin
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.prompts.data_source import Group
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status

# Fields that a hook cannot change: the identity of the sample, and the policy that generated it.
_FIXED = (
    *("sample_id", "group_id", "trajectory_id", "rollout_id", "policy_versions"),
    *("routed_experts", "teacher_logprobs"),
)
_CHANGEABLE = [field.name for field in fields(Sample) if field.name not in _FIXED]


class Hooks:
    """Calls the user-defined hooks that `config` names. The method for a hook that `config` does not name does nothing.

    Raises:
        PluginError: a hook does not load or has the wrong signature.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._args = SimpleNamespace(**config.plugin_arguments())

        def plugin(option: str, *parameters: str) -> Plugin | None:
            path, name = getattr(config, option), DEFAULT_NAMES[option]
            return Plugin(path, parameters, default_name=name, timeout=config.reward_timeout) if path else None

        self._sample_hook = plugin("rollout_sample_hook_path", "args", "sample")
        self._sample_filter = plugin("rollout_sample_filter_path", "args", "groups")
        self._all_samples = plugin("rollout_all_samples_process_path", "args", "groups", "data_source")

    def run_sample_hook(self, sample: Sample) -> None:
        """Call the sample hook. If the hook raises, exceeds the timeout or makes the sample invalid, the sample's
        status becomes failed, with the reason in `metadata["error"]`."""
        if self._sample_hook is None:
            return
        view = UserSample.of(sample)
        try:
            _check_returns_nothing(self._sample_hook(self._args, view), view, self._sample_hook)
            _apply_changes([(sample, view)], self._sample_hook)
        except ValueError as error:
            sample.status, sample.metadata["error"] = Status.FAILED, str(error)

    def run_sample_filter(self, groups: list[Group]) -> None:
        """Call the sample filter with the kept groups of a round.

        Raises:
            PluginError: the filter raises, exceeds the timeout, or makes a sample invalid.
        """
        if self._sample_filter is None:
            return
        views = _copy_groups(groups)
        arguments = [list(group) for group in views]
        _check_returns_nothing(self._sample_filter(self._args, arguments), arguments, self._sample_filter)
        if arguments != views:
            raise PluginError(
                f"{self._sample_filter.name} adds, removes or reorders groups or samples: to exclude a sample from "
                "training, set its `remove_sample` to True"
            )
        pairs = [pair for group, seen in zip(groups, views) for pair in zip(group, seen)]
        _apply_changes(pairs, self._sample_filter)

    def run_round_hook(self, groups: list[Group], source: Any) -> None:
        """Call the hook `process_all` with all groups at the end of a round.

        Raises:
            PluginError: the hook raises or exceeds the timeout.
        """
        if self._all_samples is not None:
            self._all_samples(self._args, _copy_groups(groups), source)


def run_log_function(
    config: RolloutConfig, rollout_id: int, samples: Sequence[Sample], seconds: float, data_set: str | None = None
) -> dict[str, float]:
    """Call the log function of rollouts or, for a `data_set`, of evaluations, and return the metrics that it adds; {}
    if `config` names none.

    Args:
        config: names the functions.
        rollout_id: number of the round; in an evaluation, the policy version.
        samples: samples of the commit.
        seconds: of the rollout.
        data_set: name of the evaluation's data set; None: a rollout.

    Raises:
        PluginError: the function raises, exceeds the timeout, or adds a metric that is not a finite number.
    """
    path = config.custom_rollout_log_function_path if data_set is None else config.custom_eval_rollout_log_function_path
    if path is None:
        return {}
    plugin = load_log_function(config, is_eval=data_set is not None)
    metrics: dict[str, Any] = {}
    args = SimpleNamespace(**config.plugin_arguments(), logged_metrics=metrics)
    views = [UserSample.of(sample) for sample in samples]
    if data_set is None:
        plugin(rollout_id, args, views, metrics, seconds)
    else:
        truncated = [sample.status is Status.TRUNCATED for sample in samples]
        rewards = [sample.reward for sample in samples]
        data = {data_set: {"rewards": rewards, "truncated": truncated, "samples": views}}
        plugin(rollout_id, args, data, metrics)
    return numbers_of(metrics, plugin.name)


def load_log_function(config: RolloutConfig, *, is_eval: bool) -> Plugin:
    """Load the log function of rollouts or evaluations, which `config` names. Raises PluginError."""
    parameters: tuple[str, ...] = ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    option = "custom_rollout_log_function_path"
    if is_eval:
        parameters = ("rollout_id", "args", "data", "extra_metrics")
        option = "custom_eval_rollout_log_function_path"
    return Plugin(
        getattr(config, option), parameters, default_name=DEFAULT_NAMES[option], timeout=config.reward_timeout
    )


def numbers_of(metrics: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the metrics of a user-defined function as floats. Raises PluginError, which begins with `name`."""
    out = {}
    for key, value in metrics.items():
        try:
            out[str(key)] = float(value)
        except (TypeError, ValueError):
            raise PluginError(f"{name} adds the metric {key!r:.80} = {value!r:.80}: give a number") from None
        if not math.isfinite(out[str(key)]):
            raise PluginError(f"{name} adds the metric {key!r:.80} = {value!r:.80}: give a finite number")
    return out


def _copy_groups(groups: list[Group]) -> list[list[UserSample]]:
    return [[UserSample.of(sample) for sample in group] for group in groups]


def _check_returns_nothing(value: Any, argument: Any, plugin: Plugin) -> None:
    """Raise PluginError if a hook returned a value other than None or its argument; the value would be ignored."""
    if value is not None and value is not argument:
        raise PluginError(
            f"{plugin.name} returned {type(value).__name__}: modify the argument in place and return None"
        )


def _apply_changes(samples_and_changed: list[tuple[Sample, UserSample]], plugin: Plugin) -> None:
    """Apply a hook's changes to the samples. If any change is invalid, apply none and raise PluginError."""
    try:
        changed = [(sample, checked_sample(view)) for sample, view in samples_and_changed]
        for _, new in changed:
            if new.reward is not None and not (isinstance(new.reward, int | float) and math.isfinite(new.reward)):
                raise PluginError(f"the sample's reward is {new.reward!r:.100}: set a finite number, or None")
    except ValueError as error:
        raise PluginError(f"{plugin.name} makes a sample invalid: {error}") from error
    for sample, new in changed:
        for name in _CHANGEABLE:
            setattr(sample, name, getattr(new, name))
