"""Rounds that a fork trains on its parent's rollouts: their metrics by naive loops, and the bound before the commit."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from random_rollouts import samples
from test_restore import BASE, ListTrainer, write

from penstock.stages.train.config import TrainConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.reuse import Reuse, cosine, effective_sample_size, reuse_metrics
from penstock.storage.commit import Commit, FileRecord, RunKeys
from penstock.storage.errors import GateFailed
from penstock.storage.samples.sample import Sample, to_table
from penstock.storage.samples.shards import TOKENS_SCHEMA, write_shards, write_trained_tokens
from penstock.storage.store import Store

COMPARED = pa.schema([TOKENS_SCHEMA.field(name) for name in ("sample_id", "trainer_logprobs", "advantages")])

PARENT, FORK = RunKeys("parent"), RunKeys("run")


def tokens_of(rows: list[Sample], seed: int, scale: float = 0.3) -> pa.Table:
    """Return random log-probs near those of the samples, and an advantage for each sample."""
    rng, values = random.Random(seed), defaultdict(list)
    for row in rows:
        mask = trained_positions(row)
        values["sample_id"].append(row.sample_id)
        values["trainer_logprobs"].append([row.rollout_logprobs[i] + rng.gauss(0, scale) for i in mask])
        values["advantages"].append([rng.choice((0.0, -1.0, 1.0)) * rng.random()] * len(mask))
    return pa.table(dict(values), schema=COMPARED)


def trained_positions(row: Sample) -> list[int]:
    return [] if row.reward is None else [i for i, m in enumerate(row.loss_mask) if m and i]


def naive_size(log_weights: list[float]) -> float:
    weights = [math.exp(w) for w in log_weights]
    return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({}, "trajectory_id"),
        ({"calculate_per_token_loss": True}, None),
        ({"calculate_per_prompt_loss": True}, "group_id"),
    ],
    ids=str,
)
def test_metrics_are_those_of_a_naive_loop(options: dict[str, Any], unit: str | None) -> None:
    rows = samples(7)
    own, parent = tokens_of(rows, 1), tokens_of(rows, 2)
    metrics = reuse_metrics(to_table(rows), own, parent, TrainConfig(**options).loss_unit)
    ratios, sums, now, before, flips = [], [], [], [], 0
    length = defaultdict(int)
    for row in rows:
        length[unit and getattr(row, unit)] += len(trained_positions(row))
    for row, mine, theirs in zip(rows, own.to_pylist(), parent.to_pylist(), strict=True):
        pairs = list(zip(mine["trainer_logprobs"], [row.rollout_logprobs[i] for i in trained_positions(row)]))
        ratios += [a - b for a, b in pairs]
        sums += [sum(a - b for a, b in pairs)] if pairs else []
        weight = 1 / length[getattr(row, unit)] if unit and pairs else 1.0
        now += [weight * a for a in mine["advantages"]]
        before += [weight * a for a in theirs["advantages"]]
        flips += sum(a * b < 0 for a, b in zip(mine["advantages"], theirs["advantages"]))
    dot = sum(a * b for a, b in zip(now, before))
    assert metrics == pytest.approx(
        {
            "reuse/ess_tokens": naive_size(ratios),
            "reuse/ess_samples": naive_size(sums),
            "reuse/advantage_flips": flips / len(now),
            "reuse/advantage_weight_cosine": dot / math.hypot(*now) / math.hypot(*before),
        },
        rel=1e-6,
    )
    assert 0.1 < metrics["reuse/advantage_flips"] < 0.9 and metrics["reuse/ess_samples"] < metrics["reuse/ess_tokens"]


def test_samples_that_the_parent_has_not_trained_are_not_compared_with_it() -> None:
    rows = samples(7)
    graded = [replace(row, reward=0.5) for row in rows]
    assert rows[5].reward is None and trained_positions(graded[5])
    own, parent = tokens_of(graded, 1), tokens_of(rows, 2)
    pairs = zip(own["advantages"].to_pylist(), parent["advantages"].to_pylist(), strict=True)
    products = [a * b for mine, theirs in pairs for a, b in zip(mine, theirs)]  # zip ends with the shorter list
    metrics = reuse_metrics(to_table(graded), own, parent, loss_unit=None)
    assert metrics["reuse/advantage_flips"] == pytest.approx(sum(product < 0 for product in products) / len(products))


def test_tokens_that_user_code_has_masked_are_left_out() -> None:
    rows = [replace(row, reward=0.5) for row in samples(7)]
    own = tokens_of(rows, 1).to_pydict()
    others = {name: [*own[name][:5], *own[name][6:]] for name in own}
    for name in ("trainer_logprobs", "advantages"):  # as the trainer writes such tokens
        own[name][5] = [0.0] * len(own[name][5])
    masked, rest = (
        reuse_metrics(to_table(kept), pa.table(values, schema=COMPARED), None, loss_unit=None)
        for kept, values in ((rows, own), ([*rows[:5], *rows[6:]], others))
    )
    assert masked == pytest.approx(rest)


def test_samples_without_logprobs_or_without_tokens_have_no_metrics() -> None:
    rows = [replace(row, rollout_logprobs=[0.0] * len(row.loss_mask)) for row in samples(7)]
    assert reuse_metrics(to_table(rows), tokens_of(rows, 1), None, loss_unit="trajectory_id") == {}
    rows = [replace(row, reward=None) for row in samples(7)]
    assert reuse_metrics(to_table(rows), tokens_of(rows, 1), None, loss_unit="trajectory_id") == {}


def test_effective_sample_size_has_its_limits_and_does_not_overflow() -> None:
    assert effective_sample_size(np.array([-3000.0, -3000.0, -3000.0])) == 1.0
    assert effective_sample_size(np.array([900.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert (cosine(np.zeros(2), np.zeros(2)), cosine(np.zeros(2), np.ones(2))) == (1.0, 0.0)
    assert cosine(np.ones(2), -np.ones(2)) == pytest.approx(-1.0)


# ---- the trained round -----------------------------------------------------------------------------------------------


class TokenTrainer(ListTrainer):
    """Writes the log-probs of a policy that is `distance` away from the one that sampled the tokens."""

    distance, advantage_seed = 0.1, 1

    def train(self, rollout: Commit, version: int, attempt: str | None = None, earlier: object = ()):
        self.version = version
        return super().train(rollout, version, attempt)

    def write(self, attempt: str) -> list[FileRecord]:
        table = tokens_of(samples(self.version), self.advantage_seed, self.distance).to_pydict()
        numbers = np.array([len(values) for values in table["advantages"]])
        flat = {name: np.array([v for row in table[name] for v in row]) for name in COMPARED.names[1:]}
        with self.store.writing(attempt) as out:
            write_trained_tokens(out.path, pa.chunked_array([table["sample_id"]]), numbers, flat)
        return out.files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A parent with two trained rounds, and a fork with its rollouts."""
    store = Store(str(tmp_path))
    write(store, "models/base", "model", 0, ["base"])
    for index in range(2):
        prefix = PARENT.rollout_prefix(index)
        attempt = store.new_attempt(prefix)
        with store.writing(attempt) as out:
            write_shards(out.path, samples(index))
        for keys in (PARENT, FORK):
            commit = Commit(kind="rollout", run=keys.run, index=index, attempt=attempt, files=out.files)
            store.commit(keys.rollout_prefix(index), commit)
        trainer, attempt = TokenTrainer(store), store.new_attempt(PARENT.step_prefix(index))
        trainer.version = index
        step = Commit(kind="step", run="parent", index=index, attempt=attempt, files=trainer.write(attempt))
        store.commit(PARENT.step_prefix(index), step)
    return store


def reuse(bound: float = 0.5, rounds: range = range(2)) -> Reuse:
    return Reuse(PARENT, rounds, bound, loss_unit="trajectory_id")


def test_a_reused_round_is_committed_with_its_metrics_and_replays_without_them(store: Store) -> None:
    group = TokenTrainer(store)
    group.spec.config = group.spec.config.model_copy(update={"save_trained_tokens": False})
    policy = PolicyRestorer(store, FORK, group, BASE)
    step = policy.train_round(0, reuse())
    assert step.summary["reuse/ess_tokens"] == pytest.approx(0.99, abs=0.01)
    assert step.summary["reuse/advantage_weight_cosine"] == pytest.approx(1.0)
    assert step.files, "a reused round always stores its tokens"
    group.advantage_seed = 2
    step = policy.train_round(1, reuse())
    assert step.summary["reuse/advantage_flips"] > 0.1
    policy.load_checkpoint(0)
    assert policy.replay_round(0).verdict == "equal bit for bit"


def test_rounds_after_the_reused_ones_are_not_compared(store: Store) -> None:
    policy = PolicyRestorer(store, FORK, TokenTrainer(store), BASE)
    policy.train_round(0, reuse(rounds=range(1)))
    group = policy.group
    group.spec.config = group.spec.config.model_copy(update={"save_trained_tokens": False})
    later = policy.train_round(1, reuse(rounds=range(1)))
    assert not any(name.startswith("reuse/") for name in later.summary) and not later.files


def test_a_round_below_the_bound_is_not_committed_and_may_be_trained_with_a_lower_bound(store: Store) -> None:
    group = TokenTrainer(store)
    policy = PolicyRestorer(store, FORK, group, BASE)
    policy.train_round(0, reuse())
    group.distance = 2.0
    with pytest.raises(
        GateFailed, match=r"round 1: .* 0\.\d+, below --min-effective-sample-size 0\.5.*--num-rollout 1"
    ):
        policy.train_round(1, reuse())
    assert store.committed(FORK.step_prefix(1)) is None
    step = policy.train_round(1, reuse(0.0))
    assert 0 < step.summary["reuse/ess_tokens"] < 0.5
    assert group.weights == ["base", "r0", "r1"], "the uncommitted step was undone"


def test_a_round_that_the_parent_has_not_trained_has_only_the_sizes(store: Store) -> None:
    store.delete([f"{PARENT.step_prefix(0)}.commit.json"])
    step = PolicyRestorer(store, FORK, TokenTrainer(store), BASE).train_round(0, reuse())
    assert [name for name in step.summary if name.startswith("reuse/")] == ["reuse/ess_tokens", "reuse/ess_samples"]
