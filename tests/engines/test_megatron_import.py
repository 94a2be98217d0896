"""Megatron-core is imported in one version only, and on a CPU only its CUDA literals are rewritten."""

import ast
import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from penstock.engines.megatron import compat

SOURCE = """
place: "cuda" = "cuda"
def f(x, kind="torch.cuda.FloatTensor"):
    torch.cuda.synchronize()
    self.cuda.reset()
    buffer = torch.empty(1, device="cuda", pin_memory=True)
    return x.cuda(non_blocking=True), f"cuda:{kind}", "cuda graphs"
"""
REWRITTEN = """
place: "cuda" = "cpu"
def f(x, kind="torch.FloatTensor"):
    _penstock_cuda.synchronize()
    self.cuda.reset()
    buffer = torch.empty(1, device="cpu", pin_memory=False)
    return x.cpu(), f"cuda:{kind}", "cuda graphs"
"""


def test_import_of_another_version_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, compat._MegatronFinder)])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(RuntimeError, match=r"0\.17\.0.*0\.16\.1"):
        compat.import_megatron()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU shim cannot be imported here")
def test_only_cuda_literals_are_rewritten() -> None:
    from penstock.engines.megatron.cpu_shim import CudaRewriter

    assert ast.unparse(CudaRewriter().visit(ast.parse(SOURCE))) == ast.unparse(ast.parse(REWRITTEN))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU shim cannot be imported here")
def test_bytecode_is_cached_per_source_and_rebuilt_if_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engines.megatron.cpu_shim import CpuLoader

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "place.py"
    source.write_text('place = "cuda"')
    loader = CpuLoader("place", str(source))
    first = loader.get_code("place")
    [cached] = (tmp_path / "__pycache__").iterdir()
    monkeypatch.setattr(CpuLoader, "source_to_code", lambda *_: pytest.fail("compiled again"))
    assert loader.get_code("place") == first and "cpu" in first.co_consts
    monkeypatch.undo()
    cached.write_bytes(b"damaged")
    assert loader.get_code("place") == first
    source.write_text('place = "cuda", 1')
    assert loader.get_code("place") != first
