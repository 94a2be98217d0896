"""Build, load, save and resume the models of one rank. `actor.py` chooses the files, `step.py` trains the models.

A checkpoint directory contains the policy; a critic and a refreshed reference are in its subdirectories `critic` and
`reference`. All models have the same parallel layout, share one process, and process the same micro-batches in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.engine import MegatronEngine, use_deterministic_kernels
from penstock.engines.megatron.weights import Snapshot
from penstock.stages.train.config import TrainConfig


@dataclass
class Models:
    """The models of one rank. Reference and teacher are weights in host memory; for a forward pass they are swapped
    into the policy's model."""

    policy: MegatronEngine
    critic: MegatronEngine | None = None
    reference: Snapshot | None = None
    teacher: Snapshot | None = None
    refreshed: bool = False  # the reference was replaced by a later policy (--ref-update-interval)

    def digest(self) -> dict[str, str]:
        """Return the hashes of this rank's parameter shards: shard -> hash. Not collective."""
        critic = {} if self.critic is None else self.critic.digest()
        return self.policy.digest() | {f"critic.{name}": value for name, value in critic.items()}

    def state_digest(self) -> dict[str, str]:
        """Return the hashes of everything in a checkpoint besides the trained weights: optimizer, learning-rate
        scheduler and RNG states, and a refreshed reference. Not collective."""
        digest = self.policy.state_digest()
        if self.critic is not None:
            digest |= {f"critic.{name}": value for name, value in self.critic.state_digest().items()}
        if self.refreshed and self.reference is not None:
            with self.policy.using(self.reference):
                digest |= {f"reference.{name}": value for name, value in self.policy.digest().items()}
        return digest

    def refresh_reference(self) -> None:
        """Make the current policy the reference."""
        self.reference, self.refreshed = self.policy.snapshot(), True


def build_models(shape: ModelShape, config: TrainConfig) -> Models:
    """Build the policy and, if the algorithm uses one, the critic, with random weights. Call `init_parallel` before."""
    if config.deterministic_mode:
        use_deterministic_kernels()

    def engine(role: Literal["policy", "value"], optimizer: dict[str, Any]) -> MegatronEngine:
        return MegatronEngine(
            shape,
            config.parallel_layout,
            dtype=config.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
            optimizer=optimizer,
            overrides=config.megatron,
            seed=config.seed,
            role=role,
        )

    critic = engine("value", config.critic_optimizer_options) if config.uses_critic else None
    return Models(engine("policy", config.optimizer_options), critic)


def load_auxiliary(models: Models, name: str, directory: Path) -> None:
    """Load the weights of the model `name` ("reference" or "teacher") into host memory. This overwrites the weights of
    the policy: call `load_initial` or `resume` afterwards. Collective."""
    models.policy.load_weights(directory)
    setattr(models, name, models.policy.snapshot())
    if name == "reference":
        models.refreshed = False


def load_initial(models: Models, directory: Path) -> None:
    """Load the starting weights into policy and critic, with fresh optimizers. Collective."""
    for engine in (models.policy, models.critic):
        if engine is not None:
            engine.load_weights(directory)


def save(models: Models, directory: Path, step_state: dict[str, Any]) -> None:
    """Write all states of the trained models, and a refreshed reference, for `resume`; `step_state` is stored with
    them. Collective."""
    models.policy.save(directory, step_state)  # first, because Megatron warns if the directory is not empty
    if models.critic is not None:
        models.critic.save(directory / "critic", step_state)
    if models.refreshed and models.reference is not None:
        with models.policy.using(models.reference):
            models.policy.save_weights(directory / "reference")


def resume(models: Models, directory: Path) -> dict[str, Any]:
    """Load a checkpoint that `save` has written, and return its `step_state`. The parallel layout may differ.
    Collective.

    If the checkpoint has no critic, because a fork added the critic, it starts from the policy's weights.
    """
    if (directory / "reference").is_dir():
        load_auxiliary(models, "reference", directory / "reference")
        models.refreshed = True
    if models.critic is not None:
        critic = directory / "critic"
        models.critic.load(critic) if critic.is_dir() else models.critic.load_weights(directory)
    return models.policy.load(directory)
