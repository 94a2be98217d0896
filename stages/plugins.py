"""Functions of the user's: found, checked and called with a time limit. A reward, an estimator, a loss, a filter, a hook.

They are named by `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`. Graders and generators have processes and loops of
their own and use `load_function` alone; short functions that are called in this process are a `Plugin`.
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

from storage.errors import PluginError

# Functions of slime that configurations name and that are answered here: slime need not be installed.
_OURS = {
    f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}": f"stages.rollout.filters:{name}"
    for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback")
}


class Plugin:
    """A function of the user's, called by position with what `words` name, one call at a time.

    Args:
        path: see above.
        words: names of the arguments, for the check of its signature and for messages.
        usual_name: what a bare file.py is expected to define.
        timeout: seconds that a call may take (`--reward-timeout`).

    Raises:
        PluginError: it does not load, or cannot be called like this.
    """

    def __init__(self, path: str, words: Sequence[str], *, usual_name: str, timeout: float) -> None:
        self.function = load_checked(path, usual_name, words)
        self.name = name_of(self.function, path)
        self.timeout = timeout
        self._one_at_a_time = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """What it returns; an asynchronous one is awaited. It runs in a thread that keeps nobody from exiting if it hangs.

        Raises:
            PluginError: it raises, or takes too long; one sentence that names it.
        """
        answer: Future[Any] = Future()
        with self._one_at_a_time:
            threading.Thread(target=_answer, args=(answer, self.function, arguments), name=self.name, daemon=True).start()
            wait([answer], self.timeout)
        if not answer.done():
            raise PluginError(f"{self.name} takes more than {self.timeout:g} s: make it faster, or raise --reward-timeout")
        if error := answer.exception():
            raise PluginError(f"{self.name} raises {type(error).__name__}: {error}") from error
        return answer.result()


def _answer(answer: Future[Any], function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        value = function(*arguments)
        answer.set_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:  # also SystemExit: nobody else would see it, and the caller would wait in vain
        answer.set_exception(error)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def check_signature(function: Callable[..., Any], name: str, words: Sequence[str]) -> None:
    """Raise PluginError unless `function` can be called by position with what `words` name, and returns instead of yielding."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(f"{name} is a generator and would never run: return instead of yielding")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a callable from C: the first call will tell
    try:
        signature.bind(*words)
    except TypeError as error:
        raise PluginError(f"{name} has the signature {signature}, but is called with ({', '.join(words)}): {error}") from None


def name_of(function: Callable[..., Any], path: str) -> str:
    """`check of filters.py`: what messages call it."""
    return f"{getattr(function, '__qualname__', type(function).__qualname__)} of {path.rpartition(':')[0] or path}"


def load_checked(path: str, usual_name: str, words: Sequence[str]) -> Callable[..., Any]:
    """The function that `path` names, if it can be called by position with what `words` name. Raises PluginError otherwise."""
    function = load_function(path, usual_name=usual_name)
    check_signature(function, name_of(function, path), words)
    return function


def load_function(
    path: str, usual_name: str = "reward_func", usual: Callable[[Any], bool] = lambda found: False
) -> Callable[..., Any]:
    """The function (or class) that `path` names.

    Args:
        path: see above.
        usual_name: what a bare file.py is expected to define, unless it defines one function only.
        usual: whether it is what such a file may define instead of that name, among helpers.

    Raises:
        PluginError: no such file, module or function, or it fails to import.
    """
    path = _OURS.get(path.replace(":", "."), path)
    place, colon, name = path.rpartition(":")
    if not colon:
        place, name = (path, "") if path.endswith(".py") else path.rpartition(".")[::2]
    if not place:
        raise PluginError(f"{path!r} names no function: write file.py, file.py:name, pkg.module:name or pkg.module.name")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, path)
    if not name:
        name = _only_function(module, place, usual_name, usual)
    function = getattr(module, name, None)
    if not callable(function):
        raise PluginError(f"{place} has no function {name!r}; it has {', '.join(_functions(module)) or 'none'}: name one of them")
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
        raise PluginError(f"{file} fails to import: {_reason(error)}") from error
    return module


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{path}: module {name} fails to import: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Of a failed import, in a few words."""
    if isinstance(error, SystemExit):
        return f'it calls sys.exit({error.code!r:.50}) while it is imported; remove that, or put it under `if __name__ == "__main__"`'
    return f"{type(error).__name__}: {error}"


def _functions(module: ModuleType) -> list[str]:
    own = vars(module).items()
    return [
        name
        for name, value in own
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def _only_function(module: ModuleType, place: str, usual_name: str, usual: Callable[[Any], bool]) -> str:
    found = _functions(module)
    if usual_name in found:
        return usual_name
    found = [name for name in found if usual(getattr(module, name))] or found
    if len(found) != 1:
        raise PluginError(f"{place} defines {', '.join(found) or 'no function'}: say which one is meant, {place}:NAME")
    return found[0]
