"""What passes between the driver and the trainer's ranks: what to build, what a rank holds, and what a round of training gave.

Plain data without torch, so that the driver stays light.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from engines.megatron.shape import ModelShape
from stages.train.config import TrainConfig
from storage.refs import Frozen


class TrainerSpec(BaseModel):
    """Everything a rank needs to be built."""

    model_config = ConfigDict(frozen=True)

    run: str
    shape: ModelShape
    config: TrainConfig
    temperature: float = 1.0  # that the samples are drawn at; the trainer's log-probs must be of the same distribution
    store: str  # URI
    store_options: dict[str, Any] = {}


class PolicyState(Frozen):
    """What a rank says it holds. `clean` is False from before the first mutation of the weights until after the last."""

    run: str
    incarnation: str  # of the group of processes
    version: int
    clean: bool


class Trained(BaseModel):
    """What one round of training gave."""

    metrics: dict[str, float]  # of the round
    steps: list[dict[str, float]]  # of each optimizer step
    seconds: dict[str, float]
    digest: dict[str, str]  # parameter shard -> hash of its bits
    fingerprint: dict[str, Any]  # what the bits depend on besides the data
