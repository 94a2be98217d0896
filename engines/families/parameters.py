"""Count the parameters that one rank holds, from the tensor names and shapes of the model family, without building the
model. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from penstock.engines.families import family_of
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorRow

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
REPLICATED = re.compile(r"layernorm|router\.|_down_proj\.")  # Megatron names of weights that every tensor rank holds
FROZEN = ".expert_bias"  # suffix of the names of frozen buffers, which are not counted as parameters


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters of one rank. Dense and expert parameters are sharded over different process groups."""

    dense: int
    expert: int = 0

    @property
    def total(self) -> int:
        """Return the number of dense and expert parameters together."""
        return self.dense + self.expert


def count_rank_parameters(
    shape: ModelShape,
    layers: Collection[int],
    *,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    outer: Collection[str] | None = None,
) -> RankParameters:
    """Return how many parameters of a model one rank holds.

    Args:
        shape: shape of the model.
        layers: indices of the layers that the rank holds.
        tensor: tensor-parallel size; the vocabulary is padded to a multiple of it.
        expert: expert-parallel size.
        expert_tensor: tensor-parallel size of the experts; None means `tensor`.
        outer: Megatron names of the weights that the rank holds outside of the layers (embedding, final norm, LM head);
            None means all of these.
    """
    dense = experts = 0
    for row in family_of(shape).rows(shape):
        if row.megatron.endswith(FROZEN):
            continue
        if row.layers is None:
            dense += 0 if outer is not None and row.megatron not in outer else _numel_per_rank(row, tensor)
            continue
        count = len(set(row.layers).intersection(layers))
        if ".local_experts." in row.megatron:
            experts += count * (row.num_experts // expert) * _numel_per_rank(row, expert_tensor or tensor)
        else:
            dense += count * _numel_per_rank(row, tensor)
    return RankParameters(dense, experts)


def _numel_per_rank(row: TensorRow, ranks: int) -> int:
    """Return the number of elements of a tensor's shard if the tensor is sharded over `ranks` tensor-parallel ranks;
    for one layer and one expert if the row describes several."""
    if REPLICATED.search(row.megatron):
        return sum(prod(size) for size in row.hf.values())
    if row.megatron in (EMBEDDING, HEAD):
        [(rows, columns)] = row.hf.values()
        return -(-rows // ranks) * columns
    return sum(prod(size) for size in row.hf.values()) // ranks
