"""Loading a function of the user's from `file.py`, `file.py:name`, `pkg.module:name` or `pkg.module.name`: a reward, an estimator, a loss."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(
    path: str, usual_name: str = "reward_func", usual: Callable[[Any], bool] = lambda found: False
) -> Callable[..., Any]:
    """The function (or class) that `path` names.

    Args:
        path: see above.
        usual_name: what a bare file.py is expected to define, unless it defines one function only.
        usual: whether it is what such a file may define instead of that name, among helpers.

    Raises:
        ValueError: no such file, module or function, or it fails to import.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, name = (path, "") if path.endswith(".py") else path.rpartition(".")[::2]
    if not place:
        raise ValueError(f"{path!r} names no function: write file.py, file.py:name, pkg.module:name or pkg.module.name")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place, path)
    if not name:
        name = _only_function(module, place, usual_name, usual)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}; it has {', '.join(_functions(module)) or 'none'}: name one of them")
    return function


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give the path of a Python file")
    name = f"penstock_custom_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{file} fails to import: {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"{path}: module {name} fails to import: {type(error).__name__}: {error}") from error


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
        raise ValueError(f"{place} defines {', '.join(found) or 'no function'}: say which one is meant, {place}:NAME")
    return found[0]
