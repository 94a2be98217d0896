"""Weighted sources and skipped prompts are a pure function of the state, whatever interrupts them."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.source import Prompt, PromptSource, SourceState


def source_of(*sizes: int, weights: Sequence[float] = (), shuffle: bool = True) -> PromptSource:
    files = [[f'["{file}:{row}","",{{}}]'.encode() for row in range(size)] for file, size in enumerate(sizes)]
    return PromptSource(
        files, shuffle=shuffle, seed=42, weights=weights, names=[f"f{file}" for file in range(len(sizes))]
    )


def not_a_third(prompts: Sequence[Prompt]) -> list[bool]:
    """Refuses what depends on the prompt alone."""
    return [(prompt.file + prompt.row) % 3 != 0 for prompt in prompts]


def identity(prompts: list[Prompt]) -> list[tuple[int, int, int, int]]:
    return [(prompt.issue, prompt.epoch, prompt.file, prompt.row) for prompt in prompts]


@pytest.mark.parametrize("trial", range(30))
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


def test_skipped_prompts_are_counted_and_not_numbered() -> None:
    source = source_of(9)
    prompts, state = source.take(source.restore(None), 12, not_a_third)  # 6 of 9 in every epoch
    assert [prompt.issue for prompt in prompts] == list(range(12))
    assert all(prompt.row % 3 for prompt in prompts)
    visited = state.epoch * 9 + state.cursor
    assert visited == state.issued + state.skipped
    unfiltered, _ = source.take(source.restore(None), visited)
    kept = [prompt for prompt in unfiltered if prompt.row % 3]
    assert [(prompt.epoch, prompt.row) for prompt in kept] == [(prompt.epoch, prompt.row) for prompt in prompts]


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
    assert (
        len(PromptSource.open(config.model_copy(update={"prompt_data": [two]})).take(source_of(4).restore(None), 2)[0])
        == 2
    )
    for wrong, message in (
        [["1"], "--prompt-data-weights has 1 numbers .* 2 entries"],
        [["0", "0"], "--prompt-data-weights 0.0 0.0"],
    ):
        with pytest.raises(ValueError, match=message):
            parse_config([*words[:5], *wrong])


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_invalid_weights_raise(weights: list[float]) -> None:
    options: dict[str, Any] = {"prompt_data": ["a.jsonl", "b.jsonl"], "prompt_data_weights": weights}
    with pytest.raises(ValueError, match=r"--prompt-data-weights|finite number"):
        RolloutConfig(**options)
