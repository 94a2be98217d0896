"""Grouped-query attention with experts: Qwen3-MoE, and GLM-4.5, 4.6 and 4.7.

Qwen3's mixtures have experts in every layer and nothing beside them. GLM's have dense layers first, shared experts, a correction
of the router's scores, biases of queries, keys and values, and in the 355B models norms of queries and keys.
"""

from __future__ import annotations

from storage.layouts.dense import rows as dense_rows
from storage.layouts.ops import Row, Shape
from storage.layouts.rows import attention, embeddings, mixture, norms


def qwen3_rows(shape: Shape) -> list[Row]:
    """The table for a Qwen3-MoE of this shape."""
    if shape.experts is None:  # every layer is said to be dense
        return dense_rows(shape)
    return [*embeddings(shape), *norms(shape), *attention(shape), *mixture(shape, shape.experts, bias=False)]


def glm4_rows(shape: Shape) -> list[Row]:
    """The table for a GLM-4.5 or later of this shape."""
    if shape.experts is None:
        return dense_rows(shape)
    return [*embeddings(shape), *norms(shape), *attention(shape), *mixture(shape, shape.experts, bias=True)]
