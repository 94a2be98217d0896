"""Fixtures: the tiny tokenizer, and a run with a user-defined function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.stages.rollout.text.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    from penstock.flows.commands.demo_model import make_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return PromptTokenizer(directory, apply_chat_template=True)


@pytest.fixture
def plugin_bench(tmp_path: Path, tokenizer: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that makes a run with `code` as the function of an option: the one called `name`, or the only one."""
    from tests.rollout.scripted_engine import Bench

    def make(code: str, option: str = "rollout_function_path", name: str = "", **options: Any) -> Bench:
        (tmp_path / "functions.py").write_text(code)
        monkeypatch.delitem(sys.modules, "functions", raising=False)
        path = f"{tmp_path}/functions.py" + (f":{name}" if name else "")
        return Bench(tmp_path, tokenizer, **{option: path, **options})

    return make
