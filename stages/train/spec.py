"""What passes between the driver and the trainer's ranks: what to build, who leads, what a rank holds, and what training or saving gave.

Plain data without torch, so that the driver stays light.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from engines.megatron.shape import ModelShape
from stages.train.config import TrainConfig
from storage.refs import FileRecord, Frozen

Beside = Literal["reference", "teacher"]  # models that are not trained


class TrainerSpec(BaseModel):
    """Everything a rank needs to be built."""

    model_config = ConfigDict(frozen=True)

    run: str
    shape: ModelShape
    config: TrainConfig
    temperature: float = 1.0  # that the samples are drawn at; the trainer's log-probs must be of the same distribution
    store: str  # URI
    store_options: dict[str, Any] = {}


class Build(BaseModel):
    """One way to build a group of ranks. Ranks of an equal build compute the same, so a new driver may take them over."""

    model_config = ConfigDict(frozen=True)

    spec: TrainerSpec
    num_ranks: int
    threads: int  # CPU threads of each rank
    code: str = ""  # hash of the sources that the ranks run

    @property
    def hash(self) -> str:
        """Equal for equal builds."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class RankInfo(Frozen):
    """Who a rank is, so that it can be taken over, or found when it has died."""

    rank: int
    build: str  # `Build.hash`
    incarnation: str  # of the group of processes
    joined: bool  # has met the other ranks and built its model
    node: str  # Ray's name of its machine
    pid: int
    log: str  # file with what the process prints, on that machine


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


class Saved(BaseModel):
    """What a save made durable: of one rank, or of all of them together."""

    files: list[FileRecord]
    digest: dict[str, str]  # as in Trained
    optimizer_digest: dict[str, str]  # moments, step counts, fp32 copies, schedule, random state -> hash of their bits


class Fenced(ValueError):
    """Another driver leads the trainer now. Not worth a retry: two drivers would take it from each other for ever."""


class RankDied(RuntimeError):
    """A trainer process has gone; the message has the last lines of its log."""
