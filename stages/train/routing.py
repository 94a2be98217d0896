"""Routing replay of the inference engine's experts (R3, arXiv 2510.11370): read the expert ids from the sample shards.

`engines/megatron/model/expert_routing.py` replays them in the trainer; the byte format is defined in
`storage/samples/routed_experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from penstock.engines.families.shape import ModelShape, experts_format
from penstock.engines.megatron.model.expert_routing import RoutingRecord
from penstock.storage.errors import OptionError
from penstock.storage.samples.routed_experts import ExpertsFormat


@dataclass(frozen=True)
class EngineChoices:
    """Expert ids that the engine's routers chose for every token of a rollout, encoded as bytes per sample. `decode`
    decodes the samples of one micro-batch when the micro-batch is packed."""

    format: ExpertsFormat
    column: pa.ChunkedArray  # [B] bytes of each sample; null = not recorded
    lengths: np.ndarray  # [B] number of tokens of each sample

    @classmethod
    def from_table(cls, table: pa.Table, shape: ModelShape) -> EngineChoices:
        """Read the column `routed_experts` of a committed rollout.

        Raises:
            OptionError: the model has no experts, or no sample of the rollout has recorded expert ids.
        """
        option = "--use-rollout-routing-replay"
        experts = experts_format(shape, option)
        column = table["routed_experts"]
        if len(table) and column.null_count == len(table):
            raise OptionError(
                f"{option}: the samples of this rollout have no routed experts: generate the rollout with {option}, or "
                "train without it"
            )
        return cls(experts, column, pc.list_value_length(table["token_ids"]).to_numpy().astype(np.int64))

    def decode(self, sample_indices: Sequence[int]) -> RoutingRecord:
        """Return the recorded expert ids of a micro-batch of samples: MoE layer -> [tokens, top_k]. Without samples,
        the micro-batch is one pad token, and no experts are recorded.

        Raises:
            OptionError: the recorded bytes do not match the model's MoE layers, experts or top_k.
        """
        parts = [self.format.decode(self.column[int(row)].as_py(), int(self.lengths[row])) for row in sample_indices]
        if not parts:
            return RoutingRecord(1)
        chosen = torch.from_numpy(np.concatenate(parts))  # [T, layers with experts, top_k]
        return RoutingRecord(len(chosen), {layer: chosen[:, i] for i, layer in enumerate(self.format.routed_layers)})
