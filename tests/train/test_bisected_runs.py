"""`penstock bisect` on 20 runs with a poisoned round, with a small model in place of trainer engine and engines."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from bisected_runs import CONFIG, DATA_SET, INTERVAL, KEYS, ROUNDS, Run, TinyEngine

from penstock.stages.eval.bisection import find_fall, largest_cost, rank_groups, reward_contrast
from penstock.stages.train.batching import Batch
from penstock.stages.train.influence import NUM_STEPS
from penstock.stages.train.step import Clock, prepare_round
from penstock.storage.commit import Commit
from penstock.storage.samples.shards import read_table
from tests.train.bigram_engine import process_group  # noqa: F401 fixture

BOUND, NUM_RUNS = 0.85, 20
# The parameters of the runs (bisected_runs.py) were chosen with seeds below 100, `falls_only_by_the_poison` with seeds
# from 1000 to 1059. These seeds were used for neither.
FIRST_SEED, MAX_SEEDS = 2000, 24


def commit_at(run: Run, prefix: str) -> Commit:
    commit = run.store.committed(prefix)
    assert commit is not None
    return commit


def poisoned_groups_at_the_top(run: Run, before: int) -> bool:
    """Whether all poisoned groups are among the top five of a round."""
    evaluations = [commit_at(run, KEYS.eval_prefix(version, DATA_SET)) for version in (before, before + 1)]
    contrast = reward_contrast([read_table(run.store, commit) for commit in evaluations])
    run.policy.save_checkpoint(before)
    influence = run.policy.influence_of_samples(before, evaluations, contrast.tolist())
    samples = read_table(run.store, commit_at(run, KEYS.rollout_prefix(before)))
    return run.poisoned <= {group.group_id for group in rank_groups(samples, influence)[:5]}


def test_influence_is_the_inner_product_of_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD moves along the gradient, so that the inner product is the plain one."""
    run, evaluated = Run(tmp_path, 3), []
    before, actor = run.poisoned_round, run.group.actor
    for version in (before, before + 1):
        run.evaluate(version)
        evaluated.append(commit_at(run, KEYS.eval_prefix(version, DATA_SET)))
    run.policy.save_checkpoint(before)
    step = TinyEngine.optimizer_step

    def small_step(engine: TinyEngine) -> tuple[bool, float, list[float]]:
        engine.optimizer.param_groups[0]["lr"] = 1e-2
        return step(engine)

    monkeypatch.setattr(TinyEngine, "optimizer_step", small_step)
    tables = [read_table(run.store, commit) for commit in evaluated]
    contrast = reward_contrast(tables)
    influence = np.array(run.policy.influence_of_samples(before, evaluated, contrast.tolist()))
    assert not actor.state().clean, "the weights are not those of a version"
    run.policy.restore(before)
    weights = [actor.engine.embedding, actor.engine.output]

    def logprobs(samples: pa.Table) -> torch.Tensor:
        tokens = torch.tensor(samples["token_ids"].to_pylist())
        logits = actor.engine.embedding[tokens[:, 0]] @ actor.engine.output
        return torch.log_softmax(logits, 1)[torch.arange(len(tokens)), tokens[:, 1]]

    table = read_table(run.store, commit_at(run, KEYS.rollout_prefix(before)))
    round_ = prepare_round(actor.models, Batch.from_table(table, needs_rewards=True), CONFIG, 1.0, Clock())
    shares = round_.weights.weights * round_.estimate.advantages * logprobs(table)
    goal = (torch.from_numpy(contrast) * logprobs(pa.concat_tables(tables))).mean()
    direction = torch.autograd.grad(goal, weights)
    exact = [
        sum(float((a * b).sum()) for a, b in zip(torch.autograd.grad(share, weights, retain_graph=True), direction))
        for share in shares
    ]
    size = 1e-2 * sum(sum(0.5**k for k in range(n + 1)) for n in range(NUM_STEPS))  # of all steps, with momentum 0.5
    np.testing.assert_allclose(influence, size * np.array(exact), rtol=0.05, atol=1e-5)
    assert np.abs(exact).max() * size > 1e-3


def falls_only_by_the_poison(run: Run) -> bool:
    """Whether the policy gives right answers with a mean probability of at least BOUND up to the poisoned round and
    below BOUND after it. Otherwise it fell without the poison or recovered, and there is no single fall to find."""
    means = []
    for version in range(ROUNDS + 1):
        run.policy.restore(version)
        probabilities = run.group.actor.engine.answer_probabilities()
        means.append(probabilities[np.arange(len(run.right)), run.right].mean())
    return [mean >= BOUND for mean in means] == [version <= run.poisoned_round for version in range(ROUNDS + 1)]


@pytest.mark.integration
def test_the_poisoned_round_and_its_groups_are_found(tmp_path: Path) -> None:
    runs = (Run(tmp_path / str(seed), seed) for seed in range(FIRST_SEED, FIRST_SEED + MAX_SEEDS))
    chosen = list(itertools.islice(filter(falls_only_by_the_poison, runs), NUM_RUNS))
    assert len(chosen) == NUM_RUNS, f"only {len(chosen)} of {MAX_SEEDS} runs fall by the poison alone"
    rounds, ranked = 0, 0
    for run in chosen:
        cost = largest_cost(0, ROUNDS, {}, BOUND, range(INTERVAL, ROUNDS + 1, INTERVAL))
        assert cost.evaluations == 6, "two ends, and the logarithm of 12"
        values: dict[int, float] = {}
        run.group.calls.clear()
        before, _ = find_fall(0, ROUNDS, values, BOUND, run.evaluate)
        assert len(values) <= cost.evaluations and run.group.calls.count("train") <= cost.rounds
        rounds += before == run.poisoned_round
        ranked += before == run.poisoned_round and poisoned_groups_at_the_top(run, before)
    assert rounds == NUM_RUNS
    assert ranked >= 18, ranked
