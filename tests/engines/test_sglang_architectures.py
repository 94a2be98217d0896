"""The architectures that the installed SGLang serves, read from its sources."""

import ast
import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.families import FAMILIES
from penstock.engines.sglang.checks import check_model, implements_architecture
from penstock.storage.errors import EngineError

ROOT = Path(__file__).parents[2]


def test_every_supported_architecture_but_the_old_glm_is_served() -> None:
    """As SGLang 0.5.21 has it; `test_sglang_families.py` starts engines of the others."""
    for architecture in FAMILIES.keys() - {"GlmForCausalLM"}:
        check_model({"architectures": [architecture]})
    with pytest.raises(EngineError, match=r"SGLang \d+\.\d+.*GlmForCausalLM"):
        check_model({"architectures": ["GlmForCausalLM"]})


@pytest.mark.parametrize(
    ("architecture", "top", "inside", "served"),
    [
        ("Qwen3ForCausalLM", 64, {"rope_type": "yarn"}, False),
        ("Qwen3ForCausalLM", 64, {"rope_type": "yarn", "original_max_position_embeddings": 64}, True),
        ("Qwen3ForCausalLM", 4096, {"rope_type": "yarn"}, True),
        ("Qwen3ForCausalLM", 64, {"rope_type": "default"}, True),
        ("LlamaForCausalLM", 64, {"rope_type": "llama3"}, True),
        ("GlmForCausalLM", None, {}, False),
    ],
)
def test_entries_that_sglang_does_not_read_are_refused(
    architecture: str, top: int | None, inside: dict[str, Any], served: bool
) -> None:
    values = {"architectures": [architecture], "max_position_embeddings": 4096, "rope_parameters": inside}
    values |= {} if top is None else {"original_max_position_embeddings": top}
    with nullcontext() if served else pytest.raises(EngineError):
        check_model(values)


@pytest.mark.parametrize(
    ("source", "served"),
    [
        ("EntryClass = FooForCausalLM", True),
        ("EntryClass = [BarForCausalLM, FooForCausalLM]", True),
        ("EntryClass = BarForCausalLM\nEntryClass += [FooForCausalLM]", True),
        ("class FooForCausalLM: ...\nEntryClass = [BarForCausalLM]", False),
        ("EntryClass = [FooForCausalLM2]", False),
        ("FooForCausalLM = 1", False),
    ],
)
def test_implements_architecture_reads_the_registry(source: str, served: bool, tmp_path: Path) -> None:
    (tmp_path / "srt" / "models").mkdir(parents=True)
    (tmp_path / "srt" / "models" / "foo.py").write_text(source)
    assert implements_architecture("FooForCausalLM", tmp_path) is served


@pytest.fixture
def disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """Return a function: architecture, flags -> model files that the launcher of the engines disables. The launcher
    patches its process, so only this function of it is executed."""
    source = ast.parse((ROOT / "engines/sglang/launch.py").read_text())
    [function] = [node for node in source.body if getattr(node, "name", "") == "import_only_needed_models"]
    names: dict[str, Any] = {"importlib": importlib, "json": json, "os": os, "Path": Path}
    exec(compile(ast.Module([function], []), "launch.py", "exec"), names)
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")  # restored at the end

    def call(architecture: str, *flags: str) -> set[str]:
        monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        names["import_only_needed_models"](["launch.py", "--model-path", str(tmp_path), *flags])
        return set(filter(None, os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")))

    return call


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - {"GlmForCausalLM"}))
def test_an_engine_imports_the_files_of_its_architecture_only(
    architecture: str, disabled: Callable[..., set[str]]
) -> None:
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])  # type: ignore[union-attr,index]
    files = {path.stem: path for path in (root / "srt/models").glob("*.py")}
    needed = files.keys() - disabled(architecture)
    assert 1 <= len(needed) <= 5
    assert any(architecture in files[name].read_text().partition("EntryClass")[2] for name in needed)


@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("UnknownForCausalLM", []),
        ("Glm4MoeForCausalLM", ["--speculative-algorithm", "NEXTN"]),
        ("LlamaForCausalLM", ["--speculative-draft-model-path=/draft"]),
    ],
)
def test_an_engine_imports_all_models_if_it_may_need_another_one(
    architecture: str, flags: list[str], disabled: Callable[..., set[str]]
) -> None:
    assert disabled(architecture, *flags) == set()
