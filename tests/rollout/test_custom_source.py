"""User-defined data sources in common forms, and their two base classes."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Bench

from penstock.stages.rollout.prompts.data_source import (
    Dataset,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    RolloutRound,
    open_data_source,
    take_checked_groups,
)
from penstock.stages.rollout.prompts.source import LengthFilter, PromptSource
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError

SEED = """
    class RolloutDataSource:
        def get_samples(self, num_samples):
            return self.dataset.sample(num_samples)

        def add_samples(self, samples):
            pass
"""
SEED_WITH_BUFFER = """
    from penstock.stages.rollout.prompts.data_source import RolloutDataSource

    class RolloutDataSourceWithBuffer(RolloutDataSource):
        def __init__(self):
            self.buffer = []

        def add_samples(self, samples):
            self.buffer.extend(samples)

        def buffer_filter(self, args, buffer, num_samples):
            return sorted(buffer, key=lambda group: -len(group[0].response))[:num_samples]
"""


PathOf = Callable[[str], str]
OpenSource = Callable[..., RolloutDataSource]


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer) -> Bench:
    return Bench(tmp_path, tokenizer)


@pytest.fixture
def path_of(tmp_path: Path) -> PathOf:
    """A function that writes code to a new file."""

    def write(code: str) -> str:
        file = tmp_path / f"source_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(textwrap.dedent(code))
        return str(file)

    return write


@pytest.fixture
def open_source(bench: Bench, path_of: PathOf) -> OpenSource:
    """A function that opens the source of `code`, or the default one, over ten prompts."""

    def open(code: str | None = None, buffer_filter: Any = None) -> RolloutDataSource:
        config = bench.config.model_copy(update={"data_source_path": path_of(code) if code else None})
        prompts, prompt_filter = PromptSource.open(config), LengthFilter(config, bench.tokenizer)
        dataset = Dataset(config, prompts, bench.tokenizer, RolloutRound("run", 3, 5), prompt_filter)
        source = open_data_source(config, dataset)
        if buffer_filter is not None:
            source.filter = buffer_filter  # type: ignore[attr-defined]
        return source

    return open


def ids(groups: list[list[Any]]) -> list[str]:
    return [group[0].group_id for group in groups]


def test_default_source_serves_prompts_in_order(bench: Bench, open_source: OpenSource) -> None:
    source = open_source()
    prompts, _ = source.dataset.prompts.take(source.dataset.state, 6)
    groups = take_checked_groups(source, 4) + take_checked_groups(source, 2)
    assert ids(groups) == [f"{issue:09d}" for issue in range(6)]
    assert [group[0].metadata["i"] for group in groups] == [prompt.row for prompt in prompts]
    sample = groups[0][1]
    assert (sample.sample_id, sample.rollout_id, sample.policy_versions) == ("000000000-01", 3, (5, 5))
    assert sample.prompt == bench.tokenizer.render([prompts[0].content])[0]
    assert sample.token_ids == bench.tokenizer.encode([sample.prompt])[0] and not any(sample.loss_mask)


def test_source_continues_from_state(open_source: OpenSource) -> None:
    whole = take_checked_groups(open_source(), 9)
    source = open_source()
    first = take_checked_groups(source, 4)
    saved = json.loads(json.dumps(source.state_dict()))
    again = open_source()
    again.load_state_dict(saved)
    assert first + take_checked_groups(again, 5) == whole
    again.load_state_dict(saved)
    assert take_checked_groups(again, 5) == whole[4:], "a round that is done again gets the same"
    again.load_state_dict({})
    assert take_checked_groups(again, 9) == whole


@pytest.mark.parametrize("single", [False, True])
def test_minimal_user_defined_classes_work(open_source: OpenSource, single: bool) -> None:
    source = open_source(SEED)
    assert type(source).__name__ == "RolloutDataSource" and isinstance(source, RolloutDataSource)
    expected = take_checked_groups(open_source(), 5)
    assert take_checked_groups(source, 5) == expected
    source.add_samples(expected)
    saved = source.state_dict()
    assert take_checked_groups(source, 2) != expected[:2]
    source.load_state_dict(saved)
    assert saved["issued"] == 5

    buffered = open_source(SEED_WITH_BUFFER)
    assert isinstance(buffered, RolloutDataSourceWithBuffer)
    groups = take_checked_groups(buffered, 3)
    for index, group in enumerate(groups):
        group[0].response = "x" * index
    buffered.add_samples([sample for group in groups for sample in group] if single else groups)
    if single:  # its filter looks at groups
        assert len(buffered.buffer) == 6 and len(buffered.buffered_samples()) == 6
    else:
        assert ids(take_checked_groups(buffered, 4)) == ["000000002", "000000001", "000000000", "000000003"]


@pytest.mark.parametrize("removes", [False, True])
def test_buffer_filter_may_remove_selected_groups(open_source: OpenSource, removes: bool) -> None:
    rounds = []

    def pop_last(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
        rounds.append(rollout_id)
        chosen = buffer[-num_samples:]
        if removes:
            del buffer[-num_samples:]
        return chosen

    source = open_source(buffer_filter=pop_last)
    source.add_samples(take_checked_groups(source, 4))
    assert ids(take_checked_groups(source, 2)) == ["000000002", "000000003"]
    assert ids(take_checked_groups(source, 3)) == ["000000000", "000000001", "000000004"]
    assert rounds == [3, 3]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "Mine.get_samples .*ZeroDivisionError"),
        ("['a']", "Mine.get_samples .*list of str"),
        ("self.dataset.sample(num_samples + 1)", r"Mine.get_samples .*4 groups.*\(3\)"),
        (
            "[group[:1] for group in self.dataset.sample(num_samples)]",
            "'000000000' .*1 samples .*--n-samples-per-prompt",
        ),
    ],
)
def test_invalid_return_values_of_get_samples_raise(open_source: OpenSource, body: str, message: str) -> None:
    source = open_source(f"class Mine:\n    def get_samples(self, num_samples):\n        return {body}\n")
    with pytest.raises(PluginError, match=message):
        take_checked_groups(source, 3)


def test_failing_constructor_and_invalid_buffer_filter_raise(open_source: OpenSource) -> None:
    with pytest.raises(PluginError, match=r"--data-source-path .*KeyError: 'x'"):
        open_source(
            "class Mine:\n    def __init__(self, args):\n        {}['x']\n"
            "    def get_samples(self, n):\n        return []\n"
        )
    for wrong, message in ((lambda args, buffer, n: ["other"], "list of str"), (lambda a, b, n: b, "4 groups")):
        source = open_source(buffer_filter=wrong)
        source.add_samples(take_checked_groups(source, 4))
        with pytest.raises(PluginError, match=message):
            take_checked_groups(source, 2)


def test_samples_not_issued_by_dataset_raise(open_source: OpenSource) -> None:
    source = open_source("""
        from penstock.storage.samples.sample import Sample

        class Mine:
            def get_samples(self, num_samples):
                return [Sample(f"{i}", "g", f"{i}", 0, prompt="1+1=") for i in range(2)]
    """)
    with pytest.raises(PluginError, match=r"Mine.get_samples .*'g'"):
        take_checked_groups(source, 1)
