"""The models of a rank: built, saved, and resumed with other models than those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_rollouts import commit_rollouts

from penstock.engines.families.shape import ModelShape
from penstock.engines.training import STATE_KINDS
from penstock.stages.train.batching import Batch
from penstock.stages.train.build import (
    Models,
    build_models,
    load_auxiliary_model,
    load_initial,
    resume_models,
    save_models,
)
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.step import train_rollout
from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_table
from penstock.storage.store import Store
from tests.engines.megatron_reference import SHAPE
from tests.engines.test_megatron_residency import sizes

PPO = {"advantage_estimator": "ppo"}


def models(shape: ModelShape = SHAPE, **options: object) -> Models:
    config = TrainConfig(**{"params_dtype": "fp32", **options})
    return build_models(shape, config)


@pytest.fixture
def saved(world: None, tmp_path: Path) -> Path:
    """A checkpoint without a critic."""
    without = models(seed=7)
    save_models(without, tmp_path / "saved", {"version": 3})
    return tmp_path / "saved"


@pytest.mark.full
def test_critic_is_added_from_the_policy_or_dropped_on_resume(saved: Path, tmp_path: Path) -> None:
    with_critic = models(**PPO)
    assert resume_models(with_critic, saved) == {"version": 3}
    assert with_critic.critic is not None
    trunk = {name: bits for name, bits in with_critic.critic.digest().items() if "output_layer" not in name}
    assert len(trunk) == len(with_critic.critic.digest()) - 1 and trunk.items() <= with_critic.policy.digest().items()
    save_models(with_critic, tmp_path / "both", {"version": 4})
    without = models(seed=8)
    assert resume_models(without, tmp_path / "both") == {"version": 4}
    assert without.digest() == with_critic.policy.digest()


@pytest.mark.full
def test_only_a_refreshed_reference_is_saved(saved: Path, tmp_path: Path) -> None:
    own = models(use_kl_loss=True)
    load_auxiliary_model(own, "reference", saved)
    load_initial(own, saved)
    save_models(own, tmp_path / "first", {})
    assert not (tmp_path / "first" / "reference").exists()
    own.refresh_reference()
    save_models(own, tmp_path / "second", {})
    later = models(use_kl_loss=True, seed=9)
    resume_models(later, tmp_path / "second")
    assert later.refreshed and later.optimizer_state_digest() == own.optimizer_state_digest()
    assert any(name.startswith("reference.") for name in later.optimizer_state_digest())


def test_moving_average_follows_the_policy_and_is_saved(world: None, tmp_path: Path) -> None:
    """Steps of 1/512 of a weight vanish in bf16 if the average is rounded to it."""
    first, second = (models(params_dtype="bf16", seed=seed) for seed in (0, 1))
    second.policy.save(tmp_path / "second", None)
    start = [tensor.float() for tensor in first.policy.snapshot_weights()]
    first.average = first.policy.average_weights(None, 0.01)
    load_initial(first, tmp_path / "second")
    target = [tensor.float() for tensor in first.policy.snapshot_weights()]
    for _ in range(20):
        first.average = first.policy.average_weights(first.average, 0.01)
    for begin, end, high, low in zip(start, target, *first.average, strict=True):
        expected = end + 0.99**20 * (begin - end)
        torch.testing.assert_close(high.float() + low.float(), expected, rtol=0, atol=2e-5)
    assert any(name.startswith("average-rest.") for name in first.optimizer_state_digest())
    save_models(first, tmp_path / "saved", {"version": 1})
    resume_models(second, tmp_path / "saved")
    assert second.optimizer_state_digest() == first.optimizer_state_digest()


def test_offload_moves_policy_and_critic(world: None) -> None:
    with_critic = models(**PPO)
    digest, state = with_critic.digest(), with_critic.optimizer_state_digest()
    both = ["policy: offload gradients, optimizer", "value: offload weights, gradients, optimizer"]
    assert [switch.name for switch in with_critic.offload(keep=("weights",))] == both
    assert [switch.name for switch in with_critic.offload()] == ["policy: offload weights"]
    assert with_critic.offload() == []
    assert [switch.name for switch in with_critic.onload(("weights",), critic=False)] == ["policy: onload weights"]
    both = ["policy: onload optimizer", "value: onload weights, optimizer"]
    assert [switch.name for switch in with_critic.onload(("weights", "optimizer"))] == both
    assert (with_critic.digest(), with_critic.optimizer_state_digest()) == (digest, state)


ALL_MODELS: dict[str, Any] = {
    **PPO,
    **{"use_kl_loss": True, "kl_loss_coef": 0.1, "opd": {"opd_kl_coef": 0.1, "opd_teacher_load": "teacher"}},
    **{"num_steps_per_rollout": 1, "max_tokens_per_gpu": 120, "lr": 1e-3, "params_dtype": "bf16"},
}


def test_offloads_with_critic_reference_and_teacher_change_no_bit(world: None, tmp_path: Path) -> None:
    """All device memory of policy and critic is freed between the rounds; reference and teacher have none."""
    names = ("initial", "reference", "teacher")
    for seed, name in enumerate(names):
        models(seed=seed, params_dtype="bf16").policy.save(tmp_path / name, None)
    store, keys = Store(str(tmp_path / "store")), RunKeys("run")
    commit_rollouts(store, keys, 2)

    def train(moves: bool) -> tuple[Any, ...]:
        own, results = models(**ALL_MODELS), []
        for name in names[1:]:
            load_auxiliary_model(own, name, tmp_path / name)
        load_initial(own, tmp_path / "initial")
        assert own.reference and own.teachers and own.critic
        config = TrainConfig(**ALL_MODELS)
        for rollout_id in range(2):
            if moves:
                own.offload(keep=("weights",))
                own.offload()
                assert sizes(own.policy) == sizes(own.critic) == {kind: {0} for kind in STATE_KINDS}
                assert {tensor.device.type for tensor in (*own.reference, *own.teachers["teacher"])} == {"cpu"}
                own.onload(STATE_KINDS)
            rollout = store.committed(keys.rollout_prefix(rollout_id))
            assert rollout is not None
            batch = Batch.from_table(read_table(store, rollout), needs_rewards=True)
            results.append(train_rollout(own, batch, config).steps)
        own.refresh_reference()
        return results, own.digest(), own.optimizer_state_digest()

    assert train(moves=True) == train(moves=False)


def test_reset_optimizer_states_starts_every_round_with_new_moments(world: None, tmp_path: Path) -> None:
    store, keys = Store(str(tmp_path / "store")), RunKeys("run")
    commit_rollouts(store, keys, 2)
    commits = [store.committed(keys.rollout_prefix(rollout_id)) for rollout_id in range(2)]
    batches = [Batch.from_table(read_table(store, commit), needs_rewards=True) for commit in commits if commit]
    digests = []
    for options in ({}, {"reset_optimizer_states": True}):
        config = TrainConfig(lr=1e-3, params_dtype="fp32", **options)
        own, fresh = models(lr=1e-3), models(lr=1e-3)
        train_rollout(own, batches[0], config)
        own.policy.save(tmp_path / f"saved-{len(options)}", None)
        train_rollout(own, batches[1], config)
        load_initial(fresh, tmp_path / f"saved-{len(options)}")
        train_rollout(fresh, batches[1], config)
        digests.append((own.digest(), fresh.digest()))
    assert digests[0][0] != digests[0][1] and digests[1][0] == digests[1][1]
