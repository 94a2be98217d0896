"""Multi-head latent attention (DeepSeek-V2) over packed sequences: queries, keys and values are projected up from short vectors, and
only the last dimensions of a head, one key for all heads, carry the position.

Megatron-core's own module looks rotary angles up per sequence, and with its local layers cuts the down-projections over
tensor-parallel ranks, where the key that all heads share silently loses gradients (0.47 relative). Here the down-projections are
whole on every rank. Under sequence parallelism each rank projects its own tokens, and the up-projections gather the short vectors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from engines.megatron.attention import attend
from engines.megatron.norm import RMSNorm
from engines.megatron.packing import PackedStream
from engines.megatron.rotary import softmax_scale, turn
from engines.megatron.shape import ModelShape

LATENT_NORM_EPSILON = 1e-6  # Hugging Face's, whatever `rms_norm_eps` says


class LatentAttention(MegatronModule):
    """A layer's self-attention: what Megatron's layers call between two norms."""

    def __init__(self, config: Any, layer_number: int, shape: ModelShape, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config=config)
        assert shape.latent is not None
        assert config.sequence_parallel or pg_collection.tp.size() == 1  # `transformer_config` has refused it
        self.latent, self.interleaved, self.scale = shape.latent, shape.rotary.interleaved, softmax_scale(shape)
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        recomputed = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute_core, self.recompute_up = "core_attn" in recomputed, "mla_up_proj" in recomputed

        latent, hidden, heads = shape.latent, config.hidden_size, config.num_attention_heads
        if latent.q_lora_rank is None:
            self.linear_q_proj = self._column_parallel(hidden, heads * shape.head_dim)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, latent.q_lora_rank)
            self.q_layernorm = RMSNorm(config, latent.q_lora_rank, LATENT_NORM_EPSILON)
            self.linear_q_up_proj = self._column_parallel(latent.q_lora_rank, heads * shape.head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, latent.kv_lora_rank + latent.qk_rope_head_dim)
        self.kv_layernorm = RMSNorm(config, latent.kv_lora_rank, LATENT_NORM_EPSILON)
        self.linear_kv_up_proj = self._column_parallel(latent.kv_lora_rank, heads * (latent.qk_nope_head_dim + latent.v_head_dim))
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
        """Every rank has the rows of its own heads."""
        config = self.config
        return ColumnParallelLinear(
            size, out, config=config, init_method=config.init_method, bias=False, gather_output=False, tp_group=self.tensor_group
        )

    def forward(
        self,
        hidden_states: Tensor,  # [t / sequence-parallel ranks, 1, H]
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        stream = packed_seq_params
        assert isinstance(stream, PackedStream) and stream.cos_sin is not None, "this attention runs on packed sequences only"
        down_q = hidden_states if self.latent.q_lora_rank is None else self.q_layernorm(self.linear_q_down_proj(hidden_states))
        down_kv = self.linear_kv_down_proj(hidden_states)
        down_kv, position_key = down_kv.split([self.latent.kv_lora_rank, self.latent.qk_rope_head_dim], dim=-1)
        down_kv = self.kv_layernorm(down_kv)
        if self.config.sequence_parallel:  # the heads of all ranks use it: its gradients are summed over them
            position_key = gather_from_sequence_parallel_region(position_key.contiguous(), group=self.tensor_group)

        up = tensor_parallel.CheckpointWithoutOutput(fp8=None) if self.recompute_up and self.training else None
        project = self._heads(stream)
        query, key, value = (up.checkpoint if up else _call)(project, down_q, down_kv, position_key)
        attended = self._attended(query, key, value, stream)[:, None]  # [t, 1, heads * value_dim]
        if up:
            up.discard_output_and_register_recompute(attended)
        return self.linear_proj(attended)

    def _heads(self, stream: PackedStream) -> Any:
        """Queries, keys and values of this rank's heads, turned. A function, for it may run again in the backward pass."""
        latent, interleaved = self.latent, self.interleaved
        assert stream.cos_sin is not None
        cos_sin = stream.cos_sin

        def project(down_q: Tensor, down_kv: Tensor, position_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            up_q, _ = (self.linear_q_proj if latent.q_lora_rank is None else self.linear_q_up_proj)(down_q)
            up_kv, _ = self.linear_kv_up_proj(down_kv)
            nope = latent.qk_nope_head_dim
            query, position_query = up_q.view(len(up_q), -1, nope + latent.qk_rope_head_dim).split(
                [nope, latent.qk_rope_head_dim], dim=-1
            )
            key, value = up_kv.view(len(up_kv), -1, nope + latent.v_head_dim).split([nope, latent.v_head_dim], dim=-1)
            position_query = turn(position_query, cos_sin, interleaved)
            turned_key = turn(position_key, cos_sin, interleaved).expand(-1, key.shape[1], -1)  # [t, 1, rope] -> every head
            return (
                torch.cat((query, position_query), dim=-1),  # [t, heads, nope + rope]
                torch.cat((key, turned_key), dim=-1),
                value.contiguous(),  # [t, heads, value_dim]
            )

        return project

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, stream: PackedStream) -> Tensor:
        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value, stream, self.scale, self.context_group).flatten(-2)

        if self.recompute_core and self.training:
            return tensor_parallel.checkpoint(core, False, query, key, value)
        return core(query, key, value)


class ReplicatedLinear(nn.Module):
    """A projection whose weight all tensor-parallel ranks have, without a bias. Under sequence parallelism each of them sees its own
    tokens only, so the mark on the weight has its gradients summed."""

    def __init__(self, config: Any, size: int, out: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(out, size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _call(function: Any, *args: Tensor) -> Any:
    return function(*args)
