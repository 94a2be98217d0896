"""A sample as a trace: turns, tool calls, tool results and parts of the reward."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.storage.tracking.mlflow.mlflow_samples import (
    MlflowTraces,
    SamplePart,
    assess,
    split_sample,
    to_span,
    tool_calls,
)
from penstock.storage.web.login import create_login

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXTS = {(3, 4): CALL, (5, 6): "sum is 2", (7, 8, 9, 10): "2"}


def row(mask: list[int]) -> dict:
    return {
        "sample_id": "000000001-00",
        "group_id": "000000001",
        "prompt": "1 + 1?",
        "response": "all turns",
        "images": [],
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
    parts = split_sample(row([0, 0, 1, 1, 0, 0, 1, 1, 1, 1]), lambda tokens: TEXTS[tuple(tokens)])
    assert [(part.name, part.type) for part in parts] == [
        ("sample", "AGENT"),
        ("turn 1", "LLM"),
        ("tool or environment", "TOOL"),
        ("turn 2", "LLM"),
    ]
    sample, first, tool, second = parts
    assert (sample.inputs, sample.outputs, sample.attributes["policy_versions"]) == ("1 + 1?", "all turns", [3, 4])
    assert first.attributes["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]
    assert (tool.inputs, tool.outputs) == (CALL, "sum is 2")
    assert (second.outputs, second.attributes) == ("2", {"num_tokens": 4})


def test_reward_and_its_parts_are_feedback_and_the_label_is_an_expectation() -> None:
    found = assess(row([0, 1]), bytes(16), at=1000.0)
    assert {a.name: a.feedback.value for a in found if a.feedback} == {"reward": 1.5, "correct": 1.0, "format": 0.5}
    assert {a.name: a.expectation.value for a in found if a.expectation} == {"expected_response": "2"}
    assert {a.create_time_ms for a in found} == {1_000_000}
    assert assess(row([0, 1]) | {"reward": None, "label": ""}, bytes(16), at=1000.0) == []
    again = assess(row([0, 1]), bytes(16), at=1000.0)
    assert len({a.assessment_id for a in found}) == 4 and [a.assessment_id for a in again] == [
        a.assessment_id for a in found
    ]


def test_without_a_tokenizer_turns_have_no_texts_but_a_single_turn_does() -> None:
    [_, first, *_] = split_sample(row([0, 1, 0, 1]), lambda tokens: None)
    assert (first.outputs, first.attributes) == (None, {"num_tokens": 1})
    [_, only] = split_sample(row([0, 1, 1]), lambda tokens: None)
    assert only.outputs == "all turns"


def test_spans_of_a_sample_with_many_turns_have_different_ids_an_order_and_no_duration() -> None:
    part = SamplePart("turn", "LLM", "in", "out")
    spans = [to_span(bytes(16), number, part, at=1000.0, failed=False) for number in range(300)]
    assert len({span.span_id for span in spans}) == 300
    assert {span.parent_id for span in spans} == {None, spans[0].span_id}
    assert [span.start_time_ns - 1000 * 10**9 for span in spans] == list(range(300))
    assert {span.end_time_ns - span.start_time_ns for span in spans} == {0}


@pytest.mark.parametrize("text", ["no call", "<tool_call>{not json}</tool_call>", "<tool_call>1</tool_call>"])
def test_text_without_a_valid_tool_call(text: str) -> None:
    assert tool_calls(text) == []


@pytest.mark.parametrize("draft", ["a {}</think>", "<think>{}</think><think>{}"])
def test_calls_drafted_in_thoughts_are_not_shown(draft: str) -> None:
    call = '<tool_call>{"name": "add", "note": "two\nlines"}</tool_call>'
    assert tool_calls(draft.replace("{}", call)) == []
    assert tool_calls(f"<think>{call}</think> so {call}") == [{"name": "add", "note": "two\nlines"}]


def test_traces_are_sent_with_the_login_of_the_users_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    login = create_login(5999)
    traces = MlflowTraces(SimpleNamespace(uri="http://127.0.0.1:5999"))  # type: ignore[arg-type]
    assert traces.client.tracking_uri == f"http://{login}@127.0.0.1:5999"
