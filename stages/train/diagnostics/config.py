"""Options of the trainer's diagnostics: profiler traces, memory snapshots, and a dump of the training data."""

from __future__ import annotations

from typing import Literal

from penstock.storage.config import StageConfig, option

ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs"]


class DiagnosticsConfig(StageConfig):
    """Additional data that every rank of the trainer records. None of these options changes a result."""

    use_pytorch_profiler: bool = option(False, mutability="placement")
    """Trace training with torch.profiler: one file per round and rank in --profile-dir."""

    profile_target: list[ProfileTarget] = option(["train_overall"], mutability="placement", min_length=1)
    """With --use-pytorch-profiler: parts of a round that are traced. train_overall: the whole round; train_log_probs:
    the forward passes before the update; train_actor: the update."""

    profile_step_start: int = option(10, mutability="placement", ge=0)
    """With --use-pytorch-profiler: first round that is traced; rounds are counted from 0."""

    profile_step_end: int = option(12, mutability="placement", ge=1)
    """With --use-pytorch-profiler: round before which tracing ends."""

    profile_dir: str | None = option(None, mutability="placement", min_length=1)
    """With --use-pytorch-profiler: local directory with one directory of traces per run; default: profiles in the
    working directory."""

    record_memory_history: bool = option(False, mutability="placement")
    """Record the allocations of every trainer rank; a snapshot is written when the GPU's memory is exhausted, and after
    --memory-snapshot-num-steps."""

    memory_snapshot_dir: str | None = option(None, mutability="placement", min_length=1)
    """With --record-memory-history: local directory of the snapshots; default: the working directory."""

    memory_snapshot_path: str = option("snapshot.pickle", mutability="placement", min_length=1)
    """With --record-memory-history: last part of a snapshot's file name, which begins with run, round and rank."""

    memory_snapshot_num_steps: int | None = option(None, mutability="placement", ge=1)
    """With --record-memory-history: write a snapshot and stop recording after N rounds of this start."""

    memory_recorder: Literal["torch", "memray"] = option("torch", mutability="placement")
    """With --record-memory-history: torch records memory of the GPU, memray that of the host (needs the package memray
    and --memory-snapshot-num-steps)."""

    save_debug_train_data: str | None = option(None, mutability="placement", min_length=1)
    """Write the data that each round is trained on (tokens, log-probs, advantages, ...) to this path, which must
    contain {rollout_id}. It may contain {rank}, which is always 0, the rank that writes the file."""
