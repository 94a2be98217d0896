"""The audit's way through the data, beside a real data source: weighted, with prompts skipped, in any mixture."""

import random

import numpy as np
import pytest

from stages.rollout.prompts.source import PromptSource
from storage.refs import Commit
from storage.served import Course, Round


def course(trial: int) -> tuple[list[tuple[Commit, dict[int, tuple[int, int, int]]]], int]:
    """Rounds of a run whose files grow and that may get weights half-way; and how many prompts it has skipped."""
    rng = random.Random(trial)
    sizes = [rng.randint(2, 9) for _ in range(rng.randint(1, 3))]
    admits = (lambda prompts: [(prompt.file + prompt.row) % 4 != 0 for prompt in prompts]) if rng.random() < 0.7 else None
    weighted, weights_from = rng.random() < 0.7, rng.randint(0, 8)
    rounds, saved, skipped = [], None, 0
    for number in range(12):
        if rng.random() < 0.2:
            sizes[rng.randrange(len(sizes))] += rng.randint(1, 3)
        files = [[f'["{file}:{row}","",{{}}]'.encode() for row in range(size)] for file, size in enumerate(sizes)]
        weights = [1 + file for file in range(len(sizes))] if weighted and number >= weights_from and len(sizes) > 1 else []
        source = PromptSource(files, shuffle=True, seed=1, weights=weights)
        prompts, after = source.take(source.restore(saved), rng.randint(1, 12), admits)
        saved, skipped = after.model_dump(mode="json"), after.skipped
        commit = Commit(kind="rollout", run="r", index=number, policy_version=number, state={"data_source": saved})
        rounds.append((commit, {prompt.issue: (prompt.epoch, prompt.file, prompt.row) for prompt in prompts}))
    return rounds, skipped


def holds(served: dict[int, tuple[int, int, int]]) -> Round:
    return Round([], np.empty(0, dtype=np.uint64), served)


@pytest.mark.parametrize("trial", range(60))
def test_a_true_run_has_no_findings(trial: int) -> None:
    rounds, _ = course(trial)
    found = Course(set())
    assert [found.follow(f"rollouts/{commit.index:06d}", commit, holds(served)) for commit, served in rounds] == [[]] * 12


def test_a_prompt_served_twice_or_a_skip_that_is_not_told_is_found() -> None:
    num_found = 0
    for trial in range(60):
        rounds, skipped = course(trial)
        if skipped:
            rounds[-1][0].state["data_source"]["skipped"] += 1
            follow = Course(set())
            assert [follow.follow("p", commit, holds(served)) for commit, served in rounds][-1], trial
        rounds, _ = course(trial)
        served = rounds[-1][1]
        first = served[min(served)]
        for issue in list(served)[1:]:
            if served[issue][0] == first[0] and served[issue][1] == first[1]:
                served[issue] = first
                follow = Course(set())
                assert any("served before" in line for commit, s in rounds for line in follow.follow("p", commit, holds(s))), (
                    trial
                )
                num_found += 1
                break
    assert num_found > 20
