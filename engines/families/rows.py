"""Mappings between Megatron and Hugging Face tensors (`TensorRow`) that model families share: embeddings, norms,
attention, MLP and experts. Hugging Face names are those of Llama and DeepSeek; `renamed` changes them.

The mappings of all tensors of a model are its tensor table.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.engines.families.ops import GateUp, InterleavedQKV, PaddedVocab, Same, TensorRow
from penstock.engines.families.shape import ModelShape

MEGATRON, HF = "decoder.layers.{layer}.", "model.layers.{layer}."


def decoder_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of a pre-norm decoder, dense or MoE, with grouped-query
    attention and SwiGLU."""
    input_norm, mlp_norm = norm_rows(shape)
    return [*embedding_rows(shape), input_norm, *attention_rows(shape), mlp_norm, *mlp_rows(shape)]


def embedding_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of the embedding, the final norm and the LM head. A
    head that is tied to the embedding has no mapping of its own."""
    vocab, size = PaddedVocab(shape.vocab_size), (shape.vocab_size, shape.hidden_size)
    head = "lm_head.weight"
    copies = (head,) if shape.tied_embeddings else ()  # Qwen3-0.6B on the hub stores the tied head too
    rows = [
        TensorRow("embedding.word_embeddings.weight", vocab, {"model.embed_tokens.weight": size}, copies=copies),
        TensorRow("decoder.final_layernorm.weight", Same(), {"model.norm.weight": (shape.hidden_size,)}),
    ]
    return rows if shape.tied_embeddings else [*rows, TensorRow("output_layer.weight", vocab, {head: size})]


def norm_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of the norms before attention and before the MLP."""
    size = (shape.hidden_size,)
    return [
        unconverted_layer_row(shape, "input_layernorm.weight", "input_layernorm.weight", size),
        unconverted_layer_row(shape, "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", size),
    ]


def attention_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of grouped-query attention, including QKV biases and QK
    norms if the model has them."""
    heads, groups, dim, hidden = shape.num_attention_heads, shape.num_query_groups, shape.head_dim, shape.hidden_size
    qkv, layers = InterleavedQKV(groups, heads // groups, dim), range(shape.num_layers)
    widths = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    output = (hidden, heads * dim)
    rows = [unconverted_layer_row(shape, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", output)]
    rows += [
        TensorRow(
            f"{MEGATRON}self_attention.linear_qkv.{kind}",
            qkv,
            {f"{HF}self_attn.{x}_proj.{kind}": (width, *columns) for x, width in widths.items()},
            layers=layers,
        )
        for kind, columns in ({"weight": (hidden,), "bias": ()} if shape.qkv_bias else {"weight": (hidden,)}).items()
    ]
    for x in "qk" if shape.qk_layernorm else "":
        rows.append(
            unconverted_layer_row(shape, f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight", (dim,))
        )
    return rows


def mla_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of multi-head latent attention, with a direct or a low-rank
    projection of queries."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_attention_heads
    assert latent is not None, shape.family
    rank, q_rank, queries = latent.kv_lora_rank, latent.q_lora_rank, heads * shape.head_dim
    tensors: dict[str, tuple[str, tuple[int, ...]]] = (
        {"linear_q_proj": ("q_proj", (queries, hidden))}
        if q_rank is None
        else {
            "linear_q_down_proj": ("q_a_proj", (q_rank, hidden)),
            "q_layernorm": ("q_a_layernorm", (q_rank,)),
            "linear_q_up_proj": ("q_b_proj", (queries, q_rank)),
        }
    )
    tensors |= {
        "linear_kv_down_proj": ("kv_a_proj_with_mqa", (rank + latent.qk_rope_head_dim, hidden)),
        "kv_layernorm": ("kv_a_layernorm", (rank,)),
        "linear_kv_up_proj": ("kv_b_proj", (heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank)),
        "linear_proj": ("o_proj", (hidden, heads * latent.v_head_dim)),
    }
    return [
        unconverted_layer_row(shape, f"self_attention.{name}.weight", f"self_attn.{hf}.weight", size)
        for name, (hf, size) in tensors.items()
    ]


def mlp_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of the MLPs. In an MoE model the first
    `shape.experts.num_dense_layers` layers are dense and all others have a router and experts."""
    experts, dense = shape.experts, shape.experts.num_dense_layers if shape.experts else shape.num_layers
    rows = swiglu_rows(shape, "mlp.", shape.ffn_hidden_size, range(dense))
    if experts is None:
        return rows
    layers, count = range(dense, shape.num_layers), experts.num_experts
    router = {f"{HF}mlp.gate.weight": (count, shape.hidden_size)}
    rows.append(TensorRow(f"{MEGATRON}mlp.router.weight", Same(), router, layers=layers))
    if experts.bias:
        correction = {f"{HF}mlp.gate.e_score_correction_bias": (count,)}
        rows.append(TensorRow(f"{MEGATRON}mlp.router.expert_bias", Same(), correction, layers=layers))
    rows += swiglu_rows(shape, "mlp.experts.", experts.ffn_hidden_size, layers, count)
    if experts.shared_ffn_hidden_size:
        rows += swiglu_rows(shape, "mlp.shared_experts.", experts.shared_ffn_hidden_size, layers)
    return rows


def swiglu_rows(shape: ModelShape, module: str, width: int, layers: range, num_experts: int = 0) -> list[TensorRow]:
    """Return the Megatron-to-Hugging-Face tensor mapping of a SwiGLU MLP with separate gate and up projections in
    Hugging Face; if `num_experts` is positive, of that many expert MLPs. `module` is the MLP's name prefix ("mlp.")."""
    megatron, hf = MEGATRON + module, HF + module
    if num_experts:
        megatron, hf = megatron + "local_experts.{expert}.", hf + "{expert}."
    gate_up = {f"{hf}{name}_proj.weight": (width, shape.hidden_size) for name in ("gate", "up")}
    down = {f"{hf}down_proj.weight": (shape.hidden_size, width)}
    return [
        TensorRow(f"{megatron}linear_fc1.weight", GateUp(), gate_up, layers=layers, num_experts=max(1, num_experts)),
        TensorRow(f"{megatron}linear_fc2.weight", Same(), down, layers=layers, num_experts=max(1, num_experts)),
    ]


def unconverted_layer_row(shape: ModelShape, megatron: str, hf: str, size: tuple[int, ...]) -> TensorRow:
    """Return the mapping of a tensor that every layer has and that is identical in Megatron and Hugging Face; only the
    names (without the layer prefix: `megatron`, `hf`) differ."""
    return TensorRow(MEGATRON + megatron, Same(), {HF + hf: size}, layers=range(shape.num_layers))


def renamed(rows: list[TensorRow], names: dict[str, str]) -> list[TensorRow]:
    """Return `rows` with substrings of their Hugging Face names replaced: each key of `names` by its value, in the
    order of `names`."""

    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    return [
        replace(row, hf={rename(name): size for name, size in row.hf.items()}, copies=tuple(map(rename, row.copies)))
        for row in rows
    ]
