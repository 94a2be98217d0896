"""`penstock replay`: a run trained again from its shards, and a tampered commit."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from penstock_command import penstock
from random_rollouts import commit_rollouts

from penstock.engines.cluster import Cluster
from penstock.flows.cli import main
from penstock.flows.config import PostTrainConfig
from penstock.flows.options.flags import parse_config
from penstock.flows.replay import check_replay
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.samples.shards import read_samples, read_trained_tokens
from penstock.storage.store import Store

KEYS = RunKeys("trained")
NUM_ROUNDS = 3


RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]


def test_replay_accepts_options_of_megatron_that_change_no_result(tmp_path: Path) -> None:
    recorded = parse_config(["--hf-checkpoint", "m", "--run", KEYS.run, "--store", str(tmp_path), *RECOMPUTE])
    store = Store(str(tmp_path))
    create_run_record(store, resolve("train", recorded, store))
    store.commit(KEYS.step_prefix(0), Commit(kind="step", run=KEYS.run, index=0, policy_version=1))

    def check(*words: str) -> None:
        check_replay(KEYS.run, recorded.run, parse_config(list(words)).train.model_dump(exclude_unset=True))

    for words in (["--optimizer-cpu-offload"], ["--recompute-method", "block"]):
        with pytest.raises(RunError, match="no initial weights"):  # the next check
            check(*words)
    for words in (["--recompute-modules", "layernorm"], ["--lr", "1e-3"]):
        with pytest.raises(OptionError, match=f"{words[0]} changes the result"):
            check(*words)
    with pytest.raises(OptionError, match="--recompute-num-layers"):
        check("--recompute-num-layers", "0")


@pytest.fixture(scope="module")
def store(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of three rounds with a checkpoint of version 2, in a store without its other files. Read only."""
    from penstock.engines.families import read_shape
    from penstock.stages.convert.to_torch_dist import convert_hf
    from penstock.stages.train.restore import PolicyRestorer
    from penstock.stages.train.spec import TrainerSpec
    from penstock.stages.train.trainer_group import TrainerGroup

    config = PostTrainConfig.model_validate(
        {
            "run": {"run": KEYS.run, "num_rollout": NUM_ROUNDS},
            "convert": {"hf_checkpoint": "/nowhere"},
            "train": {"lr": 1e-3, "num_steps_per_rollout": 2, "trainer_threads": 1, "keep_step_logprobs": True},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},  # 16 trajectories, two optimizer steps
        }
    )
    store = Store(str(tmp_path_factory.mktemp("replay") / "store"))
    assert create_run_record(store, resolve("train", config, store))
    commit_rollouts(store, KEYS, NUM_ROUNDS)
    base = cluster.run(convert_hf, store, str(tiny_model))
    store.create(f"{KEYS.prefix}/base.json", base.model_dump_json().encode())
    spec = TrainerSpec(
        run=KEYS.run,
        shape=read_shape(tiny_model),
        config=config.train,
        temperature=config.rollout.rollout_temperature,
        store=store.uri,
    )
    group = TrainerGroup(cluster, spec)
    for rollout_id in range(NUM_ROUNDS):
        PolicyRestorer(store, KEYS, group, base).train_round(rollout_id)
        if rollout_id == 1:
            PolicyRestorer(store, KEYS, group, base).save_checkpoint(2)
    group.kill()
    return store


@pytest.mark.integration
def test_trained_tokens_of_a_round_give_its_metrics(store: Store) -> None:
    for rollout_id in range(NUM_ROUNDS):
        step = store.committed(KEYS.step_prefix(rollout_id))
        rollout = store.committed(KEYS.rollout_prefix(rollout_id))
        assert step is not None and rollout is not None
        trained = read_trained_tokens(store, step)
        assert trained is not None
        gaps = {}
        for row, sample in zip(trained.to_pylist(), read_samples(store, rollout), strict=True):
            engine = [value for value, mask in zip(sample.rollout_logprobs, sample.loss_mask) if mask]
            assert row["sample_id"] == sample.sample_id and len(set(row["advantages"])) <= 1
            if sample.reward is None:  # not trained
                assert not row["trainer_logprobs"]
                continue
            assert len(engine) == len(row["trainer_logprobs"]) == len(row["advantages"])
            gaps.setdefault(sample.trajectory_id, []).extend(
                abs(a - b) for a, b in zip(row["trainer_logprobs"], engine)
            )
        means = [sum(values) / len(values) for values in gaps.values()]
        metric = step.summary["train/train_rollout_logprob_abs_diff"]
        assert sum(means) / len(means) == pytest.approx(metric, rel=1e-4)


@pytest.mark.integration
def test_exported_round_recomputes_the_losses_of_the_run(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "round.parquet"
    assert main(["export", KEYS.run, "--round", "1", "--output", str(file), "--store", store.root]) == 0
    assert main(["samples", str(file), "--explain", "1-7"]) == 0
    out = capsys.readouterr().out
    assert out.count("all optimizer steps are recomputed") == 2 and "DIFFERS" not in out
    step = store.committed(KEYS.step_prefix(1))
    assert step is not None and out.count("  loss: ") == 2 * len(step.state["steps"]) == 4


def penstock_replay(root: str, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return penstock("replay", KEYS.run, "--store", root, *words, env=environment, check=False)


@pytest.mark.integration
def test_replay_equals_the_run(store: Store, prefect_api: dict[str, str], tmp_path: Path) -> None:
    before = files(store)
    clean = penstock_replay(store.root, prefect_api, "--json", str(tmp_path / "replayed.json"))
    assert clean.returncode == 0, clean.stdout + clean.stderr
    assert "3 of 3 rounds are equal bit for bit" in clean.stdout
    replayed = json.loads((tmp_path / "replayed.json").read_text())
    last = store.committed(KEYS.step_prefix(2))
    assert last is not None and replayed["2"]["digest"] == last.state["digest"]
    assert files(store) == before


@pytest.mark.integration
def test_replay_with_recomputation_differs_only_in_a_tampered_tensor(
    store: Store, prefect_api: dict[str, str], tmp_path: Path
) -> None:
    root = shutil.copytree(store.root, tmp_path / "store")
    record = root / f"{KEYS.step_prefix(2)}.commit.json"
    tampered = json.loads(record.read_text())
    name = min(tampered["state"]["digest"])
    tampered["state"]["digest"][name] = "0" * 16
    record.write_text(json.dumps(tampered))
    found = penstock_replay(str(root), prefect_api, "--from", "2", *RECOMPUTE, "--optimizer-cpu-offload")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "replaying trained: rounds 2 to 2, from checkpoint 2" in found.stdout
    assert f"round    2  DIFFERS: 1 of {len(tampered['state']['digest'])} tensors differ, first {name}" in found.stdout
    assert "replaying round 2 of run 'trained' gave a policy that differs" in found.stderr


def files(store: Store) -> set[str]:
    return {str(path) for path in Path(store.root).rglob("*")}
