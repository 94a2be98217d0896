"""Which finished groups are trained on (dynamic sampling): a user-defined filter, or a built-in one.

    def check(args, samples) -> bool                             also a NumPy or torch truth value, or a DynamicFilterOutput

collect.py drops the groups that are not kept and samples others instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stages.plugins import Plugin
from stages.rollout.metrics import rounded
from stages.rollout.user_sample import UserSample
from storage.errors import PluginError
from storage.sample import Sample

Filter = Callable[[list[Sample]], "DynamicFilterOutput"]
_CONTRAST = 1e-6  # standard deviations up to this are rounding


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is trained on, and if not, why: the groups dropped are counted by their reason.

    With `keep_when_insufficient` a group that is not kept is trained on all the same if dropping it would start another wave of prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ: without contrast a group-relative estimator learns nothing from it.

    Samples without a reward (failed ones) are not compared. The name and the threshold are slime's.
    """
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not rewards:
        return DynamicFilterOutput(False, "no_reward")
    keep = len(rewards) > 1 and statistics.stdev(rewards) > _CONTRAST
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{rounded(rewards[0])}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ, but keep others rather than start another wave of prompts. The name is slime's."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


BUILT_IN: tuple[Callable[..., Any], ...] = (check_reward_nonzero_std, check_reward_nonzero_std_with_fallback)


def load_filter(path: str, args: Any) -> Filter:
    """The filter at `path`, ready to be called with the samples of a group. It sees copies, and may take `args.reward_timeout` seconds.

    A filter of the user's blocks its caller: call it beside an event loop (`asyncio.to_thread`), not in it.

    Args:
        path: file.py, file.py:name, pkg.module:name or pkg.module.name.
        args: what the function gets first, a namespace of the rollout's options.

    Raises:
        PluginError: it does not load or cannot be called; when called: it raises, hangs, or returns no truth value.
    """
    plugin = Plugin(path, ("args", "samples"), usual_name="check", timeout=args.reward_timeout)
    if plugin.function in BUILT_IN:
        return lambda samples: plugin.function(args, samples)
    return lambda samples: _output(plugin(args, [UserSample.of(sample) for sample in samples]), plugin)


def _output(value: Any, plugin: Plugin) -> DynamicFilterOutput:
    """Return what a filter has returned as our class; slime's has the same three fields."""
    keep, reason = getattr(value, "keep", value), getattr(value, "reason", None)
    scalar = keep.item() if getattr(keep, "shape", None) == () else keep  # of NumPy or torch
    if not isinstance(scalar, bool):
        raise PluginError(
            f"{plugin.name} returned {value!r:.100} ({type(value).__name__}): return True to keep the group, False to drop it, "
            "or DynamicFilterOutput(keep, reason)"
        )
    fallback = bool(getattr(value, "keep_when_insufficient", False))
    return DynamicFilterOutput(scalar, None if scalar else str(reason or plugin.function.__name__), fallback)
