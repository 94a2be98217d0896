"""Qwen3 (dense): grouped-query attention with normalised queries and keys, SwiGLU, no biases, head tied or not."""

from __future__ import annotations

from storage.layouts.ops import GateUp, InterleavedQKV, PaddedVocab, Row, Same, Shape


def rows(shape: Shape) -> list[Row]:
    """The table for a model of this shape."""
    vocab = PaddedVocab(shape.vocab_size)
    qkv = InterleavedQKV(shape.num_query_groups, shape.num_attention_heads // shape.num_query_groups, shape.head_dim)
    layer, hf = "decoder.layers.{}.", "model.layers.{}."
    head = ("lm_head.weight",)  # the hub's Qwen3-0.6B is tied and holds it all the same
    table = [
        Row(
            "embedding.word_embeddings.weight",
            vocab,
            ("model.embed_tokens.weight",),
            copies=head if shape.tied_embeddings else (),
        ),
        Row(layer + "input_layernorm.weight", Same(), (hf + "input_layernorm.weight",)),
        Row(layer + "self_attention.linear_qkv.weight", qkv, tuple(f"{hf}self_attn.{x}_proj.weight" for x in "qkv")),
        Row(layer + "self_attention.q_layernorm.weight", Same(), (hf + "self_attn.q_norm.weight",)),
        Row(layer + "self_attention.k_layernorm.weight", Same(), (hf + "self_attn.k_norm.weight",)),
        Row(layer + "self_attention.linear_proj.weight", Same(), (hf + "self_attn.o_proj.weight",)),
        Row(layer + "pre_mlp_layernorm.weight", Same(), (hf + "post_attention_layernorm.weight",)),
        Row(layer + "mlp.linear_fc1.weight", GateUp(), (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")),
        Row(layer + "mlp.linear_fc2.weight", Same(), (hf + "mlp.down_proj.weight",)),
        Row("decoder.final_layernorm.weight", Same(), ("model.norm.weight",)),
    ]
    if not shape.tied_embeddings:
        table.append(Row("output_layer.weight", vocab, head))
    return table
