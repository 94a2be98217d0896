"""Bootstrap intervals, against what statistics says they must be."""

import numpy as np
import pytest

from stages.eval import intervals as module
from stages.eval.intervals import intervals


def test_they_are_as_wide_as_the_normal_ones_of_many_prompts() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, size=(500, 1))
    low, high = intervals(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert low[0] == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high[0] == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_they_cover_what_they_promise() -> None:
    random = np.random.default_rng(0)
    rounds = 80
    inside = 0
    for _ in range(rounds):
        low, high = intervals((random.random((60, 1)) < 0.3).astype(float))
        inside += bool(low[0] <= 0.3 <= high[0])
    assert 0.86 <= inside / rounds < 1.0


def test_a_prompt_comes_with_all_of_its_samples() -> None:
    """8 samples of a prompt that all agree are worth one, not 8."""
    passes = (np.random.default_rng(1).random((50, 1)) < 0.5).astype(float)
    one, eight = intervals(passes), intervals(8 * passes, np.full((50, 1), 8.0))
    assert one[0] == pytest.approx(eight[0]) and one[1] == pytest.approx(eight[1])


def test_equal_values_leave_no_doubt_and_the_same_numbers_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = intervals(np.full((9, 1), 0.25))
    assert low == pytest.approx(0.25) and high == pytest.approx(0.25)
    values = np.random.default_rng(2).random((30, 3))
    before = intervals(values)
    monkeypatch.setattr(module, "_NUMBERS_AT_ONCE", 30 * 7)  # in many pieces
    after = intervals(values)
    assert np.allclose(before, after, rtol=0, atol=1e-15)
