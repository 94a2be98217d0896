"""Tensor-, pipeline-, context- and expert-parallel sizes of a model. Does not import torch, because the checks before a
run starts (preflight) use this module."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from penstock.storage.errors import LayoutError


class ParallelLayout(BaseModel):
    """Number of ranks in each dimension of model parallelism; `data_parallel_size` computes the data-parallel size from
    the world size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    expert_tensor: int | None = None  # tensor-parallel size of the experts; None: same as `tensor`
    virtual_pipeline: int | None = None  # model chunks per pipeline rank (interleaved schedule)
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
