"""Estimate the GPU memory of an engine: weights and KV cache. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines.families import count_rank_parameters
from penstock.engines.families.shape import ModelShape


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of an engine, in bytes."""

    weight_bytes: int
    static_bytes: int  # for weights and KV cache together
    bytes_per_token: int  # KV cache of one token
    share_flag: str = ""  # sets `static_bytes`, as a share of the GPU

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes left for the KV cache; 0 if the weights need all of `static_bytes`."""
        return max(0, self.static_bytes - self.weight_bytes)

    @property
    def num_kv_cache_tokens(self) -> int:
        """Number of tokens that fit in the KV cache."""
        return self.kv_cache_bytes // self.bytes_per_token


def estimate_engine_memory(
    shape: ModelShape,
    gpus_per_engine: int,
    static_bytes: int,
    *,
    bytes_per_weight: float = 2,
    bytes_per_kv_element: int = 2,
    num_draft_layers: int = 0,
    share_flag: str = "",
) -> EngineMemory:
    """Estimate the memory for weights and KV cache on one GPU of an engine.

    Args:
        shape: shape of the model.
        gpus_per_engine: tensor-parallel size of the engine. KV heads are replicated if there are fewer of them than
            GPUs; with multi-head latent attention (MLA) every GPU has the latent KV vectors of all tokens.
        static_bytes: bytes of the GPU for weights and KV cache together.
        bytes_per_weight: bytes of a weight; the mean if some weights are quantized.
        bytes_per_kv_element: bytes of an element of the KV cache.
        num_draft_layers: multi-token prediction layers used for speculative decoding. Each has the size of the model's
            last layer and a replicated projection [hidden, 2 * hidden]; embedding and LM head are the model's.
        share_flag: see `EngineMemory`.
    """
    parameters = count_rank_parameters(shape, range(shape.num_layers), tensor=gpus_per_engine).total
    draft = count_rank_parameters(shape, [shape.num_layers - 1], tensor=gpus_per_engine, outer=()).total
    parameters += num_draft_layers * (draft + 2 * shape.hidden_size**2)
    num_layers = shape.num_layers + num_draft_layers
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        heads = max(1, shape.num_query_groups // gpus_per_engine)
        width = 2 * heads * shape.head_dim
        replicated = heads - shape.num_query_groups / gpus_per_engine
        parameters += round(2 * replicated * shape.head_dim * shape.hidden_size * num_layers)
    bytes_per_token = bytes_per_kv_element * width * num_layers
    return EngineMemory(round(bytes_per_weight * parameters), static_bytes, bytes_per_token, share_flag)
