"""The forms in which a reward of the user's may be written, made one: a coroutine or function from samples to a list of values.

    async def reward_func(args, sample, **kwargs) -> float       one sample; also without async
    async def reward_func(args, samples, **kwargs) -> list       with --group-rm: all samples of a prompt; also without async
    class RewardModel:                                           a model in the grading process
        def __init__(self): ...                                  or (self, model_path), which is --rm-model-path
        def compute_reward(self, prompts, responses) -> list     also async

What a value must be is outcome.py's business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stages.plugins import check_signature, load_function, name_of
from storage.errors import PluginError

if TYPE_CHECKING:  # check_form.py loads this module for every check, and those import much
    from stages.rewards.outcome import Settings
    from storage.sample import Sample

METHOD = "compute_reward"
Call = Callable[["list[Sample]"], Any]  # list of values, or an awaitable of one


@dataclass(frozen=True)
class Form:
    """A reward of the user's, found and checked, but not yet run."""

    name: str  # for messages
    target: Callable[..., Any]
    takes_group: bool  # all samples of a prompt in one call
    is_class: bool

    @property
    def is_async(self) -> bool:
        """Whether calls are awaited, so that many run side by side."""
        target = getattr(self.target, METHOD) if self.is_class else self.target
        return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004

    def ready(self, settings: Settings) -> Call:
        """What grades; a class is constructed here. Raises PluginError if its constructor raises."""
        if self.is_class:
            compute = getattr(self._constructed(settings.rm_model_path), METHOD)
            return lambda samples: compute([sample.prompt for sample in samples], [sample.response for sample in samples])
        arguments = SimpleNamespace(**{"reward_timeout": settings.timeout, **settings.arguments})
        if self.takes_group:
            return lambda samples: self.target(arguments, samples)
        if self.is_async:
            return lambda samples: _each(self.target, arguments, samples)
        return lambda samples: [self.target(arguments, sample) for sample in samples]

    def _constructed(self, model_path: str | None) -> Any:
        try:
            return self.target(model_path) if model_path is not None and _path_parameter(self.target) else self.target()
        except (Exception, SystemExit) as error:
            raise PluginError(f"{self.name}: its constructor raises {type(error).__name__}: {error}") from error


def find_form(path: str, *, group_rm: bool = False, rm_model_path: str | None = None, within: str | None = None) -> Form:
    """The reward at `path`.

    Args:
        path: file.py, file.py:name, pkg.module:name or pkg.module.name.
        group_rm: a function takes all samples of a prompt.
        rm_model_path: what a class's constructor gets, if it wants something.
        within: package that must define it, not only import it.

    Raises:
        PluginError: it does not load, or cannot be called as its form demands.
    """
    target = load_function(path, usual=lambda found: hasattr(found, METHOD))
    if within is not None and not f"{getattr(target, '__module__', '')}.".startswith(f"{within}."):
        raise PluginError(
            f"a row's custom_rm_path {path} is not defined below --allow-row-code {within}: name a function that is"
        )
    is_class = inspect.isclass(target)
    name = name_of(target, path)
    if is_class:
        if not hasattr(target, METHOD):
            raise PluginError(f"{name} is a class without {METHOD}(prompts, responses): give it one, or name a function")
        check_signature(getattr(target, METHOD), f"{name}: {METHOD}", ("self", "prompts", "responses"))
        parameter = _path_parameter(target)
        if parameter and parameter.default is parameter.empty and rm_model_path is None:
            raise PluginError(f"{name} wants {parameter.name!r} for its constructor: give --rm-model-path")
        check_signature(target, f"{name}: its constructor", ("model_path",) if parameter and rm_model_path is not None else ())
    else:
        check_signature(target, name, ("args", "samples" if group_rm else "sample"))
    return Form(name, target, takes_group=is_class or group_rm, is_class=is_class)


def _path_parameter(target: Callable[..., Any]) -> inspect.Parameter | None:
    """A constructor's first parameter, if it may be given by position."""
    signature = _signature(target)
    first = next(iter(signature.parameters.values()), None) if signature else None
    return first if first and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) else None


def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None  # a callable from C: the first call will tell


async def _each(function: Callable[..., Any], arguments: Any, samples: list[Sample]) -> list[Any]:
    return [await function(arguments, sample) for sample in samples]
