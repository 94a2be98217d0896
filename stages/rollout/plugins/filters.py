"""Load and call dynamic sampling filters, user-defined or built-in. A filter decides whether to train on a group:

    def check(args, samples) -> bool            or a NumPy or torch truth value, or a DynamicFilterOutput

collect.py drops a group that the filter rejects and generates another group instead.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from penstock.stages.plugins import DEFAULT_NAMES, Plugin
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.metrics import format_reward
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status

Filter = Callable[[list[Sample]], "DynamicFilterOutput"]
GroupFilter = Callable[[list[Sample]], Awaitable["DynamicFilterOutput"]]
_MIN_STD = 1e-6  # reward standard deviations up to this value count as 0 (rounding errors)


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Decision of a filter: whether to train on a group, and if not, the reason. With `keep_when_insufficient`, the
    group is kept anyway if dropping it would require sampling another batch of prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group if the rewards of its graded samples differ: with equal rewards, group-relative advantages are
    zero."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return DynamicFilterOutput(False, "no_reward")
    keep = len(rewards) > 1 and statistics.stdev(rewards) > _MIN_STD
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{format_reward(rewards[0])}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group if its rewards differ, or if dropping it would require another batch of prompts."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


BUILT_IN: tuple[Callable[..., Any], ...] = (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback)


def load_filter(path: str, args: Any) -> Filter:
    """Load the filter that `path` names, and return a function that calls it with copies of a group's samples. A call
    blocks the thread for up to `args.reward_timeout` seconds; in an event loop, call it with `asyncio.to_thread`."""
    name = DEFAULT_NAMES["dynamic_sampling_filter_path"]
    plugin = Plugin(path, ("args", "samples"), default_name=name, timeout=args.reward_timeout)
    if plugin.function in BUILT_IN:
        return lambda samples: plugin.function(args, samples)

    def call_filter(samples: list[Sample]) -> DynamicFilterOutput:
        value = plugin(args, [UserSample.of(sample) for sample in samples])
        keep, reason = getattr(value, "keep", value), getattr(value, "reason", None)
        scalar = keep.item() if getattr(keep, "shape", None) == () else keep  # a NumPy or torch scalar
        if not isinstance(scalar, bool):
            raise PluginError(
                f"{plugin.name} returned {value!r:.100} ({type(value).__name__}): return True to keep the group, "
                "False to omit it, or DynamicFilterOutput(keep, reason)"
            )
        fallback = bool(getattr(value, "keep_when_insufficient", False))
        return DynamicFilterOutput(
            scalar, None if scalar else str(reason or plugin.name.partition(" of ")[0]), fallback
        )

    return call_filter


def load_group_filter(config: RolloutConfig) -> GroupFilter:
    """Return the dynamic sampling filter that `config` names, or one that keeps every group. A group whose samples have
    all failed is dropped without calling the named filter."""
    path = config.dynamic_sampling_filter_path
    check = load_filter(path, SimpleNamespace(**config.plugin_arguments())) if path else None

    async def group_filter(group: list[Sample]) -> DynamicFilterOutput:
        if check is None:
            return DynamicFilterOutput(True)
        if all(sample.status is Status.FAILED for sample in group):
            return DynamicFilterOutput(False, "failed")
        return await asyncio.to_thread(check, group)

    return group_filter
