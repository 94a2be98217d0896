"""User-defined data sources in common forms, and their two base classes."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import (
    Dataset,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    RolloutRound,
    load_data_source,
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


class Bed:
    """Ten prompts, and sources over them."""

    def __init__(self, directory: Path, tokenizer: PromptTokenizer) -> None:
        rows = [{"input": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(10)]
        self.directory = directory
        self.tokenizer = tokenizer
        self.config = RolloutConfig(
            prompt_data=write_jsonl(directory / "rows.jsonl", rows),
            label_key="label",
            n_samples_per_prompt=2,
            rollout_shuffle=True,
        )

    def path(self, code: str) -> str:
        file = self.directory / f"source_{len(list(self.directory.iterdir()))}.py"
        file.write_text(textwrap.dedent(code))
        return str(file)

    def source(self, code: str | None = None, buffer_filter: Any = None, **options: Any) -> RolloutDataSource:
        config = self.config.model_copy(update={"data_source_path": self.path(code) if code else None, **options})
        dataset = Dataset(
            config,
            PromptSource.open(config),
            self.tokenizer,
            RolloutRound("run", 3, 5),
            LengthFilter(config, self.tokenizer),
        )
        source = open_data_source(config, dataset)
        if buffer_filter is not None:
            source.filter = buffer_filter  # type: ignore[attr-defined]
        return source


@pytest.fixture
def bed(tmp_path: Path, tokenizer: PromptTokenizer) -> Bed:
    return Bed(tmp_path, tokenizer)


def ids(groups: list[list[Any]]) -> list[str]:
    return [group[0].group_id for group in groups]


def test_default_source_serves_prompts_in_order(bed: Bed) -> None:
    source = bed.source()
    prompts, _ = source.dataset.prompts.take(source.dataset.state, 6)
    groups = take_checked_groups(source, 4) + take_checked_groups(source, 2)
    assert ids(groups) == [f"{issue:09d}" for issue in range(6)]
    assert [group[0].metadata["i"] for group in groups] == [prompt.row for prompt in prompts]
    sample = groups[0][1]
    assert (sample.sample_id, sample.rollout_id, sample.policy_versions) == ("000000000-01", 3, (5, 5))
    assert sample.prompt == bed.tokenizer.render([prompts[0].content])[0]
    assert sample.token_ids == bed.tokenizer.encode([sample.prompt])[0] and not any(sample.loss_mask)


def test_source_continues_from_state(bed: Bed) -> None:
    whole = take_checked_groups(bed.source(), 9)
    source = bed.source()
    first = take_checked_groups(source, 4)
    saved = json.loads(json.dumps(source.state_dict()))
    again = bed.source()
    again.load_state_dict(saved)
    assert first + take_checked_groups(again, 5) == whole
    again.load_state_dict(saved)
    assert take_checked_groups(again, 5) == whole[4:], "a round that is done again gets the same"
    again.load_state_dict({})
    assert take_checked_groups(again, 9) == whole


def test_returned_groups_are_used_first_and_survive_restart(bed: Bed) -> None:
    source = bed.source()
    assert isinstance(source, RolloutDataSourceWithBuffer)
    first = take_checked_groups(source, 4)
    source.add_samples(first[1:3])
    state, kept = source.state_dict(), source.buffered_samples()
    assert len(kept) == 4
    for one in (source, bed.source()):
        one.load_state_dict(state)
        one.restore_buffer(kept)
        assert ids(take_checked_groups(one, 3)) == [*ids(first[1:3]), "000000004"]
        assert one.buffered_samples() == []


@pytest.mark.parametrize("single", [False, True])
def test_minimal_user_defined_classes_work(bed: Bed, single: bool) -> None:
    source = bed.source(SEED)
    assert type(source).__name__ == "RolloutDataSource" and isinstance(source, RolloutDataSource)
    expected = take_checked_groups(bed.source(), 5)
    assert take_checked_groups(source, 5) == expected
    source.add_samples(expected)
    saved = source.state_dict()
    assert take_checked_groups(source, 2) != expected[:2]
    source.load_state_dict(saved)
    assert saved["issued"] == 5

    buffered = bed.source(SEED_WITH_BUFFER)
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
def test_buffer_filter_may_remove_selected_groups(bed: Bed, removes: bool) -> None:
    rounds = []

    def pop_last(args: Any, rollout_id: int, buffer: list[Any], num_samples: int) -> list[Any]:
        rounds.append(rollout_id)
        chosen = buffer[-num_samples:]
        if removes:
            del buffer[-num_samples:]
        return chosen

    source = bed.source(buffer_filter=pop_last)
    source.add_samples(take_checked_groups(source, 4))
    assert ids(take_checked_groups(source, 2)) == ["000000002", "000000003"]
    assert ids(take_checked_groups(source, 3)) == ["000000000", "000000001", "000000004"]
    assert rounds == [3, 3]


def test_state_of_subclass_is_stored_with_position(bed: Bed) -> None:
    code = """
        from penstock.stages.rollout.prompts.data_source import RolloutDataSource

        class Curriculum(RolloutDataSource):
            def __init__(self, args):
                super().__init__(args)
                self.level = 0
                self.size = len(self.dataset)

            def get_samples(self, num_samples):
                self.level += 1
                groups = self.dataset.sample(num_samples - 1)
                return [*groups, self.dataset.issue(f"{self.level}+{self.size}=", label="?")]

            def state_dict(self):
                return super().state_dict() | {"level": self.level}

            def load_state_dict(self, state):
                super().load_state_dict(state)
                self.level = state.get("level", 0)
    """
    source = bed.source(code)
    first = take_checked_groups(source, 3)
    assert ids(first) == ["000000000", "000000001", "000000002"]
    assert "1+10=" in first[2][0].prompt and first[2][0].label == "?"
    again = bed.source(code)
    again.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert "2+10=" in take_checked_groups(again, 1)[0][0].prompt


@pytest.mark.parametrize("cls", [RolloutDataSource, RolloutDataSourceWithBuffer])
@pytest.mark.parametrize("separator", [".", ":"])
def test_data_source_of_penstock_loads(cls: type, separator: str) -> None:
    assert load_data_source(f"penstock.stages.rollout.prompts.data_source{separator}{cls.__name__}") is cls


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def get_samples(n):\n    return []\n", "get_samples"),
        ("class Mine:\n    pass\n", "get_samples"),
        ("class Mine:\n    def get_samples(self):\n        return []\n", r"get_samples\(self, num_samples\)"),
        (
            "class Mine:\n    def get_samples(self, n):\n        return []\n"
            "    def buffer_filter(self, buffer):\n        return []\n",
            r"buffer_filter\(self, args, buffer, num_samples\)",
        ),
    ],
)
def test_class_with_wrong_signature_raises_when_loaded(bed: Bed, code: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_data_source(bed.path(code))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "Mine.get_samples .*ZeroDivisionError"),
        ("None", "Mine.get_samples .*NoneType"),
        ("['a']", "Mine.get_samples .*list of str"),
        ("self.dataset.sample(num_samples + 1)", r"Mine.get_samples .*4 groups.*\(3\)"),
        (
            "[group[:1] for group in self.dataset.sample(num_samples)]",
            "'000000000' .*1 samples .*--n-samples-per-prompt",
        ),
        ("[group[:1] * 2 for group in self.dataset.sample(num_samples)]", "2 samples and 1 distinct ids"),
    ],
)
def test_invalid_return_values_of_get_samples_raise(bed: Bed, body: str, message: str) -> None:
    source = bed.source(f"class Mine:\n    def get_samples(self, num_samples):\n        return {body}\n")
    with pytest.raises(PluginError, match=message):
        take_checked_groups(source, 3)


def test_failing_constructor_and_invalid_buffer_filter_raise(bed: Bed) -> None:
    with pytest.raises(PluginError, match=r"--data-source-path .*KeyError: 'x'"):
        bed.source(
            "class Mine:\n    def __init__(self, args):\n        {}['x']\n"
            "    def get_samples(self, n):\n        return []\n"
        )
    for wrong, message in ((lambda args, buffer, n: ["other"], "list of str"), (lambda a, b, n: b, "4 groups")):
        source = bed.source(buffer_filter=wrong)
        source.add_samples(take_checked_groups(source, 4))
        with pytest.raises(PluginError, match=message):
            take_checked_groups(source, 2)


def test_samples_not_issued_by_dataset_raise(bed: Bed) -> None:
    source = bed.source("""
        from penstock.storage.samples.sample import Sample

        class Mine:
            def get_samples(self, num_samples):
                return [Sample(f"{i}", "g", f"{i}", 0, prompt="1+1=") for i in range(2)]
    """)
    with pytest.raises(PluginError, match=r"Mine.get_samples .*'g'"):
        take_checked_groups(source, 1)
