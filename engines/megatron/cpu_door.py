"""Megatron-core 0.16.1 on a machine without CUDA: its CUDA literals are rewritten in the syntax tree while it is imported.

    torch.cuda               -> a small stand-in namespace
    "cuda"                   -> "cpu" (whole string constants only)
    "torch.cuda.FloatTensor" -> "torch.FloatTensor" (type names, compared as strings by the optimizers)
    x.cuda(...)              -> x.cpu()
    pin_memory=True          -> pin_memory=False

Only modules below `megatron.core` are touched; nothing else covers them all (literals, type-name strings, default arguments).
Training over gloo then gives Hugging Face's gradients to 3e-6 under every parallelism. This module refuses to load beside CUDA.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from engines.megatron.door import MEGATRON_VERSION, repair_without_transformer_engine
from engines.sources import parsed

if torch.cuda.is_available():
    raise RuntimeError(
        "found CUDA, but engines.megatron.cpu_door is for machines without it: use engines.megatron.door.open_door()"
    )

STAND_IN = "_penstock_cuda"  # the name that replaces `torch.cuda` in the rewritten source
RULES = Path(__file__).read_bytes()
TYPE_NAMES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class CpuLoader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source, with its own bytecode beside the ordinary one: rewriting and compiling took 2 s a process.

    The bytecode's name holds a hash of the source and of these rules, so that it is never that of others.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        key = hashlib.sha256(source + RULES + bytes([sys.flags.optimize])).hexdigest()[:16]
        compiled = importlib.util.cache_from_source(path, optimization=f"penstock{key}")
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # none there, or a torn one
            return marshal.loads(self.get_data(compiled))
        code = self.source_to_code(source, path)
        if not sys.dont_write_bytecode:
            self.set_data(compiled, marshal.dumps(code))  # in one piece; not at all where the folder is read-only
        return code

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.fix_missing_locations(_Rewrite().visit(parsed(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[STAND_IN] = CUDA
        super().exec_module(module)
        repair_without_transformer_engine(module)
        _repair_for_cpu(module)


class _Rewrite(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(STAND_IN, ast.Load()), node)
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

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node  # pieces of messages stay

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node  # annotations stay

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node


def _repair_for_cpu(module: ModuleType) -> None:
    """What is not a literal: private CUDA generators, a test on `.is_cuda`, and torch.compile (needs a C++ compiler)."""
    names: dict[str, Any] = vars(module)
    if module.__name__ == "megatron.core.jit":
        module.disable_jit_fuser()
    elif module.__name__ == "megatron.core.tensor_parallel.random":
        names["_set_cuda_rng_state"] = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        names["_get_cuda_rng_state"] = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    elif module.__name__ == "megatron.core.transformer.moe.moe_utils":
        # splits of the all-to-all dispatcher must become numpy; the original converts only tensors that are on a GPU
        names["maybe_move_tensor_to_cpu"] = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )


class _Stream:
    """A CPU has one queue of work: waiting is a no-op and all streams are the same."""

    device = torch.device("cpu")

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


class _Nvtx:
    @staticmethod
    @contextlib.contextmanager
    def range(*_: Any, **__: Any) -> Iterator[None]:
        yield

    range_push = range_pop = staticmethod(lambda *_, **__: None)


class _Random:
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))


class _Amp:
    custom_fwd = staticmethod(torch.amp.custom_fwd)
    custom_bwd = staticmethod(torch.amp.custom_bwd)


class _Cuda:
    """What `megatron.core` sees as `torch.cuda`. Anything not named here comes from the real one."""

    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    OutOfMemoryError = torch.cuda.OutOfMemoryError
    CUDAGraph = type("CUDAGraph", (), {})
    Event, nvtx, random, amp = _Event, _Nvtx(), _Random, _Amp
    Stream = staticmethod(lambda *_, **__: _Stream())
    current_stream = default_stream = staticmethod(lambda *_, **__: _Stream())
    stream = staticmethod(lambda _=None: contextlib.nullcontext())
    default_generators = (torch.default_generator,)
    is_available = is_initialized = is_current_stream_capturing = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: torch.device("cpu"))
    set_device = synchronize = empty_cache = staticmethod(lambda *_, **__: None)
    manual_seed = manual_seed_all = staticmethod(lambda seed: torch.manual_seed(seed))
    get_rng_state = staticmethod(lambda *_, **__: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_, **__: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


CUDA = _Cuda()
assert MEGATRON_VERSION == "0.16.1"  # the rewrites were tried on this source; try them again before raising it
