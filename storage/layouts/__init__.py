"""How Megatron's names and shapes correspond to Hugging Face's: one two-way table per model family.

A layout takes and gives full tensors; gathering over ranks and reading files are the caller's. Converting (files) and publishing
(weights sent to engines) both use it. A new family is one file with its table and one line in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable

from storage.errors import ModelError
from storage.layouts import deepseek_v3, dense, glm4, mixtures
from storage.layouts.ops import Layout, Row, Shape

FAMILIES: dict[str, Callable[[Shape], list[Row]]] = {
    "llama": dense.rows,
    "qwen2": dense.rows,
    "qwen3": dense.rows,
    "qwen3_moe": mixtures.qwen3_rows,
    "glm": glm4.plain_rows,
    "glm4": glm4.rows,
    "glm4_moe": mixtures.glm4_rows,
    "glm4_moe_lite": deepseek_v3.rows,
    "deepseek_v3": deepseek_v3.rows,
}


def layout_for(shape: Shape) -> Layout:
    """The layout of a model of this shape.

    Raises:
        ModelError: no layout for the family.
    """
    if shape.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(f"model family {shape.family!r} has no layout; Penstock has {known}: use a checkpoint of one of these")
    return Layout(shape, FAMILIES[shape.family](shape))
