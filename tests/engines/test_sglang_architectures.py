"""The architectures that the installed SGLang serves, read from its sources."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.families import FAMILIES
from penstock.engines.sglang.checks.architectures import check_architecture, check_model, implements_architecture
from penstock.storage.errors import EngineError

ROOT = Path(__file__).parents[2]


def test_every_supported_architecture_but_the_old_glm_is_served() -> None:
    """As SGLang 0.5.21 has it; `test_sglang_families.py` starts engines of the others."""
    for architecture in FAMILIES:
        if architecture == "GlmForCausalLM":
            with pytest.raises(EngineError, match=r"SGLang \d+\.\d+.*GlmForCausalLM"):
                check_architecture(architecture)
        else:
            check_architecture(architecture)


@pytest.mark.parametrize(
    ("architecture", "top", "inside", "served"),
    [
        ("Qwen3ForCausalLM", 64, {"rope_type": "yarn"}, False),
        ("Qwen3ForCausalLM", 64, {"rope_type": "yarn", "original_max_position_embeddings": 128}, False),
        ("Qwen3ForCausalLM", 64, {"rope_type": "yarn", "original_max_position_embeddings": 64}, True),
        ("Qwen3ForCausalLM", 4096, {"rope_type": "yarn"}, True),
        ("Qwen3ForCausalLM", 64, {"rope_type": "default"}, True),
        ("Qwen3ForCausalLM", None, {"type": "yarn"}, True),
        ("LlamaForCausalLM", 64, {"rope_type": "llama3"}, True),
        ("GlmForCausalLM", None, {}, False),
    ],
)
def test_entries_that_sglang_does_not_read_are_refused(
    architecture: str, top: int | None, inside: dict[str, Any], served: bool
) -> None:
    values = {"architectures": [architecture], "max_position_embeddings": 4096, "rope_parameters": inside}
    values |= {} if top is None else {"original_max_position_embeddings": top}
    if served:
        check_model(values)
        return
    with pytest.raises(EngineError):
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


def test_check_architecture_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\nfrom penstock.engines.sglang.checks.architectures import check_architecture\n"
        "check_architecture('Qwen3ForCausalLM')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'sglang', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
