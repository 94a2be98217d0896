"""The doors open for one version, on the machine that they are for, and change nothing but CUDA literals."""

import ast
import importlib
import importlib.metadata
import sys

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
