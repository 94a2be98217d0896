"""Multi-head latent attention (MLA, DeepSeek-V2) over packed sequences.

Queries, keys and values are projected up from low-rank (latent) vectors. RoPE is applied only to the last
`qk_rope_head_dim` dimensions of each head, for which all heads share one key.

Megatron-core's own module computes RoPE angles per sequence. With Megatron's local layers it also shards the
down-projections over tensor-parallel ranks and then silently computes wrong gradients of the shared key (relative error
0.47). Here the down-projections are replicated on every rank. Under sequence parallelism each rank applies them to its
own tokens, and the up-projections gather the low-rank vectors of all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.model.attention import causal_attention
from penstock.engines.megatron.model.norm_and_rope import RMSNorm, apply_rope, softmax_scale
from penstock.engines.megatron.packing import PackedStream

NORM_EPSILON = 1e-6  # of the norms inside MLA; Hugging Face also ignores `rms_norm_eps` there


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
        """Return a linear layer whose output rows are sharded over tensor-parallel ranks: each rank has the rows of its
        attention heads."""
        config = self.config
        return ColumnParallelLinear(
            size,
            out,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tensor_group,
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
        if self.config.sequence_parallel:  # every rank's heads use `rope_key`: the backward pass sums its gradients
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
        """Project the low-rank vectors up to queries, keys and values of this rank's heads, and apply RoPE.

        Returns:
            queries and keys, [t, heads, nope + rope], and values, [t, heads, value_dim].
        """
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
    """A linear layer without bias whose weight is replicated on all tensor-parallel ranks.

    Under sequence parallelism each rank processes only its own tokens; `weight.sequence_parallel = True` makes Megatron
    all-reduce the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, size: int, out: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(out, size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
