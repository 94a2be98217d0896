"""Causal self-attention with RoPE over packed sequences, for Megatron layers without TransformerEngine.

Megatron-core's own `DotProductAttention` supports neither packed sequences nor context parallelism, and its unfused
RoPE splits and concatenates every sequence in every layer. Here attention and RoPE process all packed tokens at once,
in `CoreAttention`, with the kernel that `transformer_config.py` chooses.

Under context parallelism each rank has a part of the tokens. Two all-to-all exchanges, as in DeepSpeed-Ulysses
(arXiv:2309.14509), give each rank all tokens of a part of the heads, and return the outputs (design note 0022). One
half of a rank's heads is exchanged while the other half is computed.

Multi-head latent attention (MLA, DeepSeek-V2): queries, keys and values are projected up from low-rank (latent)
vectors. RoPE is applied only to the last `qk_rope_head_dim` dimensions of each head, for which all heads share one key.
Megatron-core's own module computes RoPE angles per sequence. With Megatron's local layers it also shards the
down-projections over tensor-parallel ranks and then silently computes wrong gradients of the shared key (relative error
0.47). Here the down-projections are replicated on every rank. Under sequence parallelism each rank applies them to its
own tokens, and the up-projections gather the low-rank vectors of all ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.model.norm_and_rope import RMSNorm, apply_rope, softmax_scale
from penstock.engines.megatron.packing import Bucket, PackedStream, Segments

NORM_EPSILON = 1e-6  # for the norms inside MLA, where Hugging Face also ignores `rms_norm_eps`


class HeadNormAttention(SelfAttention):
    """An attention layer that normalizes query and key heads and applies RoPE in one kernel (`HeadNorm`)."""

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
    """Return the output of causal attention within each packed sequence, for this rank's tokens and heads.

    Under context parallelism every rank of the group exchanges its t tokens of all heads for all T tokens of an equal
    number of heads, and sends the outputs back. If the number of heads is even, it exchanges one half at a time.
    """
    ranks = context_group.size()
    if ranks == 1:
        return packed_attention(query, key, value, stream, scale)

    def exchange(*heads: Tensor) -> Tensor:  # [t, ranks, heads, dim] each -> [T, sum of heads * dim]
        sent = torch.cat([x.flatten(2).transpose(0, 1) for x in heads], dim=-1)  # [ranks, t, ...]
        return all_to_all(context_group, sent).flatten(0, 1)

    def send_back(out: Tensor) -> Tensor:  # [T, heads, value_dim] -> [t, ranks, heads, value_dim]
        return all_to_all(context_group, out.unflatten(0, (ranks, -1))).transpose(0, 1)

    heads = [x.unflatten(1, (ranks, -1)) for x in divide_heads(query, key, value, ranks)]  # [t, ranks, heads, dim]
    num_parts = 2 if heads[1].shape[2] % 2 == 0 else 1
    received = [start_on_side_stream(exchange, *part) for part in zip(*(x.chunk(num_parts, dim=2) for x in heads))]
    returned = []
    for wait in received:
        parts = wait().split([x.shape[2] // num_parts * x.shape[3] for x in heads], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, x.shape[3])) for part, x in zip(parts, heads))
        returned.append(start_on_side_stream(send_back, packed_attention(q, k, v, stream, scale)))
    return torch.cat([wait() for wait in returned], dim=2).flatten(1, 2)[:, : query.shape[1]]


def divide_heads(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads that `ranks` ranks can share equally, each with the keys and values of its query heads: key heads
    are repeated where several ranks need them, and heads of zeros are added."""
    heads, groups = query.shape[1], key.shape[1]
    copies = math.lcm(groups, ranks) // groups
    if heads % (groups * copies):
        copies = heads // groups
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    if missing := -heads % ranks:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    return query, key, value


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, stream: PackedStream | Segments, scale: float, causal: bool = True
) -> Tensor:
    """Return the output of attention for all tokens of the padded micro-batch. Only causal attention can have sequences
    of different lengths in a bucket, or the kernel "fa4" (FlashAttention-4). [T, heads, value_dim]"""
    if stream.kernel == "padded":
        assert stream.buckets is not None
        return bucketed_attention(query, key, value, stream.buckets, scale, causal)
    if stream.kernel == "torch":
        return varlen_attention(query, key, value, stream, scale, causal)
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=stream.cu_seqlens,
        cu_seqlens_k=stream.cu_seqlens,
        max_seqlen_q=stream.max_seqlen,
        max_seqlen_k=stream.max_seqlen,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]


def bucketed_attention(
    query: Tensor, key: Tensor, value: Tensor, buckets: list[Bucket], scale: float, causal: bool = True
) -> Tensor:
    """Return the output of attention, computed with one padded batch per length bucket. [t, heads, value_dim]

    Sequences are padded on the right, where the causal mask hides the padding; padded output rows are dropped.
    """
    out: Tensor | None = None
    for bucket in buckets:
        num_places = bucket.num_sequences * bucket.max_seqlen
        q, k, v = (_CopyRows.apply(x, bucket.rows, bucket.places, num_places) for x in (query, key, value))
        q, k, v = (x.view(bucket.num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended = attended.transpose(1, 2).flatten(0, 1)  # [num_places, heads, value_dim]
        part = _CopyRows.apply(attended, bucket.places, bucket.rows, query.shape[0])
        out = part if out is None else out + part
    assert out is not None, "attention was called with a micro-batch without tokens"
    return out


class _CopyRows(torch.autograd.Function):
    """Return `out` [num_places, ...] with out[places] = x[rows] and zeros in all other rows. No index occurs twice in
    `rows` or in `places`, so the backward pass copies the rows back."""

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


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, stream: PackedStream | Segments, scale: float, causal: bool
) -> Tensor:
    """Return the output of torch's variable-length flash attention kernel. [t, heads, value_dim]"""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.13; 2.11 supports GQA without a flag
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    starts, longest = (stream.cu_seqlens, stream.cu_seqlens), (stream.max_seqlen, stream.max_seqlen)
    value_dim = value.shape[-1]
    if value_dim < query.shape[-1]:  # the kernel needs equal head dimensions
        value = F.pad(value, (0, query.shape[-1] - value_dim))
    attended = varlen_attn(query, key, value, *starts, *longest, **options)
    assert isinstance(attended, Tensor)  # varlen_attn returns a tuple only if further outputs are requested
    return attended[..., :value_dim]


side_stream = cache(torch.cuda.Stream)  # of a device: there is only one, so exchanges run in the order of their starts


def start_on_side_stream(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """Start `function(*inputs)` on the device's side stream, after the work already queued on the current stream; on a
    CPU call it at once. The returned callable makes the current stream wait for the result and returns it. autograd
    runs the backward pass of the function on the same stream, and waits where gradients cross streams."""
    if not inputs[0].is_cuda:
        out = function(*inputs)
        return lambda: out
    side, current = side_stream(inputs[0].device), torch.cuda.current_stream()
    side.wait_stream(current)
    for x in inputs:
        x.record_stream(side)  # its memory must not be reused before this stream has read it
    with torch.cuda.stream(side):
        out = function(*inputs)
        done = side.record_event()

    def wait() -> Tensor:
        current.wait_event(done)
        out.record_stream(current)
        return out

    return wait


class MLASelfAttention(MegatronModule):
    """Multi-head latent attention of one layer: down- and up-projections, RoPE, attention and output projection."""

    def __init__(self, config: Any, layer_number: int, shape: ModelShape, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        assert shape.latent is not None
        assert config.sequence_parallel or pg_collection.tp.size() == 1  # `transformer_config` checks it
        self.latent, self.interleaved, self.scale = shape.latent, shape.rotary.interleaved, softmax_scale(shape)
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_core, self.recompute_up = "core_attn" in recomputed, "mla_up_proj" in recomputed

        latent, hidden, heads = shape.latent, config.hidden_size, config.num_attention_heads
        if latent.q_lora_rank is None:
            self.linear_q_proj = self._column_parallel(hidden, heads * shape.head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.q_lora_rank)
            self.q_layernorm = RMSNorm(config, latent.q_lora_rank, NORM_EPSILON)
            self.linear_q_up_proj = self._column_parallel(latent.q_lora_rank, heads * shape.head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.kv_lora_rank + latent.qk_rope_head_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_lora_rank, NORM_EPSILON)
        self.linear_kv_up_proj = self._column_parallel(
            latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        )
        self.linear_proj = RowParallelLinear(
            heads * latent.v_head_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tensor_group,
        )

    def _column_parallel(self, size: int, out: int) -> ColumnParallelLinear:
        """Return a linear layer of which each tensor-parallel rank has the output rows of its attention heads."""
        config, init = self.config, self.config.init_method
        return ColumnParallelLinear(
            size, out, config=config, init_method=init, bias=False, gather_output=False, tp_group=self.tensor_group
        )

    def forward(
        self,
        hidden_states: Tensor,  # [t / sequence-parallel ranks, 1, H]
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        stream = packed_seq_params
        assert isinstance(stream, PackedStream) and stream.cos_sin is not None, "attention needs packed sequences"
        down_q = hidden_states
        if self.latent.q_lora_rank is not None:
            down_q = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        down_kv = self.linear_kv_down_proj(hidden_states)
        down_kv, rope_key = down_kv.split([self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], dim=-1)
        down_kv = self.kv_layernorm(down_kv)
        if self.config.sequence_parallel:  # all ranks' heads use `rope_key`, so the backward pass sums its gradients
            rope_key = gather_from_sequence_parallel_region(rope_key.contiguous(), group=self.tensor_group)

        project, inputs = partial(self._up_project, stream.cos_sin), (down_q, down_kv, rope_key)
        recompute = tensor_parallel.CheckpointWithoutOutput(fp8=None) if self.recompute_up and self.training else None
        query, key, value = recompute.checkpoint(project, *inputs) if recompute else project(*inputs)
        core = partial(causal_attention, stream=stream, scale=self.scale, context_group=self.context_group)
        if self.recompute_core and self.training:
            attended = tensor_parallel.checkpoint(core, False, query, key, value)
        else:
            attended = core(query, key, value)
        attended = attended.flatten(-2)[:, None]  # [t, 1, heads * value_dim]
        if recompute:
            recompute.discard_output_and_register_recompute(attended)
        return self.linear_proj(attended)

    def _up_project(
        self, cos_sin: tuple[Tensor, Tensor], down_q: Tensor, down_kv: Tensor, rope_key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the low-rank vectors up to queries and keys, [t, heads, nope + rope], and values, [t, heads,
        value_dim], of this rank's heads, and apply RoPE."""
        latent = self.latent
        up_q, _ = (self.linear_q_proj if latent.q_lora_rank is None else self.linear_q_up_proj)(down_q)
        up_kv, _ = self.linear_kv_up_proj(down_kv)
        nope, rope = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        query, rope_query = up_q.view(len(up_q), -1, nope + rope).split([nope, rope], dim=-1)
        key, value = up_kv.view(len(up_kv), -1, nope + latent.v_head_dim).split([nope, latent.v_head_dim], dim=-1)
        rope_query = apply_rope(rope_query, cos_sin, self.interleaved)
        # [t, 1, rope] -> [t, heads, rope]
        rope_key = apply_rope(rope_key, cos_sin, self.interleaved).expand(-1, key.shape[1], -1)
        query, key = torch.cat((query, rope_query), dim=-1), torch.cat((key, rope_key), dim=-1)
        return query, key, value.contiguous()


class ReplicatedLinear(nn.Module):
    """A linear layer without bias whose weight is replicated on all tensor-parallel ranks. Under sequence parallelism
    each rank processes only its own tokens; `weight.sequence_parallel = True` makes Megatron all-reduce the weight's
    gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, size: int, out: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(out, size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
