"""Committed rollouts of random tokens, awkward on purpose, for tests of the trainer."""

from __future__ import annotations

import random

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store


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


def commit_rollouts(store: Store, keys: RunKeys, count: int) -> None:
    """The first rounds of a run, generated and graded."""
    for rollout_id in range(count):
        attempt = store.new_attempt(keys.rollout_prefix(rollout_id))
        with store.writing(attempt) as out:
            write_shards(out.path, samples(rollout_id))
        store.commit(
            keys.rollout_prefix(rollout_id), Commit(kind="rollout", index=rollout_id, attempt=attempt, files=out.files)
        )
