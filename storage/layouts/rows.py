"""Groups of rows that families share: embeddings, attention, an MLP, a mixture. What only one family has stands in its file."""

from __future__ import annotations

from storage.layouts.ops import GateUp, InterleavedQKV, Mixture, PaddedVocab, Row, Same, Shape

MEGATRON, HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def embeddings(shape: Shape) -> list[Row]:
    """Embedding, head and the norm before it."""
    vocab, head = PaddedVocab(shape.vocab_size), ("lm_head.weight",)
    tied = head if shape.tied_embeddings else ()  # the hub's Qwen3-0.6B is tied and holds the head all the same
    rows = [
        Row("embedding.word_embeddings.weight", vocab, ("model.embed_tokens.weight",), copies=tied),
        Row("decoder.final_layernorm.weight", Same(), ("model.norm.weight",)),
    ]
    return rows if shape.tied_embeddings else [*rows, Row("output_layer.weight", vocab, head)]


def norms(shape: Shape) -> list[Row]:
    """The norms before attention and before the MLP."""
    return [
        layer_row(shape, "input_layernorm.weight", "input_layernorm.weight"),
        layer_row(shape, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ]


def attention(shape: Shape) -> list[Row]:
    """Grouped-query attention; biases and norms of queries and keys where the model has them."""
    qkv = InterleavedQKV(shape.num_query_groups, shape.num_attention_heads // shape.num_query_groups, shape.head_dim)
    layers, to, fro = range(shape.num_layers), MEGATRON + "self_attention.", HF + "self_attn."
    rows = [
        Row(to + f"linear_qkv.{kind}", qkv, tuple(f"{fro}{x}_proj.{kind}" for x in "qkv"), layers=layers)
        for kind in (["weight", "bias"] if shape.qkv_bias else ["weight"])
    ]
    rows.append(Row(to + "linear_proj.weight", Same(), (fro + "o_proj.weight",), layers=layers))
    for x in "qk" if shape.qk_layernorm else "":
        rows.append(Row(to + f"{x}_layernorm.weight", Same(), (fro + f"{x}_norm.weight",), layers=layers))
    return rows


def mlp(layers: range) -> list[Row]:
    """A dense MLP in these layers."""
    to, fro = MEGATRON + "mlp.", HF + "mlp."
    return gated(to, fro, layers)


def mixture(shape: Shape, experts: Mixture, bias: bool) -> list[Row]:
    """Router and experts, and a dense MLP in the first layers.

    Args:
        bias: whether the router has a correction of its scores.
    """
    dense, layers = range(experts.num_dense_layers), range(experts.num_dense_layers, shape.num_layers)
    to, fro = MEGATRON + "mlp.", HF + "mlp."
    rows = [*mlp(dense), Row(to + "router.weight", Same(), (fro + "gate.weight",), layers=layers)]
    if bias:
        rows.append(Row(to + "router.expert_bias", Same(), (fro + "gate.e_score_correction_bias",), layers=layers))
    rows += gated(to + "experts.local_experts.{expert}.", fro + "experts.{expert}.", layers, experts.num_experts)
    if experts.shared_ffn_hidden_size:
        rows += gated(to + "shared_experts.", fro + "shared_experts.", layers)
    return rows


def gated(to: str, fro: str, layers: range, num_experts: int = 1) -> list[Row]:
    """A SwiGLU with gate and up projections of their own."""
    gate_up = (fro + "gate_proj.weight", fro + "up_proj.weight")
    return [
        Row(to + "linear_fc1.weight", GateUp(), gate_up, layers=layers, num_experts=num_experts),
        Row(to + "linear_fc2.weight", Same(), (fro + "down_proj.weight",), layers=layers, num_experts=num_experts),
    ]


def layer_row(shape: Shape, megatron: str, hf: str) -> Row:
    """A tensor that every layer has under both names, unchanged."""
    return Row(MEGATRON + megatron, Same(), (HF + hf,), layers=range(shape.num_layers))
