"""Building Megatron-core GPT models from a `ModelShape`. They give hidden states, not logits: the loss applies the head to a few
thousand tokens at a time, so that [tokens, vocabulary] never exists.

Megatron's configuration of it is made by `transformer_config.py`, its layers by `layers.py`; wrapping for data parallelism and the optimizer is
for `engine.py`, names and layouts of weights for `storage/layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.megatron.parallel import ParallelLayout
from engines.megatron.shape import ModelShape
from engines.megatron.transformer_config import TransformerConfig, transformer_config

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel

from engines.megatron.layers import block_spec
from engines.megatron.packing import PackedStream
from engines.megatron.rotary import cosines_and_sines, rotary_width

PADDED_LOGIT = -1e30  # of a padded vocabulary entry: probability 0, and finite, so that 0 * logit in an entropy is no NaN
HEAD = "output_layer.weight"  # Megatron's name for it in a chunk


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
            stream.cos_sin = cosines_and_sines(stream.positions, rotary_width(self.shape), self.shape.rotary)
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
        for weight in self._vocabulary_weights() if self.num_padded else ():
            weight[-self.num_padded :].zero_()

    def _vocabulary_weights(self) -> list[Tensor]:
        weights = [self.embedding.word_embeddings.weight] if self.pre_process else []
        return weights + ([self.output_layer.weight] if self.post_process and self.output_layer.weight is not None else [])

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


def build_model(
    shape: ModelShape,
    layout: ParallelLayout | None = None,
    dtype: str = "fp32",
    overrides: dict[str, Any] | None = None,
    make: Callable[..., PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """This rank's chunks of the model (one, or several under virtual pipelining), with random weights. `make` makes one of them."""
    config = transformer_config(shape, layout, dtype, overrides)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    chunks = [_build_chunk(shape, config, stage if len(stages) > 1 else None, make) for stage in stages]
    for chunk in chunks:
        chunk.zero_padding()
    return [chunk.cuda() if torch.cuda.is_available() else chunk for chunk in chunks]


def build_meta_model(shape: ModelShape) -> PolicyModel:
    """The whole model without memory, for its names, shapes and sharding (`sharded_state_dict`). Needs a world of one rank."""
    assert parallel_state.get_model_parallel_group().size() == 1, "a meta model is a whole model: it needs a world of one rank"
    uninitialized = dict(init_method=_keep, output_layer_init_method=_keep)  # 30,000 draws of nothing for DeepSeek-V3
    config = transformer_config(shape, overrides={"use_cpu_initialization": True, **uninitialized})
    with torch.device("meta"):
        return _build_chunk(shape, config, None)


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _build_chunk(
    shape: ModelShape, config: TransformerConfig, stage: int | None, make: Callable[..., PolicyModel] = PolicyModel
) -> PolicyModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    chunk = make(
        config,
        block_spec(shape, config, stage),
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
    for name, param in chunk.named_parameters():
        if is_expert(name):
            param.allreduce = False
    return chunk


def is_expert(name: str) -> bool:
    """Parameters of routed experts. They are shared among other ranks than the rest, so Megatron reduces and steps them apart. It marks
    them under expert parallelism only: with another tensor parallelism than the rest's, gradients would be wrong, silently, and a
    checkpoint's optimizer would not load where the mark differs."""
    return ".local_experts." in name
