"""DeepSeek-V3 and R1, Kimi K2, Moonlight and GLM-4.7-Flash: latent attention, and experts after the first, dense layers.

Moonlight projects queries directly, the others by way of a short vector. The last dimensions of a head, which turn, stay as they
are: whether neighbours or halves turn together is the model's knowledge, not the layout's.
"""

from __future__ import annotations

from storage.layouts.ops import Row, Shape
from storage.layouts.rows import embeddings, layer_row, mixture, mlp, norms

DIRECT = {"linear_q_proj": "q_proj"}
COMPRESSED = {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm", "linear_q_up_proj": "q_b_proj"}
COMMON = {
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def rows(shape: Shape) -> list[Row]:
    """The table for a model of this shape."""
    assert shape.latent is not None, shape.family
    names = (DIRECT if shape.latent.q_lora_rank is None else COMPRESSED) | COMMON
    attention = [layer_row(shape, f"self_attention.{to}.weight", f"self_attn.{fro}.weight") for to, fro in names.items()]
    experts = shape.experts
    feed_forward = mlp(range(shape.num_layers)) if experts is None else mixture(shape, experts, bias=True)
    return [*embeddings(shape), *norms(shape), *attention, *feed_forward]
