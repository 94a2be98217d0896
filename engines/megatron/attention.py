"""Causal self-attention over packed sequences for Megatron layers when TransformerEngine is absent, rotary embedding included.

Megatron-core's own `DotProductAttention` refuses packs and context parallelism, and its unfused rotary embedding for packs cuts
and joins every sequence in every layer. Here both work on the whole stream. In bf16 on CUDA the kernel is torch's own
variable-length flash attention; otherwise sequences of similar length are padded into batches for `scaled_dot_product_attention`.
Under context parallelism keys and values are gathered over the ranks. Latent attention (`latent.py`) has projections of its own
and comes here for `attend` only.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from engines.megatron.packing import Bucket, PackedStream
from engines.megatron.rotary import turn


class CoreAttention(MegatronModule):
    """What Megatron calls between the QKV and the output projection."""

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
        assert isinstance(stream, PackedStream) and stream.cos_sin is not None, "this attention runs on packed sequences only"
        query, key = turn(query, stream.cos_sin, self.interleaved), turn(key, stream.cos_sin, self.interleaved)
        return attend(query, key, value, stream, self.scale, self.context_group).flatten(-2)


def attend(
    query: Tensor,  # [t, heads, head_dim]
    key: Tensor,  # [t, groups, head_dim]
    value: Tensor,  # [t, groups, value_dim]
    stream: PackedStream,
    scale: float,
    context_group: dist.ProcessGroup,
) -> Tensor:  # [t, heads, value_dim]
    """Every token attends to the tokens before it in its own sequence, wherever on the context-parallel ranks they are."""
    if stream.key_rows is not None:
        key = gather_from_sequence_parallel_region(key.contiguous(), group=context_group)[stream.key_rows]
        value = gather_from_sequence_parallel_region(value.contiguous(), group=context_group)[stream.key_rows]
    if stream.buckets is not None:
        return bucketed_attention(query, key, value, stream.buckets, scale)
    return _varlen_attention(query, key, value, stream, scale)


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float) -> Tensor:
    """Attention over padded batches. Padding stands right of every sequence, where a causal mask hides it; its rows go."""
    out: Tensor | None = None
    for bucket in buckets:
        batch, num_queries, num_keys = bucket.shape
        q = _Spread.apply(query, bucket.query_rows, bucket.query_places, batch * num_queries)
        k = _Spread.apply(key, bucket.key_rows, bucket.key_places, batch * num_keys)
        v = _Spread.apply(value, bucket.key_rows, bucket.key_places, batch * num_keys)
        q, k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended = attended.transpose(1, 2).flatten(0, 1)  # [batch * num_queries, heads, value_dim]
        part = _Spread.apply(attended, bucket.query_places, bucket.query_rows, query.shape[0])
        out = part if out is None else out + part
    assert out is not None, "an empty pack"
    return out


class _Spread(torch.autograd.Function):
    """out[places] = x[rows], zeros elsewhere. No row and no place occurs twice, so the gradient is the same copy backwards."""

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


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, stream: PackedStream, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # the last query sees the last key
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13; 2.11 groups the heads without being asked
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    starts, longest = (stream.cu_seqlens_q, stream.cu_seqlens_kv), (stream.max_seqlen_q, stream.max_seqlen_kv)
    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernel knows one width of heads
        value = F.pad(value, (0, query.shape[-1] - width))
    attended = varlen_attn(query, key, value, *starts, *longest, **options)
    assert isinstance(attended, Tensor)  # a tuple only for those who ask for more
    return attended[..., :width]
