"""Load an external model family: `--model-family-path FILE.py`, or the name of a module that Python can import. Loading
executes the code of the file or module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from penstock.engines.families.family import Family
from penstock.storage.errors import PluginError
from penstock.storage.preemption import time_limit


def load_family(path: str) -> Family:
    """Import the Python file or module `path` and return its `FAMILY`. Its code is executed once per process.

    Raises:
        PluginError: the file or module does not exist, fails to import, or does not define FAMILY.
    """
    family = getattr(_import_module(path), "FAMILY", None)
    if not isinstance(family, Family):
        raise PluginError(f"--model-family-path {path} does not define FAMILY: add `FAMILY = Family(...)`")
    return family


def source_hash(path: str) -> str:
    """Return a hash of the source code of an external family. The hash is part of a converted model's name, because a
    changed tensor table changes the converted model."""
    file = _import_module(path).__file__
    return hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()[:16]


@cache
def _import_module(path: str) -> ModuleType:
    """Import the Python file or module `path`, and return the module."""
    name = f"penstock_family_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    try:
        if not path.endswith(".py"):
            with time_limit("the import"):
                return importlib.import_module(path)
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a file")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses need the module in sys.modules
        with time_limit("the import"):
            spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"--model-family-path {path} fails to import ({reason}): give a Python file or module that defines FAMILY"
        ) from error
