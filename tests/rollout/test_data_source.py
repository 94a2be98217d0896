"""The order of prompts: exact after any interruption, complete in every epoch, unchanged by appended data."""

from pathlib import Path

import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.stages.rollout.prompts.source import Prompt, PromptSource
from penstock.storage.errors import DataError


def source_of(*sizes: int, shuffle: bool = True, seed: int = 42) -> PromptSource:
    files = [[f'["{file}:{row}","",{{}}]'.encode() for row in range(size)] for file, size in enumerate(sizes)]
    return PromptSource(files, shuffle=shuffle, seed=seed)


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


def test_without_shuffle_files_follow_each_other() -> None:
    source = source_of(2, 2, shuffle=False)
    assert names(source.take(source.restore(None), 5)[0]) == ["0:0", "0:1", "1:0", "1:1", "0:0"]


def test_order_is_pinned() -> None:
    """Resumed runs live on this order: if this test fails, they would repeat and skip prompts."""
    source = source_of(8)
    rows = [prompt.row for prompt in source.take(source.restore(None), 16)[0]]
    assert rows == [5, 6, 4, 0, 3, 1, 7, 2, 7, 3, 1, 2, 0, 6, 5, 4]


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
    expected = names(old.take(old.take(old.restore(None), 6)[1], 6)[0])
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


ROWS = [
    {"question": "1+1=", "answer": 2, "extra": {"rm_type": "math"}, "unused": [1]},
    {"question": [{"role": "user", "content": "é"}], "answer": "x", "extra": '{"level": 3}'},
    {"question": "2+2=", "answer": None, "extra": None},
]


def test_jsonl_is_read(tmp_path: Path) -> None:
    config = RolloutConfig(
        prompt_data=write_jsonl(tmp_path / "rows.jsonl", ROWS),
        input_key="question",
        label_key="answer",
        metadata_key="extra",
    )
    source = PromptSource.open(config)
    prompts, _ = source.take(source.restore(None), 3)
    assert [prompt.content for prompt in prompts] == [row["question"] for row in ROWS]
    assert [prompt.label for prompt in prompts] == ["2", "x", ""]
    assert [prompt.metadata for prompt in prompts] == [{"rm_type": "math"}, {"level": 3}, {}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "absent.jsonl does not exist"),
        ("empty.jsonl", "\n", "empty.jsonl is empty"),
        ("broken.jsonl", '{"input": "a"}\n{"input": \n', r"broken.jsonl:2: malformed line"),
        ("list.jsonl", "[1]\n", r"list.jsonl:1: found a JSON list"),
        (
            "column.jsonl",
            '{"input": "a"}\n\n{"prompt": "b", "id": 1}\n',
            r"column.jsonl:3 has no column 'input'; it has 'prompt', 'id'",
        ),
        ("number.jsonl", '{"input": 5}\n', "number.jsonl:1: column 'input' holds 5; a prompt is text"),
        (
            "metadata.jsonl",
            '{"input": "a", "metadata": "{"}\n',
            "metadata.jsonl:1: column 'metadata' is text but not JSON",
        ),
        (
            "messages.jsonl",
            '{"input": [{"role": "user", "content": "a"}]}\n',
            "messages.jsonl row 0.*--apply-chat-template",
        ),
        ("rows.txt", "a,b\n", "rows.txt is neither JSONL"),
        ("fake.parquet", "no", "fake.parquet is not a Parquet file"),
    ],
)
def test_invalid_rows_raise_with_file_and_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        check_prompt_data(RolloutConfig(prompt_data=str(tmp_path / name)))


def test_demonstrations_need_an_assistant(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match=r"rows.jsonl row 0: column 'messages'"):
        check_prompt_data(RolloutConfig(prompt_data=path, input_key="messages"), is_sft=True)
