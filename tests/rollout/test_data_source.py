"""The order of prompts and the mixture of sources: a pure function of the state, complete in every epoch, unchanged by
appended data."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.prompts.source import (
    WHOLE,
    Prompt,
    PromptSource,
    SourceState,
    permutation,
    permuted_index,
    select_sources,
    weights_to_shares,
)


def source_of(*sizes: int, weights: Sequence[float] = (), shuffle: bool = True, seed: int = 42) -> PromptSource:
    files = [[f'["{file}:{row}","",{{}}]'.encode() for row in range(size)] for file, size in enumerate(sizes)]
    return PromptSource(files, shuffle=shuffle, seed=seed, weights=weights, names=[f"f{i}" for i in range(len(sizes))])


def names(prompts: list[Prompt]) -> list[str]:
    return [str(prompt.content) for prompt in prompts]


def test_every_epoch_holds_every_prompt_once_in_another_order() -> None:
    source = source_of(7, 4)
    prompts, state = source.take(source.restore(None), 33)  # one take over three epochs
    epochs = [names(prompts[start : start + 11]) for start in (0, 11, 22)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 11 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (state.epoch, state.cursor, state.issued) == (2, 11, 33)
    assert names(source_of(7, 4, seed=1).take(source.restore(None), 11)[0]) != epochs[0]


def test_order_is_pinned() -> None:
    """Resumed runs live on this order: if this test fails, they would repeat and skip prompts."""
    source = source_of(8)
    rows = [prompt.row for prompt in source.take(source.restore(None), 16)[0]]
    assert rows == [5, 6, 4, 0, 3, 1, 7, 2, 7, 3, 1, 2, 0, 6, 5, 4]
    assert [permuted_index(position, 42, 0, 0, 10) for position in range(10)] == [0, 9, 5, 7, 2, 8, 1, 4, 3, 6]
    in_order = source_of(2, 2, shuffle=False)
    assert names(in_order.take(in_order.restore(None), 5)[0]) == ["0:0", "0:1", "1:0", "1:1", "0:0"]


def test_appended_rows_and_files_keep_existing_order() -> None:
    old = source_of(6)
    _, state = old.take(old.restore(None), 4)
    rest = names(old.take(state, 2)[0])
    new = source_of(9, 2)  # three rows appended to the first file, and a second file
    resumed = new.restore(state.model_dump(mode="json"))
    assert [(s.file, s.start, s.rows) for s in resumed.segments] == [(0, 0, 6), (0, 6, 3), (1, 0, 2)]
    prompts, after = new.take(resumed, 7)
    assert names(prompts)[:2] == rest, "the existing permutation continues"
    assert set(names(prompts)[2:]) == {"0:6", "0:7", "0:8", "1:0", "1:1"}, "the rest of the epoch is what was appended"
    second_epoch = names(new.take(after, 11)[0])
    assert len(set(second_epoch)) == 11
    _, at_the_end = old.take(old.restore(None), 6)
    appended, _ = new.take(new.restore(at_the_end.model_dump(mode="json")), 5)
    assert all(prompt.epoch == 0 for prompt in appended), "also what is appended at the end of an epoch belongs to it"
    expected = names(old.take(at_the_end, 6)[0])
    assert second_epoch[:6] == expected, "in the next epoch the old segment has the order it would have had"


def test_changed_or_removed_rows_raise() -> None:
    source = source_of(5, 3)
    saved = source.take(source.restore(None), 2)[1].model_dump(mode="json")
    changed = source_of(5, 3)
    changed.files[1][0] = b'["other","",{}]'
    with pytest.raises(ValueError, match="rows 0 to 2 of file 2"):
        changed.restore(saved)
    with pytest.raises(ValueError, match=r"4 rows, .* 5"):
        source_of(4, 3).restore(saved)
    with pytest.raises(ValueError, match=r"file 2 of --prompt-data .*0 rows"):
        source_of(5).restore(saved)


@pytest.mark.parametrize("rows", [0, 1, 70_000])
def test_a_stored_order_is_numpys_permutation_in_half_the_memory(rows: int) -> None:
    """Runs of before were shuffled by RandomState.permutation."""
    order = permutation(42, 3, 1, rows)
    assert order.dtype == np.uint32
    assert (order == np.random.RandomState([42, 3, 1]).permutation(rows)).all()


@pytest.mark.parametrize("rows", [1, 2, 17, 1000])
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


@pytest.mark.parametrize("trial", range(4))
def test_every_source_gets_its_share_as_evenly_as_whole_prompts_allow(trial: int) -> None:
    rng = random.Random(trial)
    weights = [rng.random() for _ in range(rng.randint(2, 6))]
    asked, credits = select_sources([0] * len(weights), weights_to_shares(weights), 5000)
    assert sum(credits) == 0
    counts = np.cumsum([[source == one for one in range(len(weights))] for source in asked], axis=0)
    ideal = np.outer(np.arange(1, 5001), np.array(weights) / sum(weights))
    assert np.abs(counts - ideal).max() < 1.5


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


def not_a_third(prompts: Sequence[Prompt]) -> list[bool]:
    """Refuses what depends on the prompt alone."""
    return [(prompt.file + prompt.row) % 3 != 0 for prompt in prompts]


def identity(prompts: list[Prompt]) -> list[tuple[int, int, int, int]]:
    return [(prompt.issue, prompt.epoch, prompt.file, prompt.row) for prompt in prompts]


@pytest.mark.parametrize("trial", range(12))
def test_any_split_of_takes_and_restarts_gives_the_same_sequence(trial: int) -> None:
    rng = random.Random(trial)
    sizes = [rng.randint(2, 9) for _ in range(rng.randint(1, 4))]
    weights = [rng.random() + 0.05 for _ in sizes] if len(sizes) > 1 and rng.random() < 0.7 else []
    prompt_filter = not_a_third if rng.random() < 0.7 else None
    new = lambda: source_of(*sizes, weights=weights)
    whole, end = new().take(new().restore(None), 80, prompt_filter)
    source, saved, pieces = new(), None, []
    while len(pieces) < 80:
        state = source.restore(saved)
        prompts, after = source.take(state, min(rng.randint(1, 25), 80 - len(pieces)), prompt_filter)
        if rng.random() < 0.3:  # a crash before the commit
            assert new().take(state, len(prompts), prompt_filter) == (prompts, after)
        pieces += prompts
        saved = after.model_dump(mode="json")
        if rng.random() < 0.5:
            source = new()  # a new process
    assert pieces == whole and saved == end.model_dump(mode="json")
    assert [prompt.issue for prompt in pieces] == list(range(80))


def test_every_source_has_its_own_epochs_and_its_share() -> None:
    source = source_of(3, 50, weights=[0.75, 0.25])
    prompts, state = source.take(source.restore(None), 40)
    assert Counter(prompt.file for prompt in prompts) == {0: 30, 1: 10}
    first = [prompt for prompt in prompts if prompt.file == 0]
    for epoch in range(10):
        assert sorted(prompt.row for prompt in first if prompt.epoch == epoch) == [0, 1, 2]
    assert [(place.epoch, place.cursor) for place in state.places] == [(9, 3), (0, 10)]
    assert (state.issued, state.skipped) == (40, 0)


def test_shares_are_those_of_the_prompts_served() -> None:
    """Half of one source is skipped; the mixture does not notice."""
    source = source_of(40, 40, weights=[0.5, 0.5])
    prompt_filter = lambda prompts: [prompt.file == 1 or prompt.row % 2 == 0 for prompt in prompts]
    prompts, state = source.take(source.restore(None), 40, prompt_filter)
    assert Counter(prompt.file for prompt in prompts) == {0: 20, 1: 20}
    assert state.places[0].cursor == 20 + state.skipped and state.places[1].cursor == 20


def test_epoch_without_short_prompt_raises() -> None:
    source = source_of(5, 7, weights=[1, 1])
    with pytest.raises(ValueError, match=r"7 prompts of f1 .*--rollout-max-prompt-len"):
        source.take(source.restore(None), 6, lambda prompts: [prompt.file == 0 for prompt in prompts])
    rare = lambda prompts: [prompt.row == 4 for prompt in prompts]
    assert [prompt.epoch for prompt in source_of(5).take(source_of(5).restore(None), 7, rare)[0]] == list(range(7))


def test_run_that_gets_weights_keeps_position_in_each_source() -> None:
    plain = source_of(4, 6)
    before, state = plain.take(plain.restore(None), 17)  # 4 + 6, then 4 + 3 of the second epoch
    mixed = source_of(4, 6, weights=[0.5, 0.5])
    resumed = mixed.restore(state.model_dump(mode="json"))
    assert [(place.epoch, place.cursor) for place in resumed.places] == [(1, 4), (1, 3)]
    after, _ = mixed.take(resumed, 6)
    second = [prompt for prompt in [*before[10:], *after] if prompt.file == 1 and prompt.epoch == 1]
    assert sorted(prompt.row for prompt in second) == list(range(6)), "the rest of its epoch, nothing twice"
    assert [prompt.epoch for prompt in after if prompt.file == 0] == [2, 2, 2]


def test_mixed_run_accepts_new_sources_and_weights_but_not_missing_weights() -> None:
    two = source_of(4, 6, weights=[0.5, 0.5])
    _, state = two.take(two.restore(None), 5)
    saved = state.model_dump(mode="json")
    three = source_of(4, 8, 3, weights=[1, 0, 1])
    resumed = three.restore(saved)
    assert [(place.epoch, place.cursor) for place in resumed.places] == [(0, 3), (0, 2), (0, 0)]
    prompts, after = three.take(resumed, 8)
    assert Counter(prompt.file for prompt in prompts) == {0: 4, 2: 4}
    assert [(s.file, s.start, s.rows) for s in after.segments] == [(0, 0, 4), (1, 0, 6), (1, 6, 2), (2, 0, 3)]
    with pytest.raises(ValueError, match="--prompt-data-weights"):
        source_of(4, 6).restore(saved)


def test_large_segment_keeps_its_kind_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.stages.rollout.prompts import source as data_source

    old = source_of(20)
    expected, _ = old.take(old.restore(None), 60)
    first = old.take(old.restore(None), 5)[1].model_dump(mode="json")
    monkeypatch.setattr(data_source, "LARGE", 10)
    grown = source_of(40)
    resumed = grown.restore(first)
    assert [segment.order for segment in resumed.segments] == ["stored", "computed"]
    prompts, _ = grown.take(resumed, 35)
    assert identity(prompts)[:15] == identity(expected)[5:20]
    assert sorted(prompt.row for prompt in prompts[15:]) == list(range(20, 40))
    dumped = resumed.model_dump(mode="json")
    assert SourceState.model_validate(dumped) == resumed


def test_flags_create_weighted_source(tmp_path: Path) -> None:
    from penstock.flows.options.flags import parse_config

    one, two = (write_jsonl(tmp_path / f"{name}.jsonl", [{"input": name}] * 4) for name in ("one", "two"))
    words = ["--prompt-data", one, "--prompt-data", two, "--prompt-data-weights", "3", "1"]
    config = parse_config(words).rollout
    source = PromptSource.open(config)
    assert Counter(str(prompt.content) for prompt in source.take(source.restore(None), 8)[0]) == {"one": 6, "two": 2}
    plain = PromptSource.open(config.model_copy(update={"prompt_data": [two]}))
    assert len(plain.take(source_of(4).restore(None), 2)[0]) == 2
