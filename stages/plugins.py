"""Load, check and call user-defined functions: a reward, an estimator, a loss, a filter, a hook.

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

from penstock.storage.errors import PluginError

# Old path -> current path. Existing configurations and run.json files name slime's filters (slime need not be
# installed) and modules of penstock that have moved since; both must still load.
ALIASES = {
    f"{old}.{name}": f"penstock.stages.rollout.plugins.{new}:{name}"
    for old, new, names in (
        (
            "slime.rollout.filter_hub.dynamic_sampling_filters",
            "filters",
            ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"),
        ),
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
        path: path of the function, in a form that the module docstring lists.
        parameters: names of the positional arguments of every call; the function's signature must accept them.
        usual_name: default name of the function if `path` is only a file.
        timeout: seconds that a call may take (`--reward-timeout`).

    Raises:
        PluginError: the function does not load, or its signature does not accept `parameters`.
    """

    def __init__(self, path: str, parameters: Sequence[str], *, usual_name: str, timeout: float) -> None:
        self.function = load_checked(path, usual_name, parameters)
        self.name = name_of(self.function, path)
        self.timeout = timeout
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function in a daemon thread and return its result; an async function is awaited. If the function
        hangs, its thread does not prevent this process from exiting.

        Raises:
            PluginError: the function raises, or takes longer than `timeout`; the message names the function.
        """
        result: Future[Any] = Future()
        with self._lock:
            threading.Thread(
                target=_call_and_set, args=(result, self.function, arguments), name=self.name, daemon=True
            ).start()
            wait([result], self.timeout)
        if not result.done():
            raise PluginError(
                f"{self.name} takes more than {self.timeout:g} s: make the function faster, or raise --reward-timeout"
            )
        if error := result.exception():
            raise PluginError(f"{self.name} raises {type(error).__name__}: {error}") from error
        return result.result()


def _call_and_set(result: Future[Any], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        value = function(*arguments)
        result.set_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:  # including SystemExit: otherwise the caller would wait until the timeout
        result.set_exception(error)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def check_signature(function: Callable[..., Any], name: str, parameters: Sequence[str]) -> None:
    """Check that a function accepts the positional arguments `parameters`, and is not a generator function.

    Raises:
        PluginError: it does not, or is one; the message begins with `name`.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"{name} is a generator and would never run: return instead of yielding")
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


def name_of(function: Callable[..., Any], path: str) -> str:
    """Return the function's name for messages, e.g. `check of filters.py`."""
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} of {path.rpartition(':')[0] or path}"


def load_checked(path: str, usual_name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load the function that `path` names and check its signature.

    Raises:
        PluginError: the function does not load, or its signature does not accept `parameters`.
    """
    function = load_function(path, usual_name=usual_name)
    check_signature(function, name_of(function, path), parameters)
    return function


def load_function(
    path: str, usual_name: str = "reward_func", usual: Callable[[Any], bool] = lambda value: False
) -> Callable[..., Any]:
    """Load the function (or class) that `path` names.

    Args:
        path: path of the function, in a form that the module docstring lists.
        usual_name: default name of the function if `path` names only a file; without it, the file's only function.
        usual: selects one of several functions of the file if none of them has the default name.

    Raises:
        PluginError: the file, module or function does not exist, or importing the module fails.
    """
    path = ALIASES.get(path.replace(":", "."), path)
    place, colon, name = path.rpartition(":")
    if not colon:
        place, name = (path, "") if path.endswith(".py") else path.rpartition(".")[::2]
    if not place:
        raise PluginError(
            f"{path!r} does not name a function: write file.py, file.py:name, pkg.module:name or pkg.module.name"
        )
    if place.endswith(".py"):
        module = _load_file(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{path}: module {place} fails to import: {_import_failure(error)}") from error
    if not name:
        name = _default_function(module, place, usual_name, usual)
    function = getattr(module, name, None)
    if not callable(function):
        raise PluginError(
            f"{place} has no function {name!r}; it defines {', '.join(_public_functions(module)) or 'none'}: "
            "name one of them"
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
        raise PluginError(f"{file} fails to import: {_import_failure(error)}") from error
    return module


def _import_failure(error: BaseException) -> str:
    """Return why an import failed, for a message."""
    if isinstance(error, SystemExit):
        return (
            f"it calls sys.exit({error.code!r:.50}) while it is imported; remove that, or move it under "
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


def _default_function(module: ModuleType, place: str, usual_name: str, usual: Callable[[Any], bool]) -> str:
    names = _public_functions(module)
    if usual_name in names:
        return usual_name
    names = [name for name in names if usual(getattr(module, name))] or names
    if len(names) != 1:
        raise PluginError(f"{place} defines {', '.join(names) or 'no function'}: name one of them, {place}:NAME")
    return names[0]
