"""The models of a rank: built, saved, and resumed with other models than those that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.families.shape import ModelShape
from penstock.stages.train.build import Models, build_models, load_auxiliary, load_initial, resume_models, save_models
from penstock.stages.train.config import TrainConfig
from tests.engines.megatron_reference import SHAPE

PPO = {"advantage_estimator": "ppo"}


def models(shape: ModelShape = SHAPE, **options: object) -> Models:
    config = TrainConfig(params_dtype="fp32", **options)
    return build_models(shape, config)


@pytest.fixture
def saved(world: None, tmp_path: Path) -> Path:
    """A checkpoint without a critic."""
    without = models(seed=7)
    save_models(without, tmp_path / "saved", {"version": 3})
    return tmp_path / "saved"


def test_critic_added_on_resume_starts_from_the_policy(saved: Path) -> None:
    with_critic = models(**PPO)
    assert resume_models(with_critic, saved) == {"version": 3}
    assert with_critic.critic is not None
    trunk = {name: bits for name, bits in with_critic.critic.digest().items() if "output_layer" not in name}
    assert len(trunk) == len(with_critic.critic.digest()) - 1 and trunk.items() <= with_critic.policy.digest().items()


def test_critic_can_be_dropped_on_resume(saved: Path, tmp_path: Path) -> None:
    with_critic = models(**PPO)
    resume_models(with_critic, saved)
    save_models(with_critic, tmp_path / "both", {"version": 4})
    without = models(seed=8)
    assert resume_models(without, tmp_path / "both") == {"version": 4}
    assert without.digest() == with_critic.policy.digest()


def test_only_a_refreshed_reference_is_saved(saved: Path, tmp_path: Path) -> None:
    own = models(use_kl_loss=True)
    load_auxiliary(own, "reference", saved)
    load_initial(own, saved)
    save_models(own, tmp_path / "first", {})
    assert not (tmp_path / "first" / "reference").exists()
    own.refresh_reference()
    save_models(own, tmp_path / "second", {})
    later = models(use_kl_loss=True, seed=9)
    resume_models(later, tmp_path / "second")
    assert later.refreshed and later.optimizer_state_digest() == own.optimizer_state_digest()
    assert any(name.startswith("reference.") for name in later.optimizer_state_digest())


def test_offload_moves_policy_and_critic(world: None) -> None:
    with_critic = models(**PPO)
    digest, state = with_critic.digest(), with_critic.optimizer_state_digest()
    both = ["policy: offload weights, optimizer", "value: offload weights, optimizer"]
    assert [switch.name for switch in with_critic.offload(("weights", "optimizer"))] == both
    assert with_critic.offload(("weights", "optimizer")) == []
    assert len(with_critic.onload(("weights", "optimizer"))) == 2
    assert (with_critic.digest(), with_critic.optimizer_state_digest()) == (digest, state)
