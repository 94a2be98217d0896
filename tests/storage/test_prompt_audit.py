"""The prompt audit follows a real data source: weighted files, growing files and skipped prompts, in any mixture."""

import random

import numpy as np
import pytest

from penstock.stages.rollout.prompts.source import PromptSource
from penstock.storage.commit import Commit
from penstock.storage.maintenance.prompt_audit import PromptAudit, ServedRound


def random_run(trial: int) -> tuple[list[tuple[Commit, dict[int, tuple[int, int, int]]]], int]:
    """Return the rounds of a run with growing files and perhaps weights from some round on, and its skipped prompts."""
    rng = random.Random(trial)
    sizes = [rng.randint(2, 9) for _ in range(rng.randint(1, 3))]
    prompt_filter = (
        (lambda prompts: [(prompt.file + prompt.row) % 4 != 0 for prompt in prompts]) if rng.random() < 0.7 else None
    )
    weighted, weights_from = rng.random() < 0.7, rng.randint(0, 8)
    rounds, saved, skipped = [], None, 0
    for number in range(12):
        if rng.random() < 0.2:
            sizes[rng.randrange(len(sizes))] += rng.randint(1, 3)
        files = [[f'["{file}:{row}","",{{}}]'.encode() for row in range(size)] for file, size in enumerate(sizes)]
        weights = (
            [1 + file for file in range(len(sizes))] if weighted and number >= weights_from and len(sizes) > 1 else []
        )
        source = PromptSource(files, shuffle=True, seed=1, weights=weights)
        prompts, after = source.take(source.restore(saved), rng.randint(1, 12), prompt_filter)
        saved, skipped = after.model_dump(mode="json"), after.skipped
        commit = Commit(kind="rollout", run="r", index=number, policy_version=number, state={"data_source": saved})
        rounds.append((commit, {prompt.issue: (prompt.epoch, prompt.file, prompt.row) for prompt in prompts}))
    return rounds, skipped


def round_of(served: dict[int, tuple[int, int, int]]) -> ServedRound:
    return ServedRound([], np.empty(0, dtype=np.uint64), served)


@pytest.mark.parametrize("trial", range(20))
def test_a_correct_run_has_no_problems(trial: int) -> None:
    rounds, _ = random_run(trial)
    found = PromptAudit(set())
    assert [
        found.audit_round(f"rollouts/{commit.index:06d}", commit, round_of(served)) for commit, served in rounds
    ] == [[]] * 12


def test_a_repeated_prompt_or_an_unrecorded_skip_is_reported() -> None:
    num_found = 0
    for trial in range(20):
        rounds, skipped = random_run(trial)
        if skipped:
            rounds[-1][0].state["data_source"]["skipped"] += 1
            follow = PromptAudit(set())
            assert [follow.audit_round("p", commit, round_of(served)) for commit, served in rounds][-1], trial
        rounds, _ = random_run(trial)
        served = rounds[-1][1]
        first = served[min(served)]
        for issue in list(served)[1:]:
            if served[issue][0] == first[0] and served[issue][1] == first[1]:
                served[issue] = first
                follow = PromptAudit(set())
                assert any(
                    "already used in epoch" in line
                    for commit, s in rounds
                    for line in follow.audit_round("p", commit, round_of(s))
                ), trial
                num_found += 1
                break
    assert num_found > 5
