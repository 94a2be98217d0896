"""Check that the installed SGLang implements a model's architecture, by parsing SGLang's source without importing it.

For other architectures SGLang falls back to the model code of transformers; the weights of such a model cannot be
updated by their Hugging Face names, so Penstock rejects it.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.engines.sglang.passthrough import package_directory
from penstock.engines.sources import parse_source
from penstock.storage.errors import EngineError

# Architectures for which SGLang 0.5.21 reads original_max_position_embeddings at the top level of config.json.
READ_AT_TOP_LEVEL = ("LlamaForCausalLM",)


def check_model(values: dict[str, Any]) -> None:
    """Check that the installed SGLang implements the model that a config.json describes, with its RoPE scaling.

    Args:
        values: entries of config.json, from `families.read_config`.
    """
    architecture = values["architectures"][0]
    check_architecture(architecture)
    name = "original_max_position_embeddings"
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    top, read = values.get(name), rope.get(name, values.get("max_position_embeddings"))
    if scaled and top not in (None, read) and architecture not in READ_AT_TOP_LEVEL:
        raise EngineError(
            f"config.json has {name} {top} at the top level, where SGLang does not read it for {architecture} (SGLang "
            f"uses {read}): move the entry into rope_parameters (or rope_scaling)"
        )


def check_architecture(architecture: str) -> None:
    """Check that the installed SGLang implements an architecture. Do nothing if SGLang is not installed."""
    root = package_directory("sglang")
    if root is not None and not implements_architecture(architecture, root):
        raise EngineError(
            f"SGLang {version('sglang')} does not implement {architecture}: give --hf-checkpoint a model of another "
            f"architecture, or install a release that implements {architecture}; `penstock sft` and `penstock convert` "
            "work without SGLang"
        )


@cache
def implements_architecture(architecture: str, root: Path) -> bool:
    """Return whether the `sglang` package at `root` implements an architecture: whether a file in srt/models lists it
    in `EntryClass`."""
    for path in sorted((root / "srt" / "models").glob("*.py")):
        source = path.read_bytes()
        if architecture.encode() not in source or b"EntryClass" not in source:
            continue
        for node in parse_source(source, str(path)).body:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            classes = (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
            if "EntryClass" in map(ast.unparse, targets) and architecture in classes:
                return True
    return False
