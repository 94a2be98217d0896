"""The critic's model: a policy's trunk under a head of one row, so that every hidden state gets one number.

What values are learned from is for `stages/train/algorithms`; how the head is stored and found again is `checkpoint.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.megatron.model import HEAD, PolicyModel

# isort: split
from megatron.core import tensor_parallel

VALUE_HEAD = "value_head.weight"  # its name in a checkpoint: never taken for a vocabulary's head, or the other way round


class ValueModel(PolicyModel):
    """One pipeline chunk. `forward` is the policy's; `head` gives values. Embeddings are never tied: the head is a matrix of its own."""

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        self.seed = seed
        super().__init__(*args, **kwargs | {"share_embeddings_and_output_weights": False})

    def setup_embeddings_and_output_layer(self) -> None:
        """Put the head in the place of Megatron's, which has a row per token."""
        if self.post_process:
            self.output_layer = nn.Linear(self.config.hidden_size, 1, bias=False, dtype=self.config.params_dtype)
            self.output_layer.weight.data.copy_(self.initial_head())
        super().setup_embeddings_and_output_layer()

    def initial_head(self) -> Tensor:
        """[1, H] from N(0, init_method_std), by the seed alone: the same under every layout, after whatever else was drawn."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(1, self.config.hidden_size, generator=generator, device="cpu") * self.config.init_method_std

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Every tensor-parallel rank has the whole head, so each finds the whole gradient of the hidden states: it is shared out,
        where a policy's (of a part of the vocabulary) is summed."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states[:, 0]

    def head(self, hidden: Tensor) -> Tensor:
        """Values, in float32 whatever the model computes in. [n, H] -> [n, 1]"""
        return F.linear(hidden.float(), self.output_layer.weight.float())

    def _vocabulary_weights(self) -> list[Tensor]:
        return [self.embedding.word_embeddings.weight] if self.pre_process else []

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The head goes by a name of its own, and its shape must fit."""
        state = super().sharded_state_dict(*args, **kwargs)
        if self.post_process:
            state[HEAD].key, state[HEAD].allow_shape_mismatch = VALUE_HEAD, False
        return state
