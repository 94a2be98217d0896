"""Load, check and call user-defined functions: rewards, advantage estimators, losses, filters, hooks.

A function is named by a path: `file.py:name`, `pkg.module:name`, `pkg.module.name`, or `file.py`, which stands for one
function of the file (`with_function_name`). Short functions are called in this process through `Plugin`; reward and
generate functions, which run in their own processes, threads or event loops, are only loaded here (`load_function`).
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import symtable
import sys
import threading
import typing
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.storage.errors import PluginError, check_rules
from penstock.storage.preemption import time_limit

# Option that names a function -> the function's name in a file that is given without one.
DEFAULT_NAMES = {
    "data_source_path": "RolloutDataSource",
    "custom_generate_function_path": "generate",
    "dynamic_sampling_filter_path": "check",
    "buffer_filter_path": "buffer_filter",
    "rollout_sample_hook_path": "sample_hook",
    "rollout_sample_filter_path": "sample_filter",
    "rollout_all_samples_process_path": "process_all",
    "rollout_function_path": "generate_rollout",
    "eval_function_path": "generate_rollout",
    "custom_reward_post_process_path": "post_process",
    "custom_convert_samples_to_train_data_path": "convert_samples_to_train_data",
    "custom_rollout_log_function_path": "log_rollout_data",
    "custom_eval_rollout_log_function_path": "log_eval_rollout_data",
    "custom_rm_path": "reward_func",
    "custom_loss_function_path": "loss",
    "custom_advantage_function_path": "advantages",
    "custom_pg_loss_reducer_function_path": "weights",
    "custom_tis_function_path": "correction",
    "rollout_data_postprocess_path": "postprocess",
}

# Modules with which functions written for another trainer can run here, and which refuse functions that cannot run.
# Each has `provide_modules`, `check_imports` and `check_parameters`.
ADAPTERS = [importlib.import_module(name) for name in ("penstock.stages.slime.slime_modules",)]
BUILT_IN_EVALUATION = "built-in"  # --eval-function-path of the built-in evaluation
METHOD = "compute_reward"  # the method of a reward class


class Plugin:
    """A user-defined function, called with positional arguments, one call at a time. Raises PluginError.

    Args:
        path: `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`.
        parameters: names of the positional arguments of every call; the function's signature must accept them.
        default_name: name of the function to load if `path` is only a file.
        timeout: maximum seconds of a call (`--reward-timeout`).
    """

    def __init__(self, path: str, parameters: Sequence[str], *, default_name: str, timeout: float) -> None:
        self.function = load_checked_function(path, default_name, parameters)
        self.name = describe_path(with_function_name(path, default_name))
        self.timeout = timeout
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function in a daemon thread and return its result; an async function is awaited. If the function
        hangs, its thread does not prevent this process from exiting. Raises PluginError if the function raises, or
        takes longer than `timeout`; the message names the function."""
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
    """Return an error's class and message; for a group of one error (asyncio.TaskGroup), those of this one error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


def check_signature(
    function: Callable[..., Any], name: str, parameters: Sequence[str], *, fix: str = "change its parameters"
) -> None:
    """Check that a function accepts positional arguments named `parameters`, and is not a generator function. `fix`:
    what to do about other parameters, for the message. Raises PluginError."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(
            f"{name} is a generator function, whose code would never run: return a value instead of yielding"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a C function without a signature: only the first call can show whether it accepts the arguments
    for adapter in ADAPTERS:
        adapter.check_parameters(signature.parameters, parameters, name)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise PluginError(
            f"{name} has the signature {signature}, but is called with ({', '.join(parameters)}): {error}; {fix}"
        ) from None


def describe_path(path: str) -> str:
    """Return a path as a name for messages, e.g. `check of filters.py`."""
    location, name = _split(path)
    return f"{name} of {location}"


def load_checked_function(path: str, default_name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load the function that `path` names and check its signature. Raises PluginError."""
    path = with_function_name(path, default_name)
    function = load_function(path)
    check_signature(function, describe_path(path), parameters)
    return function


def load_function(path: str, default_name: str = DEFAULT_NAMES["custom_rm_path"]) -> Callable[..., Any]:
    """Load the function, class or callable object that `path` names. Raises PluginError.

    Args:
        path: `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`.
        default_name: name of the function to load if `path` is only a file.
    """
    path = with_function_name(path, default_name)
    location, name = _split(path)
    module = _load_module(location, path)
    for adapter in ADAPTERS:
        adapter.check_imports(getattr(module, "__file__", None) or "", describe_path(path))
    function = getattr(module, name, None)
    if not callable(function):
        raise PluginError(
            f"{location} has no function {name!r}; it defines {', '.join(_defined_callables(module)) or 'none'}: "
            f"give one of these as {location}:NAME"
        )
    return function


def hash_source(path: str) -> str:
    """Return the SHA-256 of the source file of the function that a path names, or "" if it is in no file."""
    module = path.rpartition(":")[0] or (path if path.endswith(".py") else path.rpartition(".")[0])
    if not module.endswith(".py"):
        spec = importlib.util.find_spec(module) if module else None
        module = (spec.origin or "") if spec else ""
    source = Path(module)
    return hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""


def with_function_name(path: str, default_name: str) -> str:
    """Return `path` with the name of its function: `rewards.py` becomes `rewards.py:reward_func`. Raises PluginError.

    The function of a file is the one with the default name, else `custom_generate` or the class with `compute_reward`,
    else the only public function, class or callable object that the file defines or assigns. Imported names do not
    count, except the default name if it is not imported from Penstock or from a module of ADAPTERS.
    """
    if not path.endswith(".py"):
        return path
    module = _load_module(path, path)
    names, default = _defined_callables(module), getattr(module, default_name, None)
    from_penstock = str(getattr(default, "__module__", "")).startswith("penstock.")
    if default_name in names or (callable(default) and not from_penstock):
        return f"{path}:{default_name}"
    names = [name for name in names if name == "custom_generate" or hasattr(getattr(module, name), METHOD)] or names
    rules = [
        (not names, f"{path} defines no function: define {default_name} in it"),
        (
            len(names) > 1,
            f"cannot choose a function of {path}, which defines {', '.join(names)}, but not {default_name}: write "
            f"{path}:NAME",
        ),
    ]
    check_rules(rules, PluginError)
    return f"{path}:{names[0]}"


def _split(path: str) -> tuple[str, str]:
    """Return the location (file or module) and the function name of a path."""
    location, _, name = path.rpartition(":" if ":" in path else ".")
    if not location or path.endswith(".py"):
        raise PluginError(f"{path!r} does not name a function: write file.py:name, pkg.module:name or pkg.module.name")
    return location, name


def _load_module(location: str, path: str) -> ModuleType:
    for adapter in ADAPTERS:
        adapter.provide_modules()
    is_file = location.endswith(".py")
    if is_file and not Path(location).is_file():
        raise PluginError(f"{location} does not exist: give the path of a Python file")
    try:
        with time_limit("the import"):
            return _load_file(Path(location)) if is_file else importlib.import_module(location)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = (
                f"the module calls sys.exit({error.code!r:.50}) during the import; remove the call, or move it under "
                '`if __name__ == "__main__"`'
            )
        where = location if is_file else f"{path}: module {location}"
        raise PluginError(f"{where} fails to import: {reason}") from error


def _load_file(file: Path) -> ModuleType:
    name = f"penstock_custom_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # so that the file can import modules in its folder
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _defined_callables(module: ModuleType) -> list[str]:
    """Return the names of the public functions, classes and callable objects that a module defines or assigns; those
    that it imports, and aliases of types, do not count."""
    file = str(getattr(module, "__file__", None))
    if not file.endswith(".py"):
        return []
    symbols = symtable.symtable(importlib.util.decode_source(Path(file).read_bytes()), file, "exec")
    names = [symbol.get_name() for symbol in symbols.get_symbols() if symbol.is_assigned()]
    own = {name: getattr(module, name, None) for name in names if not name.startswith("_")}
    aliases = {  # of types
        name
        for name, value in own.items()
        if (isinstance(value, type) and value.__module__ != module.__name__)
        or (not isinstance(value, type) and typing.get_origin(value) is not None)
        or isinstance(value, typing.NewType)
    }
    return [name for name, value in own.items() if callable(value) and name not in aliases]
