"""Bootstrap intervals, compared with the theory."""

import numpy as np
import pytest

from penstock.stages.eval import scores as module
from penstock.stages.eval.scores import bootstrap_intervals


def test_intervals_of_many_prompts_match_the_normal_approximation() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, size=(500, 1))
    low, high = bootstrap_intervals(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert low[0] == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high[0] == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_intervals_have_their_nominal_coverage() -> None:
    random = np.random.default_rng(0)
    rounds = 80
    inside = 0
    for _ in range(rounds):
        low, high = bootstrap_intervals((random.random((60, 1)) < 0.3).astype(float))
        inside += bool(low[0] <= 0.3 <= high[0])
    assert 0.86 <= inside / rounds < 1.0


def test_prompts_are_resampled_with_all_of_their_samples() -> None:
    """Eight equal samples of a prompt give the same interval as one."""
    passes = (np.random.default_rng(1).random((50, 1)) < 0.5).astype(float)
    one, eight = bootstrap_intervals(passes), bootstrap_intervals(8 * passes, np.full((50, 1), 8.0))
    assert one[0] == pytest.approx(eight[0]) and one[1] == pytest.approx(eight[1])


def test_equal_values_have_an_empty_interval_and_results_are_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = bootstrap_intervals(np.full((9, 1), 0.25))
    assert low == pytest.approx(0.25) and high == pytest.approx(0.25)
    values = np.random.default_rng(2).random((30, 3))
    before = bootstrap_intervals(values)
    monkeypatch.setattr(module, "_MAX_COUNTS", 30 * 7)  # in many pieces
    after = bootstrap_intervals(values)
    assert np.allclose(before, after, rtol=0, atol=1e-15)
