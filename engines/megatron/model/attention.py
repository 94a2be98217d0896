"""Causal self-attention with RoPE over packed sequences, for Megatron layers without TransformerEngine.

Megatron-core's own `DotProductAttention` supports neither packed sequences nor context parallelism, and its unfused
RoPE splits and concatenates every sequence in every layer. Here attention and RoPE process all packed tokens at once,
in `CoreAttention`, with one of the kernels of `attention_kernel.py`. Under context parallelism keys and values are
gathered over the ranks. MLA (`mla.py`) has its own projections and uses only `causal_attention`.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from penstock.engines.megatron.model.rotary import apply_rope
from penstock.engines.megatron.packing import Bucket, PackedStream


class HeadNormAttention(SelfAttention):
    """An attention layer that normalizes query and key heads together with RoPE, see `HeadNorm`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.core_attention.rotate_query = self.q_layernorm.normalize_and_rotate
        self.core_attention.rotate_key = self.k_layernorm.normalize_and_rotate


class CoreAttention(MegatronModule):
    """RoPE and causal attention: the part of a Megatron attention layer between its QKV and output projections."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.context_group = pg_collection.cp
        self.interleaved = config.rotary_interleaved
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)
        self.rotate_query = self.rotate_key = apply_rope

    def forward(
        self,
        query: Tensor,  # [t, heads, head_dim]
        key: Tensor,  # [t, groups, head_dim]
        value: Tensor,  # [t, groups, head_dim]
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
    ) -> Tensor:  # [t, heads * head_dim]
        stream = packed_seq_params
        assert isinstance(stream, PackedStream) and stream.cos_sin is not None, "attention needs packed sequences"
        query = self.rotate_query(query, stream.cos_sin, self.interleaved)
        key = self.rotate_key(key, stream.cos_sin, self.interleaved)
        return causal_attention(query, key, value, stream, self.scale, self.context_group).flatten(-2)


def causal_attention(
    query: Tensor,  # [t, heads, head_dim]
    key: Tensor,  # [t, groups, head_dim]
    value: Tensor,  # [t, groups, value_dim]
    stream: PackedStream,
    scale: float,
    context_group: dist.ProcessGroup,
) -> Tensor:  # [t, heads, value_dim]
    """Return the output of causal attention within each packed sequence, for this rank's queries.

    Under context parallelism the keys and values of all context-parallel ranks are gathered first (`stream.key_rows`).
    """
    if stream.key_rows is not None:
        key = gather_from_sequence_parallel_region(key.contiguous(), group=context_group)[stream.key_rows]
        value = gather_from_sequence_parallel_region(value.contiguous(), group=context_group)[stream.key_rows]
    if stream.kernel == "padded":
        assert stream.buckets is not None
        return bucketed_attention(query, key, value, stream.buckets, scale)
    attend = fa4_attention if stream.kernel == "fa4" else varlen_attention
    return attend(query, key, value, stream, scale)


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float) -> Tensor:
    """Return the output of causal attention, computed with one padded batch per length bucket. [t, heads, value_dim]

    Sequences are padded on the right, where the causal mask hides the padding; padded output rows are dropped.
    """
    out: Tensor | None = None
    for bucket in buckets:
        batch, num_queries, num_keys = bucket.shape
        q = _CopyRows.apply(query, bucket.query_rows, bucket.query_places, batch * num_queries)
        k = _CopyRows.apply(key, bucket.key_rows, bucket.key_places, batch * num_keys)
        v = _CopyRows.apply(value, bucket.key_rows, bucket.key_places, batch * num_keys)
        q, k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        attended = attended.transpose(1, 2).flatten(0, 1)  # [batch * num_queries, heads, value_dim]
        part = _CopyRows.apply(attended, bucket.query_places, bucket.query_rows, query.shape[0])
        out = part if out is None else out + part
    assert out is not None, "attention was called with a micro-batch without tokens"
    return out


class _CopyRows(torch.autograd.Function):
    """Computes out[places] = x[rows], with zeros in all other rows of `out` [num_places, ...].

    `rows` and `places` each have unique indices, so the gradient is the reverse copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor, num_places: int) -> Tensor:
        ctx.save_for_backward(rows, places)
        ctx.num_rows = x.shape[0]
        out = x.new_zeros(num_places, *x.shape[1:])
        out[places] = x[rows]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, places = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.num_rows, *grads[0].shape[1:])
        grad[rows] = grads[0][places]
        return grad, None, None, None


def fa4_attention(query: Tensor, key: Tensor, value: Tensor, stream: PackedStream, scale: float) -> Tensor:
    """Return the output of causal attention, computed by FlashAttention-4. [t, heads, value_dim]"""
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=stream.cu_seqlens_q,
        cu_seqlens_k=stream.cu_seqlens_kv,
        max_seqlen_q=stream.max_seqlen_q,
        max_seqlen_k=stream.max_seqlen_kv,
        softmax_scale=scale,
        causal=True,  # the last query of a sequence attends to all of its keys
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, stream: PackedStream, scale: float) -> Tensor:
    """Return the output of causal attention, computed by torch's variable-length flash attention kernel.
    [t, heads, value_dim]"""
    from torch.nn.attention.varlen import varlen_attn

    # (-1, 0): causal; the last query of a sequence attends to all of its keys
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13; 2.11 supports GQA without a flag
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    starts, longest = (stream.cu_seqlens_q, stream.cu_seqlens_kv), (stream.max_seqlen_q, stream.max_seqlen_kv)
    value_dim = value.shape[-1]
    if value_dim < query.shape[-1]:  # the kernel needs equal head dimensions
        value = F.pad(value, (0, query.shape[-1] - value_dim))
    attended = varlen_attn(query, key, value, *starts, *longest, **options)
    assert isinstance(attended, Tensor)  # varlen_attn returns a tuple only if further outputs are requested
    return attended[..., :value_dim]
