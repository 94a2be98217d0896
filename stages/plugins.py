"""Load, check and call user-defined functions: rewards, advantage estimators, losses, filters, hooks.

A function is named by a path: `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`. Short functions are
called in this process through `Plugin`; reward and generate functions, which run in their own processes, threads or
event loops, are only loaded here (`load_function`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.stages.slime_modules import provide_slime_modules
from penstock.storage.errors import PluginError

# Old path -> current path: run.json files name modules of penstock that have moved since.
ALIASES = {
    f"{old}.{name}": f"penstock.stages.rollout.plugins.{new}:{name}"
    for old, new, names in (
        (
            "stages.rollout.filters",
            "filters",
            ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"),
        ),
        ("stages.rollout.custom_source", "custom_source", ("RolloutDataSource", "RolloutDataSourceWithBuffer")),
    )
    for name in names
}


class Plugin:
    """A user-defined function, called with positional arguments, one call at a time.

    Args:
        path: `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`.
        parameters: names of the positional arguments of every call; the function's signature must accept them.
        default_name: name of the function to load if `path` is only a file.
        timeout: maximum seconds of a call (`--reward-timeout`).

    Raises:
        PluginError: the function does not load, or its signature does not accept `parameters`.
    """

    def __init__(self, path: str, parameters: Sequence[str], *, default_name: str, timeout: float) -> None:
        self.function = load_checked_function(path, default_name, parameters)
        self.name = describe_function(self.function, path)
        self.timeout = timeout
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function in a daemon thread and return its result; an async function is awaited. If the function
        hangs, its thread does not prevent this process from exiting.

        Raises:
            PluginError: the function raises, or takes longer than `timeout`; the message names the function.
        """
        result: Future[Any] = Future()

        def call_function() -> None:
            try:
                value = self.function(*arguments)
                result.set_result(asyncio.run(_await_value(value)) if inspect.isawaitable(value) else value)
            except BaseException as error:  # including SystemExit: otherwise the caller would wait until the timeout
                result.set_exception(error)

        with self._lock:
            threading.Thread(target=call_function, name=self.name, daemon=True).start()
            wait([result], self.timeout)
        if not result.done():
            raise PluginError(
                f"{self.name} takes more than {self.timeout:g} s: make the function faster, or raise --reward-timeout"
            )
        if error := result.exception():
            raise PluginError(f"{self.name} raises {describe_error(error)}") from error
        return result.result()


def describe_error(error: BaseException) -> str:
    """Return an error's class and message; of a group with one error (asyncio.TaskGroup), those of that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


def check_signature(function: Callable[..., Any], name: str, parameters: Sequence[str]) -> None:
    """Check that a function accepts positional arguments named `parameters`, and is not a generator function.

    Raises:
        PluginError: the function does not accept `parameters`, or is a generator function; the message begins with
                `name`.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(
            f"{name} is a generator function, whose code would never run: return a value instead of yielding"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a C function without a signature: only the first call can show whether it accepts the arguments
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise PluginError(
            f"{name} has the signature {signature}, but is called with ({', '.join(parameters)}): {error}; "
            "change its parameters"
        ) from None


def describe_function(function: Callable[..., Any], path: str) -> str:
    """Return the function's name for messages, e.g. `check of filters.py`."""
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} of {path.rpartition(':')[0] or path}"


def load_checked_function(path: str, default_name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load the function that `path` names and check its signature.

    Raises:
        PluginError: the function does not load, or its signature does not accept `parameters`.
    """
    function = load_function(path, default_name=default_name)
    check_signature(function, describe_function(function, path), parameters)
    return function


def load_function(
    path: str, default_name: str = "reward_func", is_candidate: Callable[[Any], bool] = lambda value: False
) -> Callable[..., Any]:
    """Load the function (or class) that `path` names.

    Args:
        path: `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`.
        default_name: name of the function to load if `path` names only a file; if the file lacks it, its only
            function is loaded.
        is_candidate: selects one of several functions of the file if none of them has the default name.

    Raises:
        PluginError: the file, module or function does not exist, or importing the module fails.
    """
    provide_slime_modules()
    path = ALIASES.get(path.replace(":", "."), path)
    location, colon, name = path.rpartition(":")
    if not colon:
        location, name = (path, "") if path.endswith(".py") else path.rpartition(".")[::2]
    if not location:
        raise PluginError(
            f"{path!r} does not name a function: write file.py, file.py:name, pkg.module:name or pkg.module.name"
        )
    if location.endswith(".py"):
        module = _load_file(Path(location))
    else:
        try:
            module = importlib.import_module(location)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{path}: module {location} fails to import: {_describe_import_error(error)}") from error
    if not name:
        name = _choose_default_function(module, location, default_name, is_candidate)
    function = getattr(module, name, None)
    if not callable(function):
        raise PluginError(
            f"{location} has no function {name!r}; its functions are {', '.join(_public_functions(module)) or 'none'}: "
            f"give one of these as {location}:NAME"
        )
    return function


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise PluginError(f"{file} does not exist: give the path of a Python file")
    name = f"penstock_custom_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(f"{file} fails to import: {_describe_import_error(error)}") from error
    return module


def _describe_import_error(error: BaseException) -> str:
    """Return the reason of a failed import, for use in an error message."""
    if isinstance(error, SystemExit):
        return (
            f"the module calls sys.exit({error.code!r:.50}) during the import; remove the call, or move it under "
            '`if __name__ == "__main__"`'
        )
    return f"{type(error).__name__}: {error}"


def _public_functions(module: ModuleType) -> list[str]:
    own = vars(module).items()
    return [
        name
        for name, value in own
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _choose_default_function(
    module: ModuleType, location: str, default_name: str, is_candidate: Callable[[Any], bool]
) -> str:
    names = _public_functions(module)
    if default_name in names:
        return default_name
    names = [name for name in names if is_candidate(getattr(module, name))] or names
    if not names:
        raise PluginError(f"{location} defines no function: define {default_name} in it")
    if len(names) > 1:
        raise PluginError(
            f"cannot choose a function of {location}, which defines {', '.join(names)}: write {location}:NAME"
        )
    return names[0]
