"""Permutations and the selection of sources: exact, complete and stable."""

import random

import numpy as np
import pytest

from penstock.stages.rollout.prompts.source import WHOLE, permutation, permuted_index, select_sources, weights_to_shares


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 1000, 70_000])
def test_a_stored_order_is_numpys_permutation_in_half_the_memory(rows: int) -> None:
    """Runs of before were shuffled by RandomState.permutation."""
    order = permutation(42, 3, 1, rows)
    assert order.dtype == np.uint32
    assert (order == np.random.RandomState([42, 3, 1]).permutation(rows)).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, 255, 1000])
def test_computed_order_has_every_row_once_and_depends_on_seed_epoch_and_segment(rows: int) -> None:
    orders = [
        [permuted_index(position, *which, rows) for position in range(rows)]
        for which in ((42, 0, 0), (42, 1, 0), (42, 0, 1), (7, 0, 0))
    ]
    assert all(sorted(order) == list(range(rows)) for order in orders)
    if rows >= 16:
        assert len({tuple(order) for order in orders}) == 4


def test_a_computed_order_is_random_enough() -> None:
    rows = 10_007
    order = np.array([permuted_index(position, 42, 0, 0, rows) for position in range(rows)])
    assert abs(np.corrcoef(np.arange(rows), order)[0, 1]) < 0.03, "3 standard deviations of a random order"
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert len({permuted_index(position, 42, 0, 0, 1 << 40) for position in range(1000)}) == 1000, (
        "no memory, however many rows"
    )


def test_a_computed_order_is_pinned() -> None:
    """Resumed runs live on this order: if this test fails, they would repeat and skip prompts."""
    assert [permuted_index(position, 42, 0, 0, 10) for position in range(10)] == [0, 9, 5, 7, 2, 8, 1, 4, 3, 6]


@pytest.mark.parametrize("trial", range(20))
def test_every_source_gets_its_share_as_evenly_as_whole_prompts_allow(trial: int) -> None:
    rng = random.Random(trial)
    weights = [rng.random() for _ in range(rng.randint(2, 6))]
    asked, credits = select_sources([0] * len(weights), weights_to_shares(weights), 5000)
    assert sum(credits) == 0
    counts = np.cumsum([[source == one for one in range(len(weights))] for source in asked], axis=0)
    ideal = np.outer(np.arange(1, 5001), np.array(weights) / sum(weights))
    assert np.abs(counts - ideal).max() < 1.5


def test_selecting_sources_in_pieces_gives_same_order() -> None:
    parts = weights_to_shares([0.7, 0.2, 0.1])
    whole, after = select_sources([0, 0, 0], parts, 100)
    first, credits = select_sources([0, 0, 0], parts, 37)
    second, end = select_sources(credits, parts, 63)
    assert (first + second, end) == (whole, after)
    assert [whole.count(source) for source in range(3)] == [70, 20, 10]


def test_shares_are_integers_with_fixed_sum() -> None:
    for weights in ([1, 1, 1], [0.7, 0.3], [0, 5], [1e-12, 1, 3]):
        assert sum(weights_to_shares(weights)) == WHOLE
    assert weights_to_shares([0, 5]) == [0, WHOLE]
    asked, _ = select_sources([WHOLE // 2, -WHOLE // 2], weights_to_shares([0, 1]), 50)
    assert set(asked) == {1}, "a source without a share is not asked, whatever is owed to it"


def test_changed_weights_are_not_made_up_for() -> None:
    _, credits = select_sources([0, 0], weights_to_shares([0.9, 0.1]), 1000)
    asked, _ = select_sources(credits, weights_to_shares([0.5, 0.5]), 10)
    assert asked.count(0) == 5
