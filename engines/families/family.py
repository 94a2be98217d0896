"""Definition of a model family (`Family`). `llama.py` has the shortest example. An external family is a file or
module: `--model-family-path FILE.py`, or the name of a module that Python can import. Loading executes its code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.engines.families.entries import ConfigEntries, EntryType
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorRow, decoder_rows
from penstock.storage.errors import PluginError
from penstock.storage.preemption import time_limit


@dataclass(frozen=True)
class Family:
    """A model family: how its config.json is read, and the names of its tensors."""

    name: str  # stored with converted models
    architecture: str  # the family's value in config.json's `architectures`
    model_types: tuple[str, ...]  # values of config.json's `model_type` that only this architecture has
    defaults: dict[str, Any]  # of entries that config.json does not have, equal to those of transformers' config class
    # Returns the `ModelShape` fields that differ from those of a plain Llama, and calls `ConfigEntries.refuse` for
    # values that Penstock does not support.
    read: Callable[[ConfigEntries], dict[str, Any]]
    rows: Callable[[ModelShape], list[TensorRow]] = decoder_rows  # returns the tensor table of a shape
    entry_types: dict[str, EntryType] = field(default_factory=dict)  # of config.json entries that only this family has
    # Function of the number of dense layers and of all layers that returns the config.json entries which set these
    # numbers, to check the logits of a few layers of a large MoE model; with None, only the whole model can be checked.
    expert_entries: Callable[[int, int], dict[str, Any]] | None = None
    # Whether weight files have one transposed tensor for all experts of a layer (`hf_headers.unstack_experts`). The
    # tensor table has the experts one by one.
    stacked_experts: bool = False


def load_family(path: str) -> Family:
    """Import the Python file or module `path`, whose code is executed once per process, and return its `FAMILY`."""
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
