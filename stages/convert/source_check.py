"""Check a Hugging Face directory's weights against its config.json by file headers alone: seconds, whatever the model's size.

No torch here: preflight uses it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from engines.megatron.shape import ModelShape
from stages.convert.headers import block_size, stored_tensors, weight_files
from storage.errors import ModelError
from storage.layouts import layout_for
from storage.layouts.ops import Layout

SCALE = "_scale_inv"  # what a quantised weight's name gets for the name of its scales
READABLE = ("F64", "F32", "BF16", "F16")


def check_weights(directory: str | Path, shape: ModelShape) -> None:
    """Check that every tensor of the model is there with the expected shape, and that files have the length their headers say.

    Args:
        directory: Hugging Face directory.
        shape: read from its config.json.

    Raises:
        ModelError: a missing, cut or contradictory file, a tensor that is missing, unknown or of another shape, or weights that are
            quantised in a way that cannot be read.
    """
    directory = Path(directory)
    tensors = stored_tensors(directory, weight_files(directory))
    block, layout = block_size(directory), layout_for(shape)
    scales = {name for name in tensors if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors}
    check_tensors(directory, {name: tensor.shape for name, tensor in tensors.items() if name not in scales}, layout, shape)
    for name in layout.hf_names():
        dtype, path = tensors[name].place.dtype, tensors[name].place.path
        if dtype not in READABLE and not (dtype == "F8_E4M3" and block and name + SCALE in scales):
            raise ModelError(
                f"{path}: {name} is stored as {dtype}, needed {', '.join(READABLE)}, or F8_E4M3 in blocks (with {name + SCALE}, and "
                "weight_block_size in config.json): use an unquantised checkpoint"
            )


def check_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]], layout: Layout, shape: ModelShape) -> None:
    """Check names and shapes of a checkpoint's tensors.

    Args:
        directory: for messages.
        shapes: of all tensors but scales, by Hugging Face name.
        layout: of the model.
        shape: of the model.

    Raises:
        ModelError: naming the first tensor that is missing, unknown or of another shape.
    """
    needed = layout.hf_names()
    if missing := sorted(needed - shapes.keys()):
        raise ModelError(
            f"{directory} lacks {missing[0]} ({len(missing)} tensors missing) which config.json's model has: "
            "download it again, or correct config.json"
        )
    unknown = sorted(name for name in shapes.keys() - needed - layout.copies.keys() if not layout.carried(name))
    if unknown:
        raise ModelError(
            f"{directory} has {unknown[0]} ({len(unknown)} such tensors), which the {layout.shape.family} layout lacks: "
            "use a plain checkpoint of this family"
        )
    expected = expected_shapes(shape)
    for name in sorted(needed) + sorted(layout.copies.keys() & shapes.keys()):
        right = expected[layout.copies.get(name, name)]
        if shapes[name] != right:
            raise ModelError(
                f"{directory}: {name} has shape {list(shapes[name])}, config.json needs {list(right)}: correct config.json"
            )


def expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every Hugging Face tensor of a model, by name."""
    table = _shapes_by_place(shape)
    return {name: table[re.sub(r"^model\.layers\.\d+\.|(?<=experts\.)\d+\.", "", name)] for name in layout_for(shape).hf_names()}


def _shapes_by_place(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shapes by name without the numbers of layer and expert."""
    hidden, heads, dim = shape.hidden_size, shape.num_attention_heads, shape.head_dim
    queries, keys = heads * dim, shape.num_query_groups * dim
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "lm_head.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        **{f"{place}_layernorm.weight": (hidden,) for place in ("input", "post_attention", "post_self_attn", "post_mlp")},
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, heads * (shape.latent.v_head_dim if shape.latent else dim)),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        **_gated("mlp.", hidden, shape.ffn_hidden_size),
        "mlp.gate_up_proj.weight": (2 * shape.ffn_hidden_size, hidden),
    }
    if shape.latent:
        rank, q_rank, rope = shape.latent.kv_lora_rank, shape.latent.q_lora_rank or 0, shape.latent.qk_rope_head_dim
        table |= {
            "self_attn.q_a_proj.weight": (q_rank, hidden),
            "self_attn.q_a_layernorm.weight": (q_rank,),
            "self_attn.q_b_proj.weight": (queries, q_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            "self_attn.kv_a_layernorm.weight": (rank,),
            "self_attn.kv_b_proj.weight": (heads * (shape.latent.qk_nope_head_dim + shape.latent.v_head_dim), rank),
        }
    if experts := shape.experts:
        table |= _gated("mlp.experts.", hidden, experts.ffn_hidden_size)
        table |= _gated("mlp.shared_experts.", hidden, experts.shared_ffn_hidden_size)
        table |= {
            "mlp.gate.weight": (experts.num_experts, hidden),
            "mlp.gate.e_score_correction_bias": (experts.num_experts,),
        }
    return table


def _gated(place: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    up = {f"{place}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
    return {**up, f"{place}down_proj.weight": (hidden, width)}
