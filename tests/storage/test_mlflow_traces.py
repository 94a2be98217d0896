"""A sample as a trace: turns, tool calls, tool results and parts of the reward."""

import pytest

from penstock.storage.commit import Commit
from penstock.storage.tracking.mlflow.mlflow_samples import SamplePart, split_sample, to_span, tool_calls

COMMIT = Commit(kind="rollout", created_at=1000.0, seconds={"generate": 8.0, "reward": 1.0, "write": 0.5})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXTS = {(3, 4): CALL, (5, 6): "sum is 2", (7, 8, 9, 10): "2"}


def row(mask: list[int]) -> dict:
    return {
        "sample_id": "000000001-00",
        "group_id": "000000001",
        "prompt": "1 + 1?",
        "response": "all turns",
        "label": "2",
        "token_ids": list(range(1, 1 + len(mask))),
        "loss_mask": mask,
        "reward": 1.5,
        "rewards": [("correct", 1.0), ("format", 0.5)],
        "status": "completed",
        "policy_versions": [3, 4],
        "metadata": '{"num_turns": 2}',
    }


def test_an_agent_sample_has_a_span_for_each_turn_and_tool_result() -> None:
    parts = split_sample(row([0, 0, 1, 1, 0, 0, 1, 1, 1, 1]), COMMIT, lambda tokens: TEXTS[tuple(tokens)])
    assert [(part.name, part.type) for part in parts] == [
        ("sample", "AGENT"),
        ("turn 1", "LLM"),
        ("tool or environment", "TOOL"),
        ("turn 2", "LLM"),
        ("reward", "EVALUATOR"),
    ]
    sample, first, tool, second, reward = parts
    assert (sample.inputs, sample.outputs, sample.attributes["policy_versions"]) == ("1 + 1?", "all turns", [3, 4])
    assert first.attributes["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]
    assert (tool.inputs, tool.outputs) == (CALL, "sum is 2")
    assert (second.outputs, second.attributes) == ("2", {"num_tokens": 4})
    assert reward.outputs == {"reward": 1.5, "correct": 1.0, "format": 0.5}
    times = [(part.start, part.end) for part in parts]
    assert times == [(990.5, 999.5), (990.5, 992.5), (992.5, 994.5), (994.5, 998.5), (998.5, 999.5)]


def test_without_a_tokenizer_turns_have_no_texts_but_a_single_turn_does() -> None:
    [_, first, *_] = split_sample(row([0, 1, 0, 1]), COMMIT, lambda tokens: None)
    assert (first.outputs, first.attributes) == (None, {"num_tokens": 1})
    [_, only, _] = split_sample(row([0, 1, 1]), COMMIT, lambda tokens: None)
    assert only.outputs == "all turns"


def test_spans_of_a_sample_with_many_turns_have_different_ids() -> None:
    part = SamplePart("turn", "LLM", 0.0, 1.0, "in", "out")
    spans = [to_span(bytes(16), number, part, failed=False) for number in range(300)]
    assert len({span.span_id for span in spans}) == 300
    assert {span.parent_id for span in spans} == {None, spans[0].span_id}


@pytest.mark.parametrize("text", ["no call", "<tool_call>{not json}</tool_call>", "<tool_call>1</tool_call>"])
def test_text_without_a_valid_tool_call(text: str) -> None:
    assert tool_calls(text) == []


@pytest.mark.parametrize("draft", ["<think>a {} b</think>", "a {}</think>", "<think>{}", "<think>{}</think><think>{}"])
def test_calls_drafted_in_thoughts_are_not_shown(draft: str) -> None:
    call = '<tool_call>{"name": "add", "note": "two\nlines"}</tool_call>'
    assert tool_calls(draft.replace("{}", call)) == []
    assert tool_calls(f"<think>{call}</think> so {call}") == [{"name": "add", "note": "two\nlines"}]


def test_sample_without_tokens_has_no_turns() -> None:
    assert [part.name for part in split_sample(row([]), COMMIT, lambda tokens: "")] == ["sample", "reward"]
