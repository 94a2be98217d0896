"""Llama 3, Qwen2 and Qwen3: pre-norm layers, grouped-query attention, SwiGLU, head tied or not.

Llama has nothing more, Qwen2 biases of queries, keys and values, Qwen3 norms of queries and keys. Rotary settings are no tensors.
"""

from __future__ import annotations

from storage.layouts.ops import Row, Shape
from storage.layouts.rows import attention, embeddings, mlp, norms


def rows(shape: Shape) -> list[Row]:
    """The table for a model of this shape."""
    return [*embeddings(shape), *norms(shape), *attention(shape), *mlp(range(shape.num_layers))]
