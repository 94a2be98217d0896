"""The trainer with real Ray and real Megatron-core: against plain torch, killed and restored, and spread over ranks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engines.cluster import Cluster
from engines.megatron.shape import ModelShape
from engines.sglang.client import EngineClient
from engines.sglang.pool import EnginePool
from stages.convert.to_torch_dist import convert_hf
from stages.train.config import TrainConfig
from stages.train.group import TrainerGroup
from stages.train.policy import ensure_policy, save_checkpoint, train_round
from stages.train.spec import TrainerSpec
from storage.refs import CheckpointRef, Commit, RunKeys
from storage.sample import Sample
from storage.shards import write_shards
from storage.store import Store

pytestmark = pytest.mark.integration

KEYS = RunKeys("run")
TEMPERATURE = 0.9
ENTROPY_COEF = 0.01
NUM_ROUNDS = 3
CONFIG = {
    **{"lr": 1e-3, "adam_beta2": 0.98, "eps_clip_high": 0.28, "entropy_coef": ENTROPY_COEF, "num_steps_per_rollout": 2},
    **{"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "trainer_threads": 1, "max_tokens_per_gpu": 120},
}


def samples(rollout_id: int, count: int = 32) -> list[Sample]:
    """Uneven lengths, masks with holes, trajectories of two siblings, one failed sample."""
    rng = random.Random(rollout_id)
    rows = []
    for i in range(count):
        prompt, response = rng.randrange(3, 9), rng.randrange(2, 17)
        mask = [0] * prompt + [int(rng.random() < 0.8) for _ in range(response)]
        rows.append(
            Sample(
                f"{rollout_id}-{i}",
                f"{rollout_id}-{i // 8}",
                f"{rollout_id}-{i // 2}",
                rollout_id,
                token_ids=[rng.randrange(2, 54) for _ in mask],
                loss_mask=mask,
                rollout_logprobs=[-4.0 * m for m in mask],
                reward=None if i == 5 else float(rng.random() < 0.5),
            )
        )
    return rows


@pytest.fixture(scope="module")
def world(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A store with committed rollouts, three trained rounds, a checkpoint after the second, and the trainer that did it."""
    store = Store(str(tmp_path_factory.mktemp("train") / "store"))
    for rollout_id in range(NUM_ROUNDS):
        attempt = store.new_attempt(KEYS.rollout(rollout_id))
        with store.writing(attempt) as out:
            write_shards(out.path, samples(rollout_id))
        store.commit(KEYS.rollout(rollout_id), Commit(kind="rollout", index=rollout_id, attempt=attempt, files=out.files))
    base: CheckpointRef = cluster.run(convert_hf, store, str(tiny_model))

    def group(**changed: object) -> TrainerGroup:
        config = TrainConfig(**(CONFIG | changed))
        shape = ModelShape.from_hf(tiny_model)
        return TrainerGroup(cluster, TrainerSpec(run="run", shape=shape, config=config, temperature=TEMPERATURE, store=store.uri))

    trainer = group()
    commits = []
    for rollout_id in range(NUM_ROUNDS):
        commits.append(train_round(store, KEYS, trainer, rollout_id, base=base))
        if rollout_id == 1:
            save_checkpoint(store, KEYS, trainer, 2, base=base)
    yield SimpleNamespace(store=store, base=base, group=group, trainer=trainer, commits=commits)
    trainer.kill()


def plain_first_step(model_path: Path) -> dict[str, float]:
    """Loss, entropy, log-prob gap and gradient norm of the first optimizer step, sample by sample with Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = samples(0)
    loss = torch.zeros(())
    entropy_mean = gap = 0.0
    siblings = [
        [row for row in rows[:16] if row.trajectory_id == t] for t in dict.fromkeys(row.trajectory_id for row in rows[:16])
    ]
    for trajectory in siblings:
        trajectory = [row for row in trajectory if row.reward is not None]
        num_tokens = sum(sum(row.loss_mask) for row in trajectory)
        for row in trajectory:
            group = torch.tensor(
                [r.reward for r in rows if r.group_id == row.group_id and r.reward is not None], dtype=torch.float64
            )
            advantage = ((row.reward - group.mean()) / (group.std() + 1e-6)).item()
            log_p = (model(torch.tensor([row.token_ids])).logits[0] / TEMPERATURE).log_softmax(-1)
            for t in range(1, len(row.token_ids)):
                if row.loss_mask[t]:
                    logprob, entropy = log_p[t - 1, row.token_ids[t]], -(log_p[t - 1].exp() * log_p[t - 1]).sum()
                    weight = 1 / (num_tokens * len(siblings))
                    ratio = (logprob - logprob.detach()).exp()
                    loss = loss + weight * (-ratio * advantage - ENTROPY_COEF * entropy)
                    entropy_mean += weight * entropy.item()
                    gap += weight * abs(logprob.item() + 4.0)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    return {
        "train/loss": loss.item(),
        "train/entropy_loss": entropy_mean,
        "train/train_rollout_logprob_abs_diff": gap,
        "train/grad_norm": norm,
        "train/kl_loss": 0.0,
        "train/pg_clipfrac": 0.0,
    }


def test_the_first_step_is_what_plain_torch_computes(world: SimpleNamespace, tiny_model: Path) -> None:
    first = world.commits[0].state["steps"][0]
    for name, expected in plain_first_step(tiny_model).items():
        assert first[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_reference_equals_actor_at_the_start_and_differs_later(world: SimpleNamespace) -> None:
    first, second = world.commits[0].state["steps"]
    assert abs(first["train/kl_loss"]) < 1e-8 and first["train/ppo_kl"] == 0.0
    assert second["train/kl_loss"] > 1e-5 and second["train/ppo_kl"] != 0.0
    assert world.commits[2].summary["train/kl_loss"] > world.commits[0].summary["train/kl_loss"]


def test_killed_in_a_step_then_restored_bit_for_bit(world: SimpleNamespace) -> None:
    store, base, group = world.store, world.base, world.trainer
    ensure_policy(store, KEYS, group, 0, base=base)
    import ray

    pid = ray.get(group._actors[0].__ray_call__.remote(lambda actor: os.getpid()))
    threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(ray.exceptions.RayActorError):
        group.train(store.committed(KEYS.rollout(0)), 0)
    assert group.state() is None

    told: list[str] = []
    ensure_policy(store, KEYS, group, 3, base=base, on_progress=told.append)
    assert told == ["loading checkpoint 2", "replaying training of rollout 2 (1 of 1)"]
    assert group.digest() == world.commits[2].state["digest"]
    ensure_policy(store, KEYS, group, 1, base=base)
    assert group.digest() == world.commits[0].state["digest"]


def test_a_failed_call_ends_the_group_and_is_raised_as_it_is(world: SimpleNamespace) -> None:
    group = world.trainer
    group.ensure_started()
    with pytest.raises(AssertionError, match="asked to train policy 7"):
        group.train(world.store.committed(KEYS.rollout(0)), 7)
    assert group.state() is None


def test_an_engine_that_was_published_to_agrees_with_the_trainer_on_its_samples(
    world: SimpleNamespace, engine_pool: EnginePool
) -> None:
    store, base, group = world.store, world.base, world.trainer
    ensure_policy(store, KEYS, group, 3, base=base)
    group.publish(engine_pool.urls, "run/3")
    assert engine_pool.weight_versions() == ["run/3"]

    prompts = [[2, *range(10 + i, 15 + i), 1, 3] for i in range(4)]
    rows = asyncio.run(generated(engine_pool.urls, prompts))
    attempt = store.new_attempt(KEYS.rollout(3))
    with store.writing(attempt) as out:
        write_shards(out.path, rows)
    store.commit(KEYS.rollout(3), Commit(kind="rollout", index=3, attempt=attempt, files=out.files))
    assert train_round(store, KEYS, group, 3, base=base).summary["train/train_rollout_logprob_abs_diff"] < 1e-4


async def generated(urls: list[str], prompts: list[list[int]]) -> list[Sample]:
    """Eight samples of each prompt, as the engine makes them."""
    rows = []
    async with EngineClient(urls) as client:
        for g, prompt in enumerate(prompts):
            sampling = {"temperature": TEMPERATURE, "max_new_tokens": 12}
            for i, answer in enumerate(await client.generate(prompt, sampling, n=8)):
                assert answer.weight_version == "run/3"
                logprobs = [0.0] * len(prompt) + answer.logprobs
                mask = [0] * len(prompt) + [1] * len(answer.token_ids)
                name, ids = f"3-{g}-{i}", prompt + answer.token_ids
                rows.append(
                    Sample(name, f"g{g}", name, 3, token_ids=ids, loss_mask=mask, rollout_logprobs=logprobs, reward=i % 2.0)
                )
    return rows


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},  # and 2 data-parallel replicas
    ],
    ids=["tensor+sequence+context", "pipeline+data"],
)
def test_spread_over_four_ranks_the_run_goes_on_from_its_checkpoint_with_the_same_numbers(
    world: SimpleNamespace, layout: dict
) -> None:
    world.trainer.kill()
    group = world.group(actor_num_gpus_per_node=4, **layout)
    try:
        ensure_policy(world.store, KEYS, group, 2, base=world.base)
        trained = group.train(world.store.committed(KEYS.rollout(2)), 2)
    finally:
        group.kill()
    for name, expected in world.commits[2].summary.items():
        if not name.startswith("perf/"):
            assert trained.metrics[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
