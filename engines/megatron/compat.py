"""Make Megatron-core importable: every process must call `import_megatron()` before its first `import megatron.core`.

The function accepts only the tested version of Megatron-core, applies `patches.py`, and on a machine without CUDA
installs the import loader of `cpu_shim.py`, with which Megatron-core runs on the CPU. The module `torch` is not
changed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from penstock.engines.megatron.patches import MEGATRON_VERSION, patch_module


def import_megatron() -> None:
    """Install an import hook that patches `megatron.core` when it is imported. A second call does nothing."""
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    installed = importlib.metadata.version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise RuntimeError(
            f"found megatron-core {installed}, but Penstock patches its source and needs exactly {MEGATRON_VERSION}: "
            f"pip install megatron-core=={MEGATRON_VERSION}"
        )
    early = next((name for name in list(sys.modules) if name.startswith("megatron.core")), None)
    if early:
        raise RuntimeError(
            f"{early} was imported before import_megatron() was called: import megatron.core only after importing "
            "penstock.engines.megatron.parallel"
        )
    loader: Callable[[str, str], importlib.abc.Loader] = _PatchingLoader
    if not torch.cuda.is_available():
        from penstock.engines.megatron.cpu_shim import CpuLoader

        loader = CpuLoader
    sys.meta_path.insert(0, _MegatronFinder(loader))
    # Hide known warnings: that TransformerEngine and apex are missing, and that some torch functions are deprecated.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r".*deprecating ShardedTensor", category=FutureWarning)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


@dataclass
class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Find modules of `megatron.core` on the import path, and make Python load them with `loader`."""

    loader: Callable[[str, str], importlib.abc.Loader]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


class _PatchingLoader(importlib.machinery.SourceFileLoader):
    """Execute a module of `megatron.core`, and then apply `patches.py` to it."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        patch_module(module)
