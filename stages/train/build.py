"""The models of one rank: built, begun, saved, continued. Which files, and when, is the actor's business; what they learn is the step's.

A checkpoint is the policy's own directory; a critic and a refreshed reference lie in folders of it. All models have one layout and
live in one process: a rollout goes through them one after the other, on the same micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engines.megatron.engine import MegatronEngine
from engines.megatron.parallel import ParallelLayout
from engines.megatron.weights import Snapshot
from stages.train.config import TrainConfig
from stages.train.spec import Beside, TrainerSpec


@dataclass
class Models:
    """What a rank trains and compares with. Reference and teacher are weights for the policy's model, kept in host memory."""

    policy: MegatronEngine
    critic: MegatronEngine | None = None
    reference: Snapshot | None = None
    teacher: Snapshot | None = None
    refreshed: bool = False  # the reference is a later policy than the one that was given

    def digest(self) -> dict[str, str]:
        """Hashes of this rank's parameter shards, by name. Not collective."""
        critic = {} if self.critic is None else self.critic.digest()
        return self.policy.digest() | {f"critic.{name}": value for name, value in critic.items()}

    def state_digest(self) -> dict[str, str]:
        """Hashes of what a checkpoint holds besides. Not collective."""
        found = self.policy.state_digest()
        if self.critic is not None:
            found |= {f"critic.{name}": value for name, value in self.critic.state_digest().items()}
        if self.refreshed and self.reference is not None:
            with self.policy.using(self.reference):
                found |= {f"reference.{name}": value for name, value in self.policy.digest().items()}
        return found

    def refresh_reference(self) -> None:
        """The policy as it is becomes the reference."""
        self.reference, self.refreshed = self.policy.snapshot(), True


def layout_of(config: TrainConfig) -> ParallelLayout:
    """How the models lie over the ranks."""
    return ParallelLayout(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
        virtual_pipeline=config.virtual_pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )


def build_models(spec: TrainerSpec) -> Models:
    """With random weights. `init_parallel` comes first."""
    config = spec.config

    def engine(role: Literal["policy", "value"], optimizer: dict[str, Any]) -> MegatronEngine:
        return MegatronEngine(
            spec.shape,
            layout_of(config),
            dtype=config.params_dtype or ("bf16" if torch.cuda.is_available() else "fp32"),
            optimizer=optimizer,
            overrides=config.megatron,
            seed=config.seed,
            deterministic=config.deterministic_mode,
            role=role,
        )

    critic = engine("value", config.critic_optimizer_options) if config.uses_critic else None
    return Models(engine("policy", config.optimizer_options), critic)


def hold(models: Models, name: Beside, directory: Path) -> None:
    """Keep a model beside the policy, whose own weights are lost: `begin` or `go_on` comes next. Collective."""
    models.policy.load_weights(directory)
    setattr(models, name, models.policy.snapshot())
    if name == "reference":
        models.refreshed = False


def begin(models: Models, directory: Path) -> None:
    """Policy and critic start from a model, with fresh optimizers. Collective."""
    for engine in (models.policy, models.critic):
        if engine is not None:
            engine.load_weights(directory)


def save(models: Models, directory: Path, step_state: dict[str, Any]) -> None:
    """Write all that `go_on` needs. Collective."""
    models.policy.save(directory, step_state)  # first: Megatron warns of a directory that is not empty
    if models.critic is not None:
        models.critic.save(directory / "critic", step_state)
    if models.refreshed and models.reference is not None:
        with models.policy.using(models.reference):
            models.policy.save_weights(directory / "reference")


def go_on(models: Models, directory: Path) -> dict[str, Any]:
    """Continue from `save`, under any layout; gives the `step_state` back. Collective.

    In a fork that begins to have a critic, the critic begins at the policy as it is.
    """
    if (directory / "reference").is_dir():
        hold(models, "reference", directory / "reference")
        models.refreshed = True
    if models.critic is not None:
        critic = directory / "critic"
        models.critic.load(critic) if critic.is_dir() else models.critic.load_weights(directory)
    return models.policy.load(directory)
