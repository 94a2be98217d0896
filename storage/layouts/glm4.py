"""GLM-4 (9B, GLM-Z1-9B, 32B): gate and up projections in one tensor, and norms also after attention and after the MLP.

The older GLM (`GlmForCausalLM`) lacks these norms. The 32B model lacks the biases of queries, keys and values.
"""

from __future__ import annotations

from storage.layouts.ops import Row, Shape
from storage.layouts.rows import attention, embeddings, layer_row, norms


def rows(shape: Shape) -> list[Row]:
    """The table for a model of this shape."""
    after = [
        layer_row(shape, "post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
        layer_row(shape, "post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    ]
    return [*plain_rows(shape), *after]


def plain_rows(shape: Shape) -> list[Row]:
    """Without the norms that come after."""
    fused = [  # the rows of gate, then those of up, on both sides
        layer_row(shape, "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
        layer_row(shape, "mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ]
    return [*embeddings(shape), *norms(shape), *attention(shape), *fused]
