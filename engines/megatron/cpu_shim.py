"""Run Megatron-core 0.16.1 without CUDA: an import loader rewrites references to CUDA in the syntax tree of its
modules.

    torch.cuda               -> a small substitute namespace
    "cuda"                   -> "cpu" (whole string constants only)
    "torch.cuda.FloatTensor" -> "torch.FloatTensor" (type names, compared as strings by the optimizers)
    x.cuda(...)              -> x.cpu()
    pin_memory=True          -> pin_memory=False

Only modules of `megatron.core` are rewritten. Patching attributes at run time would not cover literals, type names in
strings, and default arguments. With the rewritten code, gradients of training over gloo agree with Hugging Face's to
3e-6 under every kind of parallelism. Importing this module on a machine with CUDA raises a RuntimeError.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import sys
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

from penstock.engines.megatron.patches import MEGATRON_VERSION, patch_module
from penstock.engines.sources import parse_source

if torch.cuda.is_available():
    raise RuntimeError(
        "penstock.engines.megatron.cpu_shim was imported on a machine with CUDA, but works only without CUDA: "
        "call penstock.engines.megatron.compat.import_megatron() instead"
    )

CUDA_NAME = "_penstock_cuda"  # the name that replaces `torch.cuda` in the rewritten source
SHIM_SOURCE = Path(__file__).read_bytes()
TYPE_NAMES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class CpuLoader(importlib.machinery.SourceFileLoader):
    """Rewrite and compile a module of `megatron.core`, and cache the bytecode, which saves 2 s per process, under a
    name with a hash of the module's source and of this file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        key = hashlib.sha256(source + SHIM_SOURCE + bytes([sys.flags.optimize])).hexdigest()[:16]
        cached = importlib.util.cache_from_source(path, optimization=f"penstock{key}")
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # the cache file is missing or truncated
            return marshal.loads(self.get_data(cached))
        code = self.source_to_code(source, path)
        if not sys.dont_write_bytecode:
            self.set_data(cached, marshal.dumps(code))  # atomic; skipped if the folder is read-only
        return code

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(CudaRewriter().visit(parse_source(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[CUDA_NAME] = CUDA
        super().exec_module(module)
        patch_module(module)
        names: dict[str, Any] = vars(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # torch.compile needs a C++ compiler
        elif module.__name__ == "megatron.core.tensor_parallel.random":
            names["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
            names["_get_cuda_rng_state"] = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
        elif module.__name__ == "megatron.core.transformer.moe.moe_utils":
            # The all-to-all dispatcher needs its splits as numpy arrays; Megatron converts only tensors on a GPU.
            names["maybe_move_tensor_to_cpu"] = lambda tensor, as_numpy=False, record_stream=False: (
                tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
            )


class CudaRewriter(ast.NodeTransformer):
    """Replace references to CUDA in a module's syntax tree (see the table in the docstring of this file)."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(CUDA_NAME, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return ast.copy_location(ast.Call(ast.Attribute(node.func.value, "cpu", ast.Load()), [], []), node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.copy_location(ast.Constant(False), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and (node.value == "cuda" or node.value in TYPE_NAMES):
            return ast.copy_location(ast.Constant(TYPE_NAMES.get(node.value, "cpu")), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node  # the annotation itself is not changed

    def visit_arg(self, node: ast.AST) -> ast.AST:
        return node  # annotations of arguments are not changed

    visit_JoinedStr = visit_arg  # nor is the text of f-strings (messages)


def _ignored(*_: Any, **__: Any) -> None:
    """Substitute for functions that wait or record: CPU operations run in order."""


_EVENT = SimpleNamespace(record=_ignored, wait=_ignored, synchronize=_ignored)
_STREAM = SimpleNamespace(  # the only one, so all streams compare equal
    device=torch.device("cpu"),
    wait_stream=_ignored,
    wait_event=_ignored,
    synchronize=_ignored,
    record_event=lambda *_: _EVENT,
)


class _Cuda:
    """Substitute for `torch.cuda` in `megatron.core`. Attributes not defined here are those of `torch.cuda`."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    OutOfMemoryError = torch.cuda.OutOfMemoryError
    CUDAGraph = type("CUDAGraph", (), {})
    nvtx = SimpleNamespace(range=lambda *_, **__: contextlib.nullcontext(), range_push=_ignored, range_pop=_ignored)
    random = SimpleNamespace(
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )
    amp = SimpleNamespace(custom_fwd=torch.amp.custom_fwd, custom_bwd=torch.amp.custom_bwd)
    Event = staticmethod(lambda *_, **__: _EVENT)
    Stream = current_stream = default_stream = staticmethod(lambda *_, **__: _STREAM)
    stream = staticmethod(lambda _=None: contextlib.nullcontext())
    default_generators = (torch.default_generator,)
    is_available = is_initialized = is_current_stream_capturing = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: torch.device("cpu"))
    set_device = synchronize = empty_cache = staticmethod(_ignored)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *_, **__: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_, **__: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


CUDA = _Cuda()
assert MEGATRON_VERSION == "0.16.1"  # the rewrites were tested with this version only; test them before changing it
