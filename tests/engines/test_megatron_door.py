"""The doors open for one version, on the machine that they are for, and change nothing but CUDA literals."""

import ast
import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch

from engines.megatron import door

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


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, door._Finder)])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.0")
    with pytest.raises(RuntimeError, match=r"found megatron-core 0\.17\.0, need exactly 0\.16\.1"):
        door.open_door()


def test_a_second_opening_changes_nothing() -> None:
    door.open_door()
    finders = list(sys.meta_path)
    door.open_door()
    assert sys.meta_path == finders


def test_the_cpu_door_refuses_to_load_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "engines.megatron.cpu_door", raising=False)
    with pytest.raises(RuntimeError, match="for machines without it"):
        importlib.import_module("engines.megatron.cpu_door")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU door does not load here")
def test_only_cuda_literals_are_rewritten() -> None:
    from engines.megatron.cpu_door import _Rewrite

    assert ast.unparse(_Rewrite().visit(ast.parse(SOURCE))) == ast.unparse(ast.parse(REWRITTEN))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU door does not load here")
def test_compiled_code_is_kept_and_never_that_of_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.megatron.cpu_door import CpuLoader

    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "place.py"
    source.write_text('place = "cuda"')
    loader = CpuLoader("place", str(source))
    first = loader.get_code("place")
    [kept] = (tmp_path / "__pycache__").iterdir()
    monkeypatch.setattr(CpuLoader, "source_to_code", lambda *_: pytest.fail("compiled again"))
    assert loader.get_code("place") == first and "cpu" in first.co_consts
    monkeypatch.undo()
    kept.write_bytes(b"torn")
    assert loader.get_code("place") == first
    source.write_text('place = "cuda", 1')
    assert loader.get_code("place") != first
