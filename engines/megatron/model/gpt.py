"""Build Megatron-core GPT models from a `ModelShape`.

The models return hidden states instead of logits: the loss applies the LM head to a few thousand tokens at a time, so
that the logits of all tokens, [tokens, vocabulary], are never materialized.

`transformer_config.py` builds Megatron's configuration and `layers.py` the layers; `engine.py` adds data parallelism
and the optimizer; `engines/families` maps names and shapes of weights to Hugging Face's. The critic (`ValueModel`) is a
policy model whose LM head is replaced by a value head, which maps each hidden state to one value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import HEAD
from penstock.engines.megatron.model.transformer_config import TransformerConfig, transformer_config
from penstock.engines.parallel_layout import ParallelLayout

# isort: split
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel

from penstock.engines.megatron.model.layers import transformer_block_spec
from penstock.engines.megatron.model.norm_and_rope import rope_cos_sin, rope_dim
from penstock.engines.megatron.model.vision import VisionTower, insert_images
from penstock.engines.megatron.packing import PackedStream

# Logit of padded vocabulary entries. Their probability is 0; a finite value avoids the NaN of 0 * -inf in an entropy.
PADDED_LOGIT = -1e30


class PolicyModel(GPTModel):
    """One pipeline chunk (the layers of one pipeline stage) of a policy model.

    `forward(stream)` returns hidden states: [t / sequence-parallel ranks, 1, H] for the next pipeline stage; [t, H] on
    the last stage, where `head` maps any rows of them to logits.
    """

    fp32_head = False  # --fp32-lm-head: compute logits in fp32, also for a model in bf16
    has_lm_head = True  # whether the head has one row per vocabulary entry

    def __init__(self, *args: Any, shape: ModelShape, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape = shape
        self.adapters: Any = nn.ModuleList()  # LoRA adapters of this chunk, see `lora_layers.py`
        is_last = self.pg_collection.tp.rank() == self.pg_collection.tp.size() - 1
        self.num_padded = self.vocab_size - shape.vocab_size if is_last else 0  # rows of the vocabulary's padding
        self.vision = VisionTower(shape.vision, self.config) if shape.vision and self.pre_process else None

    def forward(self, stream: PackedStream) -> Tensor:  # type: ignore[override]
        if stream.cos_sin is None:
            stream.cos_sin = rope_cos_sin(stream.positions, rope_dim(self.shape), self.shape.rotary)
        token_ids, positions, embedded = stream.token_ids[None], stream.positions[None], None
        if self.vision is not None:
            embedded = self.embedding(input_ids=token_ids, position_ids=positions)
            embedded = insert_images(embedded, self.vision, stream)
        return super().forward(token_ids, positions, None, embedded, packed_seq_params=stream)

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # The backward pass of this operation all-reduces the hidden states' gradient over tensor-parallel ranks: once,
        # not in every call of `head`.
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        return hidden_states[:, 0]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's sharded state dict without adapters, which `lora_layers.py` saves, and without the empty
        `_extra_state` entries of TransformerEngine, which converted checkpoints do not have."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {
            key: value
            for key, value in state.items()
            if not key.endswith("_extra_state") and not key.startswith("adapters.")
        }

    @torch.no_grad()
    def zero_vocab_padding(self) -> None:
        """Set the vocabulary's padding rows in embedding and LM head to zero. Nothing uses these rows, but they are in
        checkpoints and weight digests, which must be reproducible."""
        if self.num_padded and self.pre_process:
            self.embedding.word_embeddings.weight[-self.num_padded :].zero_()
        if self.num_padded and self.post_process and self.has_lm_head and self.output_layer.weight is not None:
            self.output_layer.weight[-self.num_padded :].zero_()

    @property
    def head_weight(self) -> Tensor:
        """The rows of this rank's vocabulary shard in the LM head. [V / tensor-parallel ranks, H]"""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's vocabulary shard for n hidden states. [n, H] -> [n, V / tensor-parallel
        ranks]"""
        return self.logits(hidden, self.head_weight)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return what `head` does, with `weight` in place of `head_weight`."""
        logits = _Fp32Linear.apply(hidden, weight) if self.fp32_head else F.linear(hidden, weight)
        if self.num_padded:
            padded = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] - self.num_padded
            logits = logits.masked_fill(padded, PADDED_LOGIT)
        return logits


class _Fp32Linear(torch.autograd.Function):
    """`F.linear` whose result is in fp32 for inputs in bf16. The gradient is rounded to bf16 before it is multiplied,
    as without this function: fp32 matrix products take about ten times as long on a GPU."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # [n, H], [V, H] -> [n, V]
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda and hidden.dtype != torch.float32 and len(hidden):  # makes no copy of the weight in fp32
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_hidden else None, grad.t() @ hidden if needs_weight else None


def build_model(
    shape: ModelShape,
    layout: ParallelLayout | None = None,
    dtype: str = "fp32",
    overrides: dict[str, Any] | None = None,
    chunk_class: Callable[..., PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """Return the pipeline chunks of the model that this rank has, with random weights: one chunk, or several with
    virtual pipeline parallelism (interleaved schedule)."""
    config = transformer_config(shape, layout, dtype, overrides)
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    chunks = [_build_chunk(shape, config, stage if len(stages) > 1 else None, chunk_class) for stage in stages]
    for chunk in chunks:
        chunk.zero_vocab_padding()
    return [chunk.cuda() if torch.cuda.is_available() else chunk for chunk in chunks]


def build_meta_model(shape: ModelShape) -> PolicyModel:
    """Return the whole model on torch's meta device (without data), to read names, shapes and sharding of its weights
    with `sharded_state_dict`. Needs a world size of 1."""
    assert parallel_state.get_model_parallel_group().size() == 1, "build_meta_model needs a world size of 1"
    # Random initialization of DeepSeek-V3 would take 30,000 calls of the generator.
    no_init = dict.fromkeys(("init_method", "output_layer_init_method"), lambda tensor: tensor)
    config = transformer_config(shape, overrides={"use_cpu_initialization": True, **no_init})
    with torch.device("meta"):
        return _build_chunk(shape, config, None)


def _build_chunk(
    shape: ModelShape,
    config: TransformerConfig,
    stage: int | None,
    chunk_class: Callable[..., PolicyModel] = PolicyModel,
) -> PolicyModel:
    """Return one pipeline chunk. `stage`: index of the chunk under virtual pipeline parallelism, otherwise None."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    tensor = config.tensor_model_parallel_size
    chunk = chunk_class(
        config,
        transformer_block_spec(shape, config, stage),
        -(-shape.vocab_size // tensor) * tensor,  # every rank gets equally many rows of the vocabulary
        shape.max_position_embeddings,
        pre_process=first,
        post_process=last,
        position_embedding_type="none",  # CoreAttention applies RoPE
        share_embeddings_and_output_weights=shape.tied_embeddings,
        parallel_output=True,
        vp_stage=stage,
        shape=shape,
    )
    for name, param in chunk.named_parameters():
        if is_routed_expert_parameter(name):
            param.allreduce = False
    return chunk


def is_routed_expert_parameter(name: str) -> bool:
    """Return whether the parameter of this name belongs to a routed expert.

    Experts are sharded over other process groups than dense weights, so Megatron must reduce their gradients and update
    them separately. Megatron sets `param.allreduce = False` for that only under expert parallelism. Penstock sets it
    for every expert parameter: otherwise gradients are silently wrong if the experts have another tensor-parallel size
    than dense weights, and an optimizer checkpoint cannot be loaded with parallel sizes for which the attribute
    differs.
    """
    return ".mlp.experts." in name


VALUE_HEAD = "value_head.weight"  # name of the value head in a checkpoint, where an LM head has the name HEAD


class ValueModel(PolicyModel):
    """One pipeline chunk of a critic. `forward` is inherited from `PolicyModel`; `head` returns values, not logits. The
    embeddings are not shared with the head, even if the policy's embeddings are tied."""

    has_lm_head = False

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        self.seed = seed
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})

    def setup_embeddings_and_output_layer(self) -> None:
        """Replace Megatron's output layer, which has one row per vocabulary entry, by the value head with one row."""
        if self.post_process:
            self.output_layer = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
            self.output_layer.weight.data.copy_(self.initial_head())
        super().setup_embeddings_and_output_layer()

    def initial_head(self) -> Tensor:
        """Return the initial weight of the value head, drawn from N(0, init_method_std^2). It depends only on the seed,
        not on the parallel layout or the state of other random generators. [1, H]"""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(1, self.config.hidden_size, generator=generator, device="cpu") * self.config.init_method_std

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return the hidden states for the value head, [t, H], on the last pipeline stage.

        The value head is replicated, so every tensor-parallel rank computes the full gradient of the hidden states, and
        the backward pass splits the gradient over the ranks. (In a policy each rank has a vocabulary shard, and the
        backward pass sums the ranks' gradients.)
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states[:, 0]

    def head(self, hidden: Tensor) -> Tensor:
        """Return the values of hidden states, in float32 for every dtype of the model. [n, H] -> [n, 1]"""
        return F.linear(hidden.float(), self.output_layer.weight.float())

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's sharded state dict, with the value head named VALUE_HEAD and its exact shape."""
        state = super().sharded_state_dict(*args, **kwargs)
        if self.post_process:
            state[HEAD].key, state[HEAD].allow_shape_mismatch = VALUE_HEAD, False
        return state
