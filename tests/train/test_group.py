"""The trainer with real Ray and real Megatron-core: against plain torch, killed and restored, and spread over ranks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from random_rollouts import commit_rollouts, samples

from penstock.engines.cluster import Cluster
from penstock.engines.families import read_shape
from penstock.engines.serving.pool import EnginePool
from penstock.engines.sglang.client import SGLangClient
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.train.actor import TrainActor
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import RankDied, TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, Commit, RunKeys
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store

pytestmark = pytest.mark.integration

KEYS = RunKeys("run")
TEMPERATURE = 0.9
ENTROPY_COEF = 0.01
NUM_ROUNDS = 3
CONFIG = dict(
    **dict(lr=1e-3, adam_beta2=0.98, eps_clip_high=0.28, entropy_coef=ENTROPY_COEF, num_steps_per_rollout=2),
    **dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", trainer_threads=1, max_tokens_per_gpu=120),
)


@pytest.fixture(scope="module")
def world(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Yield a store with committed rollouts, three trained rounds, a checkpoint after the second, and its trainer."""
    store = Store(str(tmp_path_factory.mktemp("train") / "store"))
    commit_rollouts(store, KEYS, NUM_ROUNDS)
    base: CheckpointRef = cluster.run(convert_hf, store, str(tiny_model))

    def group(**changed: object) -> TrainerGroup:
        config = TrainConfig(**(CONFIG | changed))
        shape = read_shape(tiny_model)
        return TrainerGroup(
            cluster, TrainerSpec(run="run", shape=shape, config=config, temperature=TEMPERATURE, store=store.uri)
        )

    trainer = group()
    PolicyRestorer(store, KEYS, trainer, base).restore(0)
    begin, commits = trainer.digest(), []
    for rollout_id in range(NUM_ROUNDS):
        commits.append(PolicyRestorer(store, KEYS, trainer, base).train_round(rollout_id))
        if rollout_id == 1:
            PolicyRestorer(store, KEYS, trainer, base).save_checkpoint(2)
    yield SimpleNamespace(store=store, base=base, group=group, trainer=trainer, begin=begin, commits=commits)
    trainer.kill()


def plain_first_step(model_path: Path) -> dict[str, float]:
    """Compute loss, entropy, mismatch and gradient norm of the first optimizer step, sample by sample with the Hugging
    Face model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = samples(0)
    loss = torch.zeros(())
    entropy_mean = gap = 0.0
    names = dict.fromkeys(row.trajectory_id for row in rows[:16])
    siblings = [[row for row in rows[:16] if row.trajectory_id == name] for name in names]
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


def test_first_step_equals_plain_torch(world: SimpleNamespace, tiny_model: Path) -> None:
    first = world.commits[0].state["steps"][0]
    for name, expected in plain_first_step(tiny_model).items():
        assert first[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert world.commits[0].state["steps"][1]["train/kl_loss"] > 1e-5, "the reference stays what the policy was"


def test_rank_killed_during_a_step_is_restored_bit_for_bit(world: SimpleNamespace) -> None:
    store, base, group = world.store, world.base, world.trainer
    PolicyRestorer(store, KEYS, group, base).restore(0)
    (rank,) = group._call("adopt", group._owner)
    with open(rank.log, "a") as log:
        log.write("end of the log\n")
    threading.Timer(0.05, os.kill, (rank.pid, signal.SIGKILL)).start()
    with pytest.raises(RankDied, match=rf"(?s)rank 0 \(process {rank.pid}\) died in 'train'; .*end of the log"):
        group.train(store.committed(KEYS.rollout_prefix(0)), 0)
    assert group.policy_state() is None

    told: list[str] = []
    PolicyRestorer(store, KEYS, group, base, on_progress=told.append).restore(3)
    assert told == ["loading checkpoint 2", "replaying training of rollout 2 (1 of 1)"]
    assert group.digest() == world.commits[2].state["digest"]
    PolicyRestorer(store, KEYS, group, base).restore(1)
    assert group.digest() == world.commits[0].state["digest"]


def test_offloads_between_rounds_change_no_bit(world: SimpleNamespace) -> None:
    """The ranks move back what a call needs; before a call that needs more than weights, the engines' memory is
    released."""
    store, group, onloads = world.store, world.group(), []
    world.trainer.kill()
    group.before_onload, group.offloads = lambda: onloads.append(1), True
    try:
        PolicyRestorer(store, KEYS, group, world.base).restore(0)
        assert len(onloads) == 2  # start and load
        for rollout_id in range(2):
            group.offload(keep=("weights",) if rollout_id else ())
            result = group.train(store.committed(KEYS.rollout_prefix(rollout_id)), rollout_id)
            assert result.digest == world.commits[rollout_id].state["digest"]
        group.offload()
        assert len(onloads) == 4
        group.policy_state()
        assert group.digest() == result.digest and len(onloads) == 4
        assert group.optimizer_digest() == store.committed(KEYS.checkpoint_prefix(2)).state["optimizer_digest"]
        saved = group.save(store.new_attempt("scratch"))
        assert (saved.digest, saved.optimizer_digest) == (group.digest(), group.optimizer_digest())
        assert [switch.name.removeprefix("policy: ") for switch in group.take_memory_switches()] == [
            "offload weights, gradients, optimizer",
            "onload weights, gradients, optimizer",
            "offload gradients, optimizer",
            "onload gradients, optimizer",
            "offload weights, gradients, optimizer",
            "onload weights",
            "onload optimizer",
        ]
        assert group.take_memory_switches() == []
    finally:
        group.kill()


def test_critic_and_refreshed_reference_resume_from_a_checkpoint(cluster: Cluster, world: SimpleNamespace) -> None:
    """PPO: round 0 trains only the critic; rounds are compared with the policy before, and distill a teacher."""
    world.trainer.kill()
    store, base, keys = world.store, world.base, RunKeys("ppo")
    commit_rollouts(store, keys, NUM_ROUNDS)
    ppo = dict(advantage_estimator="ppo", lambd=0.9, num_critic_only_steps=1, critic_lr=3e-3, ref_update_interval=1)
    opd = {"opd_kl_coef": 0.1, "opd_teacher_load": "the base, as nothing else is pinned"}
    config = TrainConfig(**CONFIG | ppo, opd=opd)
    group = TrainerGroup(cluster, world.trainer.spec.model_copy(update={"run": "ppo", "config": config}))
    try:
        commits = []
        for rollout_id in range(NUM_ROUNDS):
            commits.append(PolicyRestorer(store, keys, group, base).train_round(rollout_id))
            if rollout_id == 1:
                PolicyRestorer(store, keys, group, base).save_checkpoint(2)
        digests = [commit.state["digest"] for commit in commits]
        policies = [
            {name: bits for name, bits in digest.items() if not name.startswith("critic.")} for digest in digests
        ]
        assert policies[0] == world.begin and policies[1] != policies[0] and len(digests[0]) == 2 * len(policies[0]) + 1
        assert not digests[0].items() & digests[1].items()
        assert "train/loss" not in commits[0].summary and commits[1].summary["train/critic-value_loss"] > 0
        for commit in commits[1:]:
            assert abs(commit.state["steps"][0]["train/kl_loss"]) < 1e-8 < commit.state["steps"][1]["train/kl_loss"]

        first, second = (abs(commit.summary["rollout/opd_reverse_kl"]) for commit in commits[1:])
        assert first < 1e-8 < second

        group.kill()
        told: list[str] = []  # restoring raises unless the replay is the same, bit for bit
        PolicyRestorer(store, keys, group, base, on_progress=told.append).restore(3)
        assert told == ["loading checkpoint 2", "replaying training of rollout 2 (1 of 1)"]
    finally:
        group.kill()


def test_failed_call_kills_the_group_and_raises_its_error(world: SimpleNamespace) -> None:
    group = world.trainer
    group.ensure_started()
    with pytest.raises(AssertionError, match="asked to train policy 7"):
        group.train(world.store.committed(KEYS.rollout_prefix(0)), 7)
    assert group.policy_state() is None


def test_processes_started_ahead_build_models_later_in_the_memory_freed_for_them(world: SimpleNamespace) -> None:
    group, events = world.trainer, []
    group.kill()
    group.before_onload = lambda: events.append("memory freed")
    try:
        group.start_processes()
        started = list(group._actors)
        assert group.policy_state() is None and group.memory_use() == (0, 0) and events == []
        group.ensure_started()
        assert group._actors == started and events == ["memory freed"]
        assert group.policy_state() is not None
    finally:
        group.before_onload = lambda: None


def test_engine_and_trainer_agree_on_logprobs_after_publishing(world: SimpleNamespace, engine_pool: EnginePool) -> None:
    store, base, group = world.store, world.base, world.trainer
    PolicyRestorer(store, KEYS, group, base).restore(3)
    group.publish(engine_pool.urls, "run/3")
    assert [replica.weight_version() for replica in engine_pool.replicas] == ["run/3"]

    prompts = [[2, *range(10 + i, 15 + i), 1, 3] for i in range(4)]
    rows = asyncio.run(generated(engine_pool.urls, prompts))
    attempt = store.new_attempt(KEYS.rollout_prefix(3))
    with store.writing(attempt) as out:
        write_shards(out.path, rows)
    store.commit(KEYS.rollout_prefix(3), Commit(kind="rollout", index=3, attempt=attempt, files=out.files))
    assert (
        PolicyRestorer(store, KEYS, group, base).train_round(3).summary["train/train_rollout_logprob_abs_diff"] < 1e-4
    )


async def generated(urls: list[str], prompts: list[list[int]]) -> list[Sample]:
    """Generate eight samples of each prompt."""
    rows = []
    async with SGLangClient(urls) as client:
        for g, prompt in enumerate(prompts):
            sampling = {"temperature": TEMPERATURE, "max_new_tokens": 12}
            for i, answer in enumerate(await client.generate(prompt, sampling, n=8)):
                assert [version for version, _ in answer.weight_versions] == ["run/3"]
                logprobs = [0.0] * len(prompt) + answer.logprobs
                mask = [0] * len(prompt) + [1] * len(answer.token_ids)
                name, ids = f"3-{g}-{i}", prompt + answer.token_ids
                fields = dict(token_ids=ids, loss_mask=mask, rollout_logprobs=logprobs, reward=i % 2.0)
                rows.append(Sample(name, f"g{g}", name, 3, **fields))
    return rows


def check_saving(group: TrainerGroup, store: Store, rollout: Commit) -> None:
    """Check that each rank writes its own files once, and that loading them after more training restores weights and
    optimizer."""
    saved = group.save(store.new_attempt("scratch"))
    names = [Path(file.path).name for file in saved.files]
    attempt = saved.files[0].path.rpartition("/")[0]
    assert len(set(names)) == len(names) and {"common.pt", ".metadata", "metadata.json"} < set(names)
    written = {re.fullmatch(r"__(\d+)_\d+\.distcp", name) for name in names if name.endswith(".distcp")}
    assert {match and int(match[1]) for match in written} == set(range(len(group._actors)))
    assert (saved.digest, saved.optimizer_digest) == (group.digest(), group.optimizer_digest())
    assert any(name.startswith("exp_avg_sq@") for name in saved.optimizer_digest)

    version = group.policy_state().version
    group.train(rollout, version)
    unchanged = saved.optimizer_digest.items() & group.optimizer_digest().items()
    assert all(name.startswith("random") for name, _ in unchanged), "dropout is 0"
    group.load(version, None, Commit(kind="checkpoint", index=version, attempt=attempt, files=saved.files), {})
    assert (saved.digest, saved.optimizer_digest) == (group.digest(), group.optimizer_digest())


def test_export_of_the_held_version_equals_export_of_its_checkpoint(
    world: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    PolicyRestorer(world.store, KEYS, world.trainer, world.base).restore(2)
    checkpoint = world.store.committed(KEYS.checkpoint_prefix(2))

    def export(name: str, version: int = 2, directory: Path = tiny_model) -> Commit | None:
        write = partial(export_hf, world.store, checkpoint, Origin(tiny_model), f"exports/{name}")
        return world.trainer.export(version, directory, write)

    assert export("other", version=1) is export("other", directory=tmp_path / "missing") is None
    held = export("held")
    read = world.trainer.cluster.run(export_hf, world.store, checkpoint, Origin(tiny_model), "exports/read")
    assert held is not None and held.policy_version == 2
    assert [(Path(file.path).name, file.xxh3) for file in held.files] == [
        (Path(file.path).name, file.xxh3) for file in read.files
    ]
    assert export("held") == held  # committed: the ranks still finish gathering
    assert world.trainer.policy_state().clean


def test_optimizer_digest_detects_one_changed_moment(world: SimpleNamespace) -> None:
    import ray

    group = world.trainer
    PolicyRestorer(world.store, KEYS, group, world.base).restore(2)
    commit = world.store.committed(KEYS.checkpoint_prefix(2))
    assert group.optimizer_digest() == commit.state["optimizer_digest"]

    def change_a_moment(actor: TrainActor) -> None:
        from penstock.engines.megatron.optimizer import inner_optimizers

        (inner,) = inner_optimizers(actor.models.policy.optimizer)
        next(iter(inner.state.values()))["exp_avg"].view(-1)[0] += 1e-9

    ray.get(group._actors[0].__ray_call__.remote(change_a_moment))
    assert group.digest() == commit.state["digest"]
    changed = commit.state["optimizer_digest"].items() ^ group.optimizer_digest().items()
    assert {name for name, _ in changed} == {"exp_avg@0/1"}
    group.kill()


def test_checkpoint_is_saved_during_other_calls_and_kill_does_not_wait(world: SimpleNamespace) -> None:
    store, base, group = world.store, world.base, world.trainer
    PolicyRestorer(store, KEYS, group, base).restore(3)
    with ThreadPoolExecutor() as threads:
        saving = threads.submit(PolicyRestorer(store, KEYS, group, base).save_checkpoint, 3)
        states = [group.policy_state() for _ in range(20)]  # e.g. a publish to an engine that was replaced
        assert saving.result().policy_version == 3
        assert {state.version for state in states if state} == {3} and None not in states

        training = threads.submit(group.train, store.committed(KEYS.rollout_prefix(0)), 3)
        while group.lock.acquire(blocking=False):
            group.lock.release()  # the other thread has not begun
        group.kill()
        with pytest.raises(RankDied, match=r"(died in|cannot call) 'train'"):
            training.result()
    assert group.policy_state() is None
    PolicyRestorer(store, KEYS, group, base).restore(3)
    assert group.digest() == world.commits[2].state["digest"]


def test_ranks_save_to_and_load_from_an_object_store(
    cluster: Cluster, tiny_model: Path, object_store: Store, world: SimpleNamespace
) -> None:
    world.trainer.kill()
    store = object_store
    commit_rollouts(store, KEYS, 1)
    base: CheckpointRef = cluster.run(convert_hf, store, str(tiny_model))
    spec = world.trainer.spec
    config = spec.config.model_copy(update={"actor_num_gpus_per_node": 2})
    place = {"store": store.uri, "store_options": store.options, "config": config}
    group = TrainerGroup(cluster, spec.model_copy(update=place))
    try:
        PolicyRestorer(store, KEYS, group, base).train_round(0)
        PolicyRestorer(store, KEYS, group, base).save_checkpoint(1)
        rollout = store.committed(KEYS.rollout_prefix(0))
        check_saving(group, store, rollout)
        group.train(rollout, 1)  # a step that is not committed
        told: list[str] = []
        PolicyRestorer(store, KEYS, group, base, on_progress=told.append).restore(1)
        assert told == ["loading checkpoint 1"]
    finally:
        group.kill()
