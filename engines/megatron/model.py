"""Building Megatron-core GPT models from a `ModelShape`. They give hidden states, not logits: the loss applies the head to a few
thousand tokens at a time, so that [tokens, vocabulary] never exists.

Wrapping for data parallelism and the optimizer is for `engine.py`, names and layouts of weights for `storage/layouts`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.megatron.door import open_door
from engines.megatron.parallel import ParallelLayout
from engines.megatron.shape import ModelShape

open_door()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from engines.megatron.attention import CoreAttention, cosines_and_sines  # noqa: E402
from engines.megatron.norm import RMSNorm  # noqa: E402
from engines.megatron.packing import PackedStream  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PADDED_LOGIT = -1e30  # of a padded vocabulary entry: probability 0, and finite, so that 0 * logit in an entropy is no NaN


class PolicyModel(GPTModel):
    """One pipeline chunk. `forward(stream)` gives hidden states: [t / sequence-parallel ranks, 1, H] for the next stage, and
    [t, H] on the last stage, where `head` turns rows of them into logits."""

    def __init__(self, *args: Any, shape: ModelShape, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape = shape
        padding = padded_vocab_size(shape, self.pg_collection.tp.size()) - shape.vocab_size
        self.num_padded = padding if self.pg_collection.tp.rank() == self.pg_collection.tp.size() - 1 else 0

    def forward(self, stream: PackedStream) -> Tensor:  # type: ignore[override]
        if stream.cos_sin is None:
            stream.cos_sin = cosines_and_sines(stream.positions, self.shape.head_dim, self.shape.rotary.base)
        return super().forward(stream.token_ids[None], stream.positions[None], None, packed_seq_params=stream)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # one reduction of the hidden gradient over the tensor-parallel ranks for all chunks of the head together
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Without the empty `_extra_state` objects, which are TransformerEngine's: a converted checkpoint has none."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.endswith("_extra_state")}

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Clear the vocabulary's rows that no token has: never used, but part of checkpoints and digests."""
        weights = [self.embedding.word_embeddings.weight] if self.pre_process else []
        if self.post_process and self.output_layer.weight is not None:
            weights.append(self.output_layer.weight)
        for weight in weights if self.num_padded else ():
            weight[-self.num_padded :].zero_()

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary. [n, H] -> [n, V / tensor-parallel ranks]"""
        tied = self.share_embeddings_and_output_weights
        logits = F.linear(hidden, self.shared_embedding_or_output_weight() if tied else self.output_layer.weight)
        if self.num_padded:
            hide = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] - self.num_padded
            logits = logits.masked_fill(hide, PADDED_LOGIT)
        return logits


def padded_vocab_size(shape: ModelShape, tensor: int) -> int:
    """The vocabulary, rounded up to what the tensor-parallel ranks can share."""
    return -(-shape.vocab_size // tensor) * tensor


def transformer_config(
    shape: ModelShape, layout: ParallelLayout | None = None, dtype: str = "fp32", overrides: dict[str, Any] | None = None
) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        shape: of the model.
        layout: parallel sizes.
        dtype: "fp32" or "bf16".
        overrides: the user's `megatron` options under field names; those that this configuration has are taken from it.

    Raises:
        ValueError: the shape and the layout do not fit, or an override contradicts the model.
    """
    layout = layout or ParallelLayout()
    fixed = {**_shape_fields(shape), **_layout_fields(layout, dtype)}
    return TransformerConfig(**with_overrides(TransformerConfig, _defaults(torch.cuda.is_available()), overrides or {}, fixed))


def with_overrides(
    config_class: type, defaults: dict[str, Any], overrides: dict[str, Any], fixed: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of one of Megatron's dataclasses: our defaults, what the user says of its fields, what is settled elsewhere.

    Raises:
        ValueError: the user contradicts what is settled elsewhere.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    chosen = {name: value for name, value in overrides.items() if name in known}
    for name, value in chosen.items():
        if name in fixed and value != fixed[name]:
            raise ValueError(
                f"megatron option {name} = {value!r}, but the checkpoint or Penstock's own options say {fixed[name]!r}: drop it"
            )
    return {**defaults, **chosen, **fixed}


def _shape_fields(shape: ModelShape) -> dict[str, Any]:
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_layernorm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
    )


def _layout_fields(layout: ParallelLayout, dtype: str) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bf16",
        variable_seq_lengths=layout.pipeline > 1,  # packs differ in length
        overlap_p2p_comm=layout.virtual_pipeline is not None,  # with gloo anything else is silently wrong
        batch_p2p_comm=layout.virtual_pipeline is None,
        calculate_per_token_loss=True,  # gradients are plain sums: the loss brings its own denominators
    )


def _defaults(cuda: bool) -> dict[str, Any]:
    """Choices that fit an installation without TransformerEngine and apex. A user may change them."""
    return dict(
        transformer_impl="local",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=cuda,
        bias_activation_fusion=cuda,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # the other one refuses packs of varying length, also in a dense model
        cross_entropy_loss_fusion=False,  # casts gradients to bf16 in an fp32 model
        use_cpu_initialization=not cuda,
        perform_initialization=True,  # without it weights lack the attributes that tell how they are sharded
    )


def build_model(
    shape: ModelShape, layout: ParallelLayout | None = None, dtype: str = "fp32", overrides: dict[str, Any] | None = None
) -> list[PolicyModel]:
    """This rank's chunks of the model (one, or several under virtual pipelining), with random weights."""
    config = transformer_config(shape, layout, dtype, overrides)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    chunks = [_build_chunk(shape, config, stage if len(stages) > 1 else None) for stage in stages]
    for chunk in chunks:
        chunk.zero_padding()
    return [chunk.cuda() if torch.cuda.is_available() else chunk for chunk in chunks]


def build_meta_model(shape: ModelShape) -> PolicyModel:
    """The whole model without memory, for its names, shapes and sharding (`sharded_state_dict`). Needs a world of one rank."""
    assert parallel_state.get_model_parallel_group().size() == 1, "a meta model is a whole model: it needs a world of one rank"
    config = transformer_config(shape, overrides={"use_cpu_initialization": True})
    with torch.device("meta"):
        return _build_chunk(shape, config, None)


def _build_chunk(shape: ModelShape, config: TransformerConfig, stage: int | None) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    return PolicyModel(
        config,
        _layer_specs(config, stage),
        padded_vocab_size(shape, config.tensor_model_parallel_size),
        shape.max_position_embeddings,
        pre_process=first,
        post_process=last,
        position_embedding_type="none",  # CoreAttention rotates queries and keys
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=True,
        vp_stage=stage,
        shape=shape,
    )


def _layer_specs(config: TransformerConfig, stage: int | None) -> Any:
    """Megatron's local layers with our norm and our attention in them."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
