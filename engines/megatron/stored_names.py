"""Names of a checkpoint's tensors under Megatron's local modules and under TransformerEngine's, and the empty objects beside them.

TransformerEngine fuses a norm with the projection that follows it, so the norm's weight belongs to the projection. Megatron's local layers
are stored under those names too, except for latent attention and, the other way round, for the norm before a mixture of experts.
Read from megatron-core 0.16.1: models/gpt/gpt_layer_specs.py, models/gpt/moe_module_specs.py, transformer/moe/experts.py,
transformer/multi_latent_attention.py, extensions/transformer_engine.py.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from engines.megatron.shape import ModelShape

if TYPE_CHECKING:
    from engines.megatron.stored import StoredModel, StoredPiece

MegatronNames = Literal["local", "te"]
LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")  # without a number: all layers stacked in one tensor
PRE_MLP_NORM, FUSED_PRE_MLP_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
LINEAR = re.compile(r"\.linear_\w+\.weight$")


def te_key(shape: ModelShape, key: str) -> str:
    """Return TransformerEngine's key of a tensor that Megatron's local layers store under `key`."""
    match = LAYER.match(key)
    if match is None:
        return key
    layer, name = match.groups()
    if shape.latent and name in LATENT_NORMS:
        return key.removesuffix(name) + LATENT_NORMS[name]
    if name not in (PRE_MLP_NORM, FUSED_PRE_MLP_NORM):
        return key
    mixture = shape.experts is not None and (layer is None or int(layer) >= shape.experts.num_dense_layers)
    return key.removesuffix(name) + (PRE_MLP_NORM if mixture else FUSED_PRE_MLP_NORM)


def renamed(stored: StoredModel, names: MegatronNames) -> StoredModel:
    """Return the layout of a checkpoint with these names; `stored` has the local ones."""
    if names == "local":
        return stored
    pieces = {name: [replace(piece, key=stored.te_keys[piece.key]) for piece in own] for name, own in stored.pieces.items()}
    return replace(stored, pieces=pieces)


def extra_states(stored: StoredModel, names: MegatronNames) -> list[str]:
    """Return the keys of the empty objects that Megatron's loader expects beside the tensors: one for each module that might keep a state.

    Args:
        stored: with the given names.
        names: local modules need one for every projection. TransformerEngine's have one for norms and for the attention too, depending on
            its version: all are listed, since a loader ignores those that it does not ask for.
    """
    keys = []
    for piece in (piece for pieces in stored.pieces.values() for piece in pieces):
        modules = []
        if LINEAR.search(piece.key) or (names == "te" and piece.key.endswith("layernorm.weight")):
            modules.append(piece.key.removesuffix(".weight"))
        if names == "te" and piece.key.endswith("self_attention.linear_proj.weight"):
            modules.append(piece.key.replace("linear_proj.weight", "core_attention"))
        stacked = len(piece.sizes) - len(piece.part)
        offset, shape = piece.offset[:stacked] or (0,), piece.stored_shape[:stacked] or (1,)
        place = f"{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
        keys += [f"{module}._extra_state/shard_{place}" for module in modules]
    return sorted(set(keys))


def found_in(stored: StoredModel, keys: Container[str]) -> StoredModel:
    """Return the layout with the names that a checkpoint has: local or TransformerEngine's, layers stacked or one by one.

    Args:
        stored: a layout; pieces that the checkpoint has under no name stay as they are.
        keys: of the checkpoint's tensors.
    """
    local_keys = {te: local for local, te in stored.te_keys.items()}

    def found(piece: StoredPiece) -> StoredPiece:
        for key in (piece.key, stored.te_keys.get(piece.key), local_keys.get(piece.key)):
            if key is not None:
                named = replace(piece, key=key)
                for candidate in (named, _restacked(named, stored.num_layers)):
                    if candidate.key in keys:
                        return candidate
        return piece

    return replace(stored, pieces={name: [found(piece) for piece in pieces] for name, pieces in stored.pieces.items()})


def _restacked(piece: StoredPiece, num_layers: int) -> StoredPiece:
    """The piece in a checkpoint that stacks layers, if its own does not, or the other way round."""
    match = LAYER.match(piece.key)
    if match is None:
        return piece
    layer, name = match.groups()
    if layer is None:
        return replace(
            piece,
            key=f"decoder.layers.{piece.offset[0]}.{name}",
            offset=piece.offset[1:],
            sizes=piece.sizes[1:],
            stored_shape=piece.stored_shape[1:],
        )
    return replace(
        piece,
        key=f"decoder.layers.{name}",
        offset=(int(layer), *piece.offset),
        sizes=(1, *piece.sizes),
        stored_shape=(num_layers, *piece.stored_shape),
    )
