"""The critic: a policy model whose LM head is replaced by a value head, which maps each hidden state to one value.

`stages/train/algorithms` computes the value targets; `checkpoints/torch_dist.py` saves and loads the value head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engines.megatron.model.gpt import HEAD, PolicyModel

# isort: split
from megatron.core import tensor_parallel

VALUE_HEAD = "value_head.weight"  # the value head's name in a checkpoint, so that it is not confused with an LM head


class ValueModel(PolicyModel):
    """One pipeline chunk of a critic. `forward` is that of `PolicyModel`; `head` returns values instead of logits.

    The embeddings are not shared with the head, even if the policy's embeddings are tied.
    """

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
        """Return the initial weight of the value head, drawn from N(0, init_method_std^2). [1, H]

        It depends only on the seed, not on the parallel layout or the state of other random generators.
        """
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

    def _vocabulary_weights(self) -> list[Tensor]:
        return [self.embedding.word_embeddings.weight] if self.pre_process else []

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return Megatron's sharded state dict, with the value head named VALUE_HEAD; a load requires its exact
        shape."""
        state = super().sharded_state_dict(*args, **kwargs)
        if self.post_process:
            state[HEAD].key, state[HEAD].allow_shape_mismatch = VALUE_HEAD, False
        return state
