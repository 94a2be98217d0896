"""User-defined rewards: the accepted forms, and how each of them is called.

    async def reward_func(args, sample, **kwargs) -> float       one sample
    async def reward_func(args, samples, **kwargs) -> list       with --group-rm: all samples of a prompt
    class RewardModel:                                           a model that is loaded in the grading process
        def __init__(self): ...                                  or (self, model_path), which gets --rm-model-path
        async def compute_reward(self, prompts, responses) -> list

`async` is optional everywhere.

outcome.py checks the returned values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from penstock.stages.plugins import check_signature, describe_function, load_function
from penstock.storage.errors import PluginError

if TYPE_CHECKING:  # check_custom_reward.py starts a process that imports this module: keep its imports few
    from penstock.stages.rewards.settings import RewardSettings
    from penstock.storage.samples.sample import Sample

METHOD = "compute_reward"
Call = Callable[["list[Sample]"], Any]  # returns a list of values, or an awaitable of one


@dataclass(frozen=True)
class CustomReward:
    """A user-defined reward that is loaded and checked, but not called yet."""

    name: str  # for messages
    target: Callable[..., Any]
    takes_group: bool  # all samples of a prompt in one call
    is_class: bool

    @property
    def is_async(self) -> bool:
        """Return whether calls are awaited, so that many run concurrently."""
        target = getattr(self.target, METHOD) if self.is_class else self.target
        return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004

    def bind(self, settings: RewardSettings) -> Call:
        """Return a function that takes samples and returns their rewards. If the reward is a class, construct it.

        Raises:
            PluginError: the constructor raises or exits.
        """
        if self.is_class:
            path = settings.rm_model_path
            try:
                model = self.target(path) if path is not None and _path_parameter(self.target) else self.target()
            except (Exception, SystemExit) as error:
                raise PluginError(f"{self.name}: its constructor raises {type(error).__name__}: {error}") from error
            compute = getattr(model, METHOD)
            return lambda samples: compute([each.prompt for each in samples], [each.response for each in samples])
        args = SimpleNamespace(**{"reward_timeout": settings.timeout, **settings.arguments})
        if self.takes_group:
            return lambda samples: self.target(args, samples)
        if self.is_async:
            return lambda samples: call_each(self.target, args, samples)
        return lambda samples: [self.target(args, sample) for sample in samples]


def load_custom_reward(
    path: str, *, group_rm: bool = False, rm_model_path: str | None = None, within: str | None = None
) -> CustomReward:
    """Load the user-defined reward at `path` and check its signature.

    Args:
        path: file.py, file.py:name, pkg.module:name or pkg.module.name.
        group_rm: whether a function takes all samples of a prompt, instead of one sample.
        rm_model_path: argument of a class's constructor, if the constructor takes one.
        within: package that must define the reward; a reward that the package only imports is rejected.

    Raises:
        PluginError: the reward does not load, or has the wrong signature.
    """
    target = load_function(path, is_candidate=lambda function: hasattr(function, METHOD))
    if within is not None and not f"{getattr(target, '__module__', '')}.".startswith(f"{within}."):
        raise PluginError(
            f"a row's custom_rm_path {path} is not defined inside --allow-row-code {within}: "
            "name a function that this package defines"
        )
    name = describe_function(target, path)
    if not inspect.isclass(target):
        check_signature(target, name, ("args", "samples" if group_rm else "sample"))
        return CustomReward(name, target, takes_group=group_rm, is_class=False)
    if not hasattr(target, METHOD):
        raise PluginError(f"{name} is a class without {METHOD}(prompts, responses): add it, or name a function")
    check_signature(getattr(target, METHOD), f"{name}: {METHOD}", ("self", "prompts", "responses"))
    parameter = _path_parameter(target)
    if parameter and parameter.default is parameter.empty and rm_model_path is None:
        raise PluginError(f"the constructor of {name} needs {parameter.name!r}: give --rm-model-path")
    takes_path = parameter is not None and rm_model_path is not None
    check_signature(target, f"{name}: its constructor", ("model_path",) if takes_path else ())
    return CustomReward(name, target, takes_group=True, is_class=True)


def _path_parameter(target: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the first parameter of a constructor, which takes the model path, or None if it has no such parameter."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # implemented in C, no signature: a wrong call fails at run time
    first = next(iter(parameters.values()), None)
    return first if first and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) else None


async def call_each(function: Callable[..., Any], args: Any, samples: list[Sample]) -> list[Any]:
    """Await an async reward for each sample in turn, and return the rewards."""
    return [await function(args, sample) for sample in samples]
