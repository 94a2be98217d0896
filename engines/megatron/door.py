"""The door to Megatron-core: call `open_door()` before the first `import megatron.core`, everywhere.

It refuses any version but the one that was tried, repairs what 0.16.1 gets wrong when TransformerEngine is absent, and on a
machine without CUDA lets the CPU door (`cpu_door.py`) make the same code run there. The global `torch` stays untouched. Building
models, process groups and optimizers is for the other files of this package.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

MEGATRON_VERSION = "0.16.1"


def open_door() -> None:
    """Make `import megatron.core` safe in this process. Does nothing the second time.

    Raises:
        RuntimeError: another megatron-core is installed, or it was imported before this call.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(
            f"found megatron-core {found}, need exactly {MEGATRON_VERSION} (the doors patch its source): "
            f"pip install megatron-core=={MEGATRON_VERSION}"
        )
    early = next((name for name in sys.modules if name.startswith("megatron.core")), None)
    if early:
        raise RuntimeError(f"{early} was imported before open_door(): import megatron through engines.megatron only")
    loader: Callable[[str, str], importlib.abc.Loader] = _RepairingLoader
    if not torch.cuda.is_available():
        from engines.megatron.cpu_door import CpuLoader

        loader = CpuLoader
    sys.meta_path.insert(0, _Finder(loader))
    _hush()


def _hush() -> None:
    """Megatron's known remarks: TransformerEngine and apex are absent; torch will rename two collectives and a tensor class."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r".*deprecating ShardedTensor", category=FutureWarning)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `megatron.core` as usual, but has it loaded by our loader."""

    def __init__(self, loader: Callable[[str, str], importlib.abc.Loader]) -> None:
        self.loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


class _RepairingLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        repair_without_transformer_engine(module)


def repair_without_transformer_engine(module: ModuleType) -> None:
    """Undo the places where 0.16.1 assumes TransformerEngine although it is not installed. They hold on a GPU as well."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    names: dict[str, Any] = vars(module)
    if module.__name__ == "megatron.core.transformer.moe.moe_utils":
        names.setdefault("te_general_gemm", None)  # NameError as soon as moe_router_dtype is set
    elif module.__name__ == "megatron.core.transformer.multi_latent_attention":
        names["HAVE_TE"] = False  # is True: the stand-ins of a failed import count as TE
    elif module.__name__ == "megatron.core.tensor_parallel.random":
        module.CheckpointWithoutOutput.__init__.__defaults__ = (
            None,
        )  # fp8=False counts as fp8: recomputing norms is a NameError
    elif module.__name__ == "megatron.core.optimizer.distrib_optimizer":
        _repair_optimizer_state(module.DistributedOptimizer)


def _repair_optimizer_state(optimizer: type) -> None:
    """Loading: torch's AdamW keeps `step` in every parameter's state, a checkpoint does not; without this a KeyError."""
    original = optimizer._set_main_param_and_optimizer_states  # type: ignore[attr-defined]

    def with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        known = {"step": state["step"].clone()} if "step" in state else {}
        original(self, model_param, {**known, **tensors})

    optimizer._set_main_param_and_optimizer_states = with_step  # type: ignore[attr-defined]
