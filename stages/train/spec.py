"""Messages between the driver and the trainer's ranks: build, state of a rank, results of training and saving.

The driver imports this module, so it does not import torch.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.engines.backends import DEFAULT
from penstock.engines.families.shape import ModelShape
from penstock.engines.training import STATE_KINDS, StateKind
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.diagnostics.config import DiagnosticsConfig
from penstock.storage.commit import FileRecord, Frozen

AuxiliaryModel = str  # "reference", a teacher ("teacher", "teacher.NAME"), or "adapter": that the policy starts with
AVERAGE = ("average", "average-rest")  # subdirectories of a checkpoint with the two parts of a moving average

# The kinds of state (weights, gradients, optimizer) that a rank's method needs on the device. Other methods need none.
NEEDED_ON_DEVICE: dict[str, tuple[StateKind, ...]] = {
    "load": STATE_KINDS,
    "train": STATE_KINDS,
    "objective_of_samples": STATE_KINDS,
    "save": ("weights", "optimizer"),
    "optimizer_digest": ("weights", "optimizer"),
    "digest": ("weights",),
    "publish": ("weights",),
    "export": ("weights",),
}
# Methods before which engines on the same devices free their memory. Engines have freed it already before `publish`.
FREES_ENGINES_MEMORY = ("load", "train", "objective_of_samples", "save", "optimizer_digest", "export")
# Methods of NEEDED_ON_DEVICE that need only the policy's state, not the critic's.
POLICY_METHODS = ("publish", "export")


class TrainerSpec(BaseModel):
    """Everything that a rank needs to build its models."""

    model_config = ConfigDict(frozen=True)

    run: str
    shape: ModelShape
    config: TrainConfig
    temperature: float = 1.0  # sampling temperature of the rollout; the trainer divides its logits by it, too
    engine: str = DEFAULT  # --engine: the inference engine that gets the weights
    store: str  # URI
    store_options: dict[str, Any] = {}
    network_interface: str | None = None  # the ranks of several nodes communicate over it
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()


class Build(BaseModel):
    """Options, models, size and code of a group of trainer ranks. A new driver takes over running ranks only if these
    are equal to its own."""

    model_config = ConfigDict(frozen=True)

    spec: TrainerSpec
    num_ranks: int
    threads: int  # CPU threads of each rank
    code: str = ""  # hash of the sources that the ranks run

    @property
    def hash(self) -> str:
        """Return a hash of all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class RankInfo(Frozen):
    """Identity of a rank: used to take over running ranks, and to find the log of a dead one."""

    rank: int
    build: str  # `Build.hash`
    incarnation: str  # random id of the group of processes, new at every start
    joined: bool  # process group initialized and models built
    node: str  # Ray's node id of the machine
    pid: int
    gpu_ids: tuple[str, ...] = ()  # Ray's id of the GPU on the machine; empty on CPU
    log: str  # path of the process's log on that machine


class PolicyState(Frozen):
    """The policy version that a rank holds. `clean` is False while the weights are being changed, and stays False if
    the change is interrupted."""

    run: str
    incarnation: str  # random id of the group of processes, new at every start
    version: int
    clean: bool


class TrainResult(BaseModel):
    """Result of one round of training."""

    metrics: dict[str, float]  # means over the round
    steps: list[dict[str, float]]  # metrics of each optimizer step
    seconds: dict[str, float]  # phase -> wall-clock seconds
    digest: dict[str, str]  # parameter shard -> hash of its bits
    fingerprint: dict[str, Any]  # hardware, libraries, layout and options: with weights and data they fix every bit
    sample_uses: list[tuple[int, int]] = []  # (optimizer steps that a sample was trained in, samples in a row), ...
    # (round, group, the same of its samples) of each replayed group (--replay-share)
    replayed: list[tuple[int, str, list[tuple[int, int]]]] = []
    files: list[FileRecord] = []  # written by rank 0: what it stores of every trained token
    notes: list[str] = []  # files that the rank's diagnostics have written


class SaveResult(BaseModel):
    """Checkpoint files that one rank, or all ranks together, wrote durably, and the hashes of the saved state."""

    files: list[FileRecord]
    digest: dict[str, str]  # parameter shard -> hash of its bits
    optimizer_digest: dict[str, str]  # moments, step count, fp32 weights, LR scheduler, RNG state -> hash of the bits


class FencedError(ValueError):
    """Another driver has taken over the trainer's ranks. The call is not retried, because two drivers would take the
    ranks from each other forever."""


class RankDied(RuntimeError):
    """A trainer process died; the error message contains the tail of its log."""
