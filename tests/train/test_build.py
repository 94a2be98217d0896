"""What a rank holds: built, saved, and continued by a run with other models than the one that saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.megatron.shape import ModelShape
from stages.train.build import Models, begin, build_models, go_on, hold, save
from stages.train.config import TrainConfig
from stages.train.spec import TrainerSpec
from tests.engines.megatron_reference import SHAPE

PPO = {"advantage_estimator": "ppo"}


def models(shape: ModelShape = SHAPE, **options: object) -> Models:
    config = TrainConfig(params_dtype="fp32", **options)
    return build_models(TrainerSpec(run="run", shape=shape, config=config, store=""))


@pytest.fixture
def saved(world: None, tmp_path: Path) -> Path:
    """A checkpoint without a critic."""
    without = models(seed=7)
    save(without, tmp_path / "saved", {"version": 3})
    return tmp_path / "saved"


def test_a_run_that_begins_to_have_a_critic_begins_it_at_the_policy(saved: Path) -> None:
    with_critic = models(**PPO)
    assert go_on(with_critic, saved) == {"version": 3}
    assert with_critic.critic is not None
    trunk = {name: bits for name, bits in with_critic.critic.digest().items() if "output_layer" not in name}
    assert len(trunk) == len(with_critic.critic.digest()) - 1 and trunk.items() <= with_critic.policy.digest().items()


def test_a_run_may_have_its_critic_no_longer(saved: Path, tmp_path: Path) -> None:
    with_critic = models(**PPO)
    go_on(with_critic, saved)
    save(with_critic, tmp_path / "both", {"version": 4})
    without = models(seed=8)
    assert go_on(without, tmp_path / "both") == {"version": 4}
    assert without.digest() == with_critic.policy.digest()


def test_a_refreshed_reference_is_saved_and_another_one_is_not(saved: Path, tmp_path: Path) -> None:
    own = models(use_kl_loss=True)
    hold(own, "reference", saved)
    begin(own, saved)
    save(own, tmp_path / "first", {})
    assert not (tmp_path / "first" / "reference").exists()
    own.refresh_reference()
    save(own, tmp_path / "second", {})
    later = models(use_kl_loss=True, seed=9)
    go_on(later, tmp_path / "second")
    assert later.refreshed and later.state_digest() == own.state_digest()
    assert any(name.startswith("reference.") for name in later.state_digest())
