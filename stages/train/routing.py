"""From the engine's choice of experts, as the shards hold it, to records that the trainer's routers follow (R3, arXiv 2510.11370).

Following is the engine's (`engines/megatron/replay.py`), the bytes are `storage/routed_experts.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from engines.megatron.experts import experts_format
from engines.megatron.replay import RoutingRecord
from engines.megatron.shape import ModelShape
from storage.errors import OptionError
from storage.routed_experts import ExpertsFormat


@dataclass(frozen=True)
class EngineChoices:
    """The experts of all samples of a rollout, still as bytes: a pack's are decoded when it is made."""

    format: ExpertsFormat
    column: pa.ChunkedArray  # [B] bytes or null
    lengths: np.ndarray  # [B] tokens of each sample

    @classmethod
    def from_table(cls, table: pa.Table, shape: ModelShape) -> EngineChoices:
        """Of a committed rollout.

        Raises:
            OptionError: the model has no experts, or the engines did not return theirs when this rollout was generated.
        """
        option = "--use-rollout-routing-replay"
        known = experts_format(shape, option)
        column = table["routed_experts"]
        if len(table) and column.null_count == len(table):
            raise OptionError(f"{option}, but the samples of this rollout have no routed experts: generate it with that option")
        return cls(known, column, pc.list_value_length(table["token_ids"]).to_numpy().astype(np.int64))

    def record(self, rows: Sequence[int]) -> RoutingRecord:
        """What is known of the pack of these samples, laid behind each other. No rows: a pack of one pad token, of which nothing is.

        Raises:
            OptionError: the bytes do not fit the model.
        """
        parts = [self.format.decode(self.column[int(row)].as_py(), int(self.lengths[row])) for row in rows]
        if not parts:
            return RoutingRecord(1)
        chosen = torch.from_numpy(np.concatenate(parts))  # [T, layers with experts, top_k]
        return RoutingRecord(len(chosen), {layer: chosen[:, i] for i, layer in enumerate(self.format.routed_layers)})
