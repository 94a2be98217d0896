"""Build, load, save and resume the models of one rank. `actor.py` chooses the files, `step.py` trains the models.

A checkpoint directory contains the policy. Its subdirectories `critic`, `reference` and AVERAGE contain the critic, a
reference that --ref-update-interval replaced, and the moving average of --opd-self-ema, if the run has them. All models
have the same parallel layout, share one process, and process the same micro-batches in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.engines.families.shape import ModelShape
from penstock.engines.training import (
    STATE_KINDS,
    EngineBuild,
    MemorySwitch,
    StateKind,
    TrainEngine,
    train_backend,
)
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.spec import AVERAGE
from penstock.storage.commit import Commit
from penstock.storage.store import Store


@dataclass
class Models:
    """The models of one rank. Reference and teachers are weights in host memory; for a forward pass they are swapped
    into the policy's model. A policy with adapters may use its base weights as the reference, which needs no copy."""

    policy: TrainEngine
    critic: TrainEngine | None = None
    reference: Any = None  # snapshot of `TrainEngine.snapshot_weights`
    teachers: dict[str, Any] = field(default_factory=dict)  # name in `AlgorithmConfig.auxiliary_models` -> snapshot
    average: list[Any] | None = None  # moving average of the policy (`TrainEngine.average_weights`): --opd-self-ema
    reference_is_base: bool = False  # the reference is the policy without adapters
    refreshed: bool = False  # the reference is a later policy (--ref-update-interval), not the starting one

    def digest(self) -> dict[str, str]:
        """Return the hash of every trained parameter shard on this rank: shard name -> hash. Not collective."""
        critic = {} if self.critic is None else self.critic.digest()
        return self.policy.digest() | {f"critic.{name}": value for name, value in critic.items()}

    def optimizer_state_digest(self) -> dict[str, str]:
        """Return the hashes of everything in a checkpoint except the trained weights: optimizer, learning-rate
        scheduler and RNG states, and a refreshed reference. Not collective."""
        digest = self.policy.optimizer_state_digest()
        if self.critic is not None:
            digest |= {f"critic.{name}": value for name, value in self.critic.optimizer_state_digest().items()}
        for part, snapshot in self.saved_snapshots.items():
            with self.policy.using_weights(snapshot):
                digest |= {f"{part}.{name}": value for name, value in self.policy.digest().items()}
        return digest

    @property
    def saved_snapshots(self) -> dict[str, Any]:
        """Subdirectory of a checkpoint -> snapshot that it contains: a refreshed reference, the moving average."""
        reference = {"reference": self.reference} if self.refreshed and self.reference is not None else {}
        return reference | dict(zip(AVERAGE, self.average or ()))

    def using_teachers(self, config: TrainConfig) -> Iterator[AbstractContextManager[None]]:
        """Yield for each teacher in the trainer a context in which the policy's model computes with its weights."""
        if config.hinted:
            yield nullcontext() if self.average is None else self.policy.using_weights(self.average[0])
        for name in config.teacher_names if config.loads_teacher else ():
            yield self.policy.using_weights(self.teachers[f"teacher.{name}" if name else "teacher"])

    def using_reference(self) -> AbstractContextManager[None] | None:
        """Return a context in which the policy's model computes with the weights of the reference; None if there is no
        reference."""
        if self.reference is not None:
            return self.policy.using_weights(self.reference)
        return self.policy.using_weights(None) if self.reference_is_base else None

    def refresh_reference(self) -> None:
        """Make the current policy the reference."""
        self.reference, self.refreshed = self.policy.snapshot_weights(), True

    def offload(self, keep: Collection[StateKind] = ()) -> list[MemorySwitch]:
        """Move weights and optimizer state of policy and critic to host memory, and discard their gradients. `keep`:
        kinds of the policy's state that stay where they are. Reference and teachers are always in host memory. Return
        time and memory use of the moves."""
        switches = [self.policy.offload([kind for kind in STATE_KINDS if kind not in keep])]
        if self.critic is not None:
            switches.append(self.critic.offload(STATE_KINDS))
        return [switch for switch in switches if switch is not None]

    def onload(self, kinds: Collection[StateKind], *, critic: bool = True) -> list[MemorySwitch]:
        """Move these kinds of state of the policy, and of the critic if `critic` is True, back to the device. Return
        time and memory use of each move."""
        switches = [self.policy.onload(kinds)]
        if critic and self.critic is not None:
            switches.append(self.critic.onload(kinds))
        return [switch for switch in switches if switch is not None]


def build_models(shape: ModelShape, config: TrainConfig, *, offloads: bool = False) -> Models:
    """Build the policy and, if the algorithm uses one, the critic, with random weights, on initialized ranks.
    `offloads`: see `EngineBuild`."""
    policy = EngineBuild(
        shape,
        dtype=config.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
        optimizer=config.optimizer_options,
        layout=config.parallel_layout,
        options=config.megatron.model_dump(),
        seed=config.seed,
        freeze=config.freeze_params_name_list,
        only_train=config.only_train_params_name_list,
        freeze_vision=config.freeze_vision,
        lora=config.lora,
        fp32_head=config.fp32_lm_head,
        deterministic=config.deterministic_mode,
        offloads=offloads,
    )
    own = {"lr": config.critic_lr, "lr_warmup_iters": config.critic_lr_warmup_iters}
    critic = replace(
        policy,
        role="value",
        optimizer=policy.optimizer | {name: value for name, value in own.items() if value is not None},
        freeze=None,
        only_train=None,
        lora=None,
        fp32_head=False,
    )
    backend = train_backend()
    built = backend.build(critic) if config.uses_critic else None
    return Models(backend.build(policy), built)


def load_auxiliary_model(models: Models, name: str, directory: Path) -> None:
    """Load the weights of the model `name` ("reference", or the name of a teacher) into host memory. This overwrites
    the weights of the policy: call `load_initial` or `resume_models` afterwards. Collective."""
    models.policy.load_weights(directory)
    snapshot = models.policy.snapshot_weights()
    if name == "reference":
        models.reference, models.refreshed = snapshot, False
    else:
        models.teachers[name] = snapshot


def load_initial(models: Models, directory: Path) -> None:
    """Load the starting weights into policy and critic, with new adapters and optimizers. Collective."""
    for engine in (models.policy, models.critic):
        if engine is not None:
            engine.load_weights(directory)


def save_models(models: Models, directory: Path, step_state: dict[str, Any]) -> dict[str, str]:
    """Write a checkpoint: weights, optimizer, scheduler and RNG states of policy and critic; the reference model if it
    was replaced during training (--ref-update-interval); the moving average of --opd-self-ema; and `step_state` (run
    and policy version). Return the hashes (xxh3-128) of this rank's `.distcp` files, by path relative to `directory`.
    Collective."""
    hashes = models.policy.save(directory, step_state)  # first: Megatron warns if the directory is not empty
    if models.critic is not None:
        critic = models.critic.save(directory / "critic", step_state)
        hashes |= {f"critic/{name}": value for name, value in critic.items()}
    for part, snapshot in models.saved_snapshots.items():
        with models.policy.using_weights(snapshot):
            saved = models.policy.save(directory / part, None)
        hashes |= {f"{part}/{name}": value for name, value in saved.items()}
    return hashes


def resume_models(models: Models, directory: Path) -> dict[str, Any]:
    """Load a checkpoint that `save_models` has written, and return its `step_state`. The parallel layout may differ.
    Collective.

    The checkpoint of a policy with adapters has only the adapters: call `load_initial` with the base weights first. If
    the checkpoint has no critic (this run was forked from a run without one), the critic starts from the policy's
    weights.
    """
    if (directory / "reference").is_dir():
        load_auxiliary_model(models, "reference", directory / "reference")
        models.refreshed = True
    if (directory / AVERAGE[0]).is_dir():
        models.average = []
        for part in AVERAGE:
            models.policy.load_weights(directory / part)
            models.average.append(models.policy.snapshot_weights())
    if models.critic is not None:
        critic = directory / "critic"
        models.critic.load(critic) if critic.is_dir() else models.critic.load_weights(directory)
    return models.policy.load(directory)


@contextmanager
def open_commit_files(store: Store, commit: Commit, machine: str) -> Iterator[Path]:
    """Yield a local directory with the verified files of `commit`. Collective over all ranks: the first rank of each
    machine (`machine` is an id of this rank's machine) downloads the files.

    If the download fails, the other ranks wait in the collective until the driver kills all ranks.
    """
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, machine)
    fetcher = machines.index(machine)
    with ExitStack() as reading:
        own_path = str(reading.enter_context(store.reading(commit))) if dist.get_rank() == fetcher else ""
        paths: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(paths, own_path)
        yield Path(paths[fetcher])
        dist.barrier()  # wait until all ranks have read the files: the end of the block removes a downloaded copy
