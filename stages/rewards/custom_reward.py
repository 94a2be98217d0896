"""Load and call user-defined rewards. Accepted forms (`async` is optional in each):

    async def reward_func(args, sample, **kwargs) -> float       one sample
    async def reward_func(args, samples, **kwargs) -> list       with --group-rm: all samples of a prompt
    class RewardModel:                                           for a model to load in the grading process
        def __init__(self): ...                                  or (self, model_path), which gets --rm-model-path
        async def compute_reward(self, prompts, responses) -> list

outcome.py checks the returned values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.stages.plugins import (
    DEFAULT_NAMES,
    METHOD,
    check_signature,
    describe_path,
    load_function,
    with_function_name,
)
from penstock.stages.worker_process import WorkerLost, WorkerProcess
from penstock.storage.errors import PluginError

if TYPE_CHECKING:  # the process that checks a reward imports this module: keep imports few
    from penstock.stages.rewards.hub import RewardSettings
    from penstock.storage.samples.sample import Sample

RewardCall = Callable[["list[Sample]"], Any]  # takes samples; returns a list of rewards, or an awaitable of such a list


@dataclass(frozen=True)
class CustomReward:
    """A user-defined reward function or class whose signature has been checked."""

    name: str  # for error messages
    target: Callable[..., Any]
    takes_group: bool  # one call grades all samples of a prompt
    is_class: bool

    @property
    def is_async(self) -> bool:
        """Return whether the reward is an async function, so that many calls can run concurrently. Other rewards may
        also return awaitables, but are called one at a time, because the call itself may block."""
        target = getattr(self.target, METHOD) if self.is_class else self.target
        return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004

    def build_reward_call(self, settings: RewardSettings) -> RewardCall:
        """Return a function that takes samples and returns their rewards. Instantiates the reward if it is a class."""
        if self.is_class:
            path = settings.rm_model_path
            try:
                model = self.target(path) if path is not None and _model_path_parameter(self.target) else self.target()
            except (Exception, SystemExit) as error:
                raise PluginError(
                    f"the constructor of {self.name} raises {type(error).__name__}: {error}; correct the constructor"
                ) from error
            compute = getattr(model, METHOD)
            return lambda samples: compute([each.prompt for each in samples], [each.response for each in samples])
        args = SimpleNamespace(**{"reward_timeout": settings.timeout, **settings.arguments})
        if self.takes_group:
            return lambda samples: self.target(args, samples)
        if self.is_async:
            return lambda samples: await_rewards_in_turn(self.target, args, samples)
        return lambda samples: [self.target(args, sample) for sample in samples]


def load_custom_reward(
    path: str, *, group_rm: bool = False, rm_model_path: str | None = None, required_package: str | None = None
) -> CustomReward:
    """Load the user-defined reward at `path` (file.py, file.py:name, pkg.module:name or pkg.module.name) and check its
    signature. `required_package` must define the reward; a package that only imports it is refused."""
    path = with_function_name(path, DEFAULT_NAMES["custom_rm_path"])
    target, name = load_function(path), describe_path(path)
    if required_package is not None and not f"{getattr(target, '__module__', '')}.".startswith(f"{required_package}."):
        raise PluginError(
            f"a row's custom_rm_path {path} is not defined inside --allow-row-code {required_package}: "
            "name a function that this package defines"
        )
    if not inspect.isclass(target):
        fix = f"change its parameters; {describe_reward_function(group_rm)}"
        check_signature(target, name, ("args", "samples" if group_rm else "sample"), fix=fix)
        return CustomReward(name, target, takes_group=group_rm, is_class=False)
    if not hasattr(target, METHOD):
        raise PluginError(f"{name} is a class without {METHOD}(prompts, responses): add this method, or use a function")
    check_signature(getattr(target, METHOD), f"{name}: {METHOD}", ("self", "prompts", "responses"))
    parameter = _model_path_parameter(target)
    if parameter and parameter.default is parameter.empty and rm_model_path is None:
        raise PluginError(f"the constructor of {name} needs the argument {parameter.name!r}: give --rm-model-path")
    takes_path = parameter is not None and rm_model_path is not None
    check_signature(target, f"{name}: its constructor", ("model_path",) if takes_path else ())
    return CustomReward(name, target, takes_group=True, is_class=True)


def describe_reward_function(group_rm: bool) -> str:
    """Return what a reward function takes and returns, for error messages."""
    form = "f(args, samples) -> list of floats" if group_rm else "f(args, sample) -> float"
    return f"a reward is {form} (docs/coming-from.md adapts the rewards of other trainers)"


def _model_path_parameter(constructor: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the first positional parameter of a constructor, which takes the model path, or None if there is none."""
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None  # a C function without a signature: a wrong call fails later, at run time
    first = next(iter(parameters.values()), None)
    return first if first and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) else None


async def await_all(value: Any) -> Any:
    """Return `value`, awaited if it is awaitable; if the result is a list, its awaitable entries are awaited, too."""
    while inspect.isawaitable(value):
        value = await value
    return [await await_all(entry) for entry in value] if isinstance(value, list | tuple) else value


async def await_rewards_in_turn(function: Callable[..., Any], args: Any, samples: list[Sample]) -> list[Any]:
    """Await an async reward for each sample in turn, and return the rewards."""
    return [await await_all(function(args, sample)) for sample in samples]


# ---- check in a subprocess, because importing the reward's module may hang, crash or exit ----------------------------


class CheckedReward(NamedTuple):
    """The result of checking a user-defined reward."""

    path: str  # path of the reward, including the name of the function or class
    is_class: bool


@lru_cache
def inspect_custom_reward(
    path: str,
    *,
    group_rm: bool,
    rm_model_path: str | None,
    required_package: str | None = None,
    timeout: float,
) -> CheckedReward:
    """Import a user-defined reward in a subprocess, check its signature, and return what it is. Results are cached."""
    options = {"path": path, "group_rm": group_rm, "rm_model_path": rm_model_path, "required_package": required_package}
    worker = WorkerProcess(prepare_check, options, start_seconds=timeout).start()
    try:
        checked: CheckedReward = worker.submit(None, timeout).result()
        return checked
    except WorkerLost as lost:
        raise PluginError(
            f"importing {path} terminated Python with exit code {lost.exit_code}: remove calls of os._exit, or fix the "
            "crash"
            if lost.limit is None
            else f"{path} takes more than {timeout:g} s to import: speed up the import, or raise --reward-start-timeout"
        ) from None
    finally:
        worker.close()


def prepare_check(options: dict[str, Any]) -> Callable[[None], CheckedReward]:
    """Check a reward in the subprocess, and return a function that returns the result. Raises PluginError."""
    path = with_function_name(options.pop("path"), DEFAULT_NAMES["custom_rm_path"])
    checked = CheckedReward(path, load_custom_reward(path, **options).is_class)
    return lambda _: checked
