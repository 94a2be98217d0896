"""The parallel sizes of a model. Does not import torch, because preflight uses this module."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.storage.errors import LayoutError


class ParallelLayout(BaseModel):
    """Parallel sizes. The data-parallel size follows from the world size (`data_parallel_size`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    expert_tensor: int | None = None
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size for a world size.

        Raises:
            LayoutError: the world size is not a multiple of tensor x pipeline x context, or of expert_tensor x expert x
                pipeline.
        """
        ranks = self.tensor * self.pipeline * self.context
        if world_size % ranks:
            raise LayoutError(
                f"{world_size} trainer ranks cannot be divided into replicas of {ranks} ranks (tensor {self.tensor} x "
                f"pipeline {self.pipeline} x context {self.context}): use a multiple of {ranks} ranks, or smaller "
                "parallel sizes"
            )
        expert_tensor = self.expert_tensor or self.tensor
        expert_ranks = expert_tensor * self.expert * self.pipeline
        if world_size % expert_ranks:
            raise LayoutError(
                f"{world_size} trainer ranks cannot be divided into expert replicas of {expert_ranks} ranks (expert "
                f"tensor {expert_tensor} x expert {self.expert} x pipeline {self.pipeline}): use a multiple of "
                f"{expert_ranks} ranks, or smaller parallel sizes, for the experts"
            )
        return world_size // ranks
