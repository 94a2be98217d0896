"""The model architectures that the installed SGLang serves with code of its own, read from its source without importing it.

For any other architecture SGLang falls back to transformers' code, which does not take published weights by the hub's names.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.sglang.args import installed
from engines.sources import parsed
from storage.errors import EngineError

READING_THE_TOP = ("LlamaForCausalLM",)  # original_max_position_embeddings beside the rotary settings, in 0.5.21


def check_model(values: dict[str, Any]) -> None:
    """Check that the installed SGLang serves the model of a config.json, as transformers computes it.

    Args:
        values: entries of a config.json that Penstock reads.

    Raises:
        EngineError: an architecture that it does not serve, or an entry that it does not read.
    """
    architecture = values["architectures"][0]
    check_architecture(architecture)
    settings, name = values.get("rope_scaling") or values.get("rope_parameters") or {}, "original_max_position_embeddings"
    scaled = (settings.get("rope_type") or settings.get("type") or "default") != "default"
    top, read = values.get(name), settings.get(name, values.get("max_position_embeddings"))
    if scaled and top not in (None, read) and architecture not in READING_THE_TOP:
        raise EngineError(
            f"config.json says {name} {top} at the top, which SGLang does not read for {architecture} (it takes {read}): move it into "
            "rope_parameters (or rope_scaling)"
        )


def check_architecture(architecture: str) -> None:
    """Check that the installed SGLang serves an architecture; nothing is checked where SGLang is not installed.

    Raises:
        EngineError: it does not.
    """
    root = installed("sglang")
    if root is not None and not serves(architecture, root):
        raise EngineError(
            f"SGLang {version('sglang')} does not serve {architecture}: give --hf-checkpoint a model of another architecture, or "
            "install an SGLang that serves this one; `penstock sft` and `penstock convert` work without it"
        )


@cache
def serves(architecture: str, root: Path) -> bool:
    """Return whether a file of `root`/srt/models registers the architecture as an `EntryClass`. Only files that name it are parsed."""
    for path in sorted((root / "srt" / "models").glob("*.py")):
        source = path.read_bytes()
        if architecture.encode() in source and b"EntryClass" in source and architecture in _entry_classes(source, path):
            return True
    return False


def _entry_classes(source: bytes, path: Path) -> set[str]:
    """Names in the module's assignments to `EntryClass`, a class or a list of classes."""
    names: set[str] = set()
    for node in parsed(source, str(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Assign | ast.AugAssign) and any(ast.unparse(target) == "EntryClass" for target in targets):
            names |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return names
