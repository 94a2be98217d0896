"""Text that is not valid Unicode: its sample fails or is stored escaped; the round and its other samples succeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Bench, write_jsonl

from penstock.stages.rollout.data_rounds import sft_samples
from penstock.stages.rollout.prompts.source import Prompt
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit, decode_record, encode_commit, has_matching_digest
from penstock.storage.samples.sample import Sample, Status, from_table, to_table
from tests.forked_worker import forked_workers  # noqa: F401 fixture

BAD, ESCAPED = "a\ud83db", "a\\ud83db"  # the first half of an emoji
FIELDS: dict[str, tuple[Any, Any]] = {  # field of a sample -> invalid value, stored value
    **{name: (BAD, ESCAPED) for name in ("sample_id", "group_id", "trajectory_id", "prompt", "response", "label")},
    "rewards": ({BAD: 1.0}, {ESCAPED: 1.0}),
    "metadata": ({BAD: [BAD, {"x": BAD}], "n": 3}, {ESCAPED: [ESCAPED, {"x": ESCAPED}], "n": 3}),
}


def sample(**fields: Any) -> Sample:
    values = {"sample_id": "s", "group_id": "g", "trajectory_id": "t", "rollout_id": 0, **fields}
    return Sample(**values, token_ids=[5], loss_mask=[1], rollout_logprobs=[-1.0], status=Status.COMPLETED)


@pytest.mark.parametrize("name", FIELDS)
def test_invalid_text_of_a_sample_is_stored_escaped(name: str) -> None:
    value, stored = FIELDS[name]
    good = sample(prompt="caf\u00e9 \U0001f600", metadata={"x": "\U0001f600"})
    assert from_table(to_table([good, sample(**{name: value})])) == [good, sample(**{name: stored})]


@pytest.mark.parametrize(
    "fields",
    [
        {"summary": {BAD: 1.0}},
        {"inputs": {"file": BAD}},
        {"state": {"shown": [[BAD, 1], {"x": [BAD]}]}},
    ],
    ids=str,
)
def test_invalid_text_of_a_commit_is_stored_escaped(fields: dict[str, Any]) -> None:
    commit = Commit(kind="rollout", **fields)
    data = encode_commit(commit)
    read = decode_record(Commit, "key", data)
    assert read == commit and has_matching_digest(data)
    assert ESCAPED in json.loads(json.dumps(str(read.model_dump()))).replace("\\\\", "\\")


SMALL: dict[str, Any] = {"num_rows": 4, "rollout_shuffle": False, "num_shown_samples": 4}


def bench_with(directory: Path, tokenizer: PromptTokenizer, **changes: Any) -> Bench:
    """A run with changes to row 1 of its data."""
    bench = Bench(directory, tokenizer, **SMALL)
    path = Path(bench.config.prompt_data[0])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= changes
    write_jsonl(path, rows)
    return bench


@pytest.mark.parametrize("bad", ["\ud800", "1+1=\udfff"])
def test_samples_of_an_invalid_prompt_fail_and_the_round_is_committed(
    tmp_path: Path, tokenizer: PromptTokenizer, bad: str
) -> None:
    bench = bench_with(tmp_path, tokenizer, input=bad)
    samples = bench.trained(bench.round(0))
    assert [s.status is Status.FAILED for s in samples] == [False, False, True, True] + [False] * 4
    assert "not valid Unicode" in samples[2].metadata["error"] and not any(samples[2].loss_mask)
    assert bad.encode("utf-8", "backslashreplace").decode() in samples[2].prompt


def test_invalid_label_and_metadata_are_stored_escaped(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    bench = bench_with(tmp_path, tokenizer, label=BAD, metadata={BAD: BAD})
    samples = bench.trained(bench.round(0))
    assert len(samples) == 8 and (samples[2].label, samples[2].metadata[ESCAPED]) == (ESCAPED, ESCAPED)


REWARD = r"""
class Unprintable(Exception):
    def __str__(self):
        return "a\ud83db"


def reward_func(args, sample, **kwargs):
    if sample.metadata["i"] == 0:
        raise ValueError("a\ud83db")
    if sample.metadata["i"] == 1:
        raise Unprintable
    if sample.metadata["i"] == 2:
        raise ExceptionGroup("a\ud83db", [ValueError("x")])
    return {"score": 1.0, "a\ud83db": 2.0}
"""


def test_invalid_text_of_a_reward_does_not_fail_the_round(plugin_bench: Any) -> None:
    bench = plugin_bench(REWARD, "custom_rm_path", rm_type=None, **SMALL, reward_key="score")
    commit = bench.round(0)
    samples = bench.trained(commit)
    assert [sample.metadata["i"] for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(s.status is Status.FAILED and ESCAPED in s.metadata["error"] for s in samples[:6])
    assert [(s.reward, s.rewards[ESCAPED]) for s in samples[6:]] == [(1.0, 2.0)] * 2
    assert any(ESCAPED in name for name in commit.summary)


def test_invalid_reason_of_a_filter_does_not_fail_the_round(plugin_bench: Any) -> None:
    code = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
def keep(args, samples):
    return DynamicFilterOutput(samples[0].label != '2', 'a\\ud83db')
"""
    commit = plugin_bench(code, "dynamic_sampling_filter_path", over_sampling_batch_size=8, **SMALL).round(0)
    assert commit.num_samples() == 8 and any(ESCAPED in name for name in commit.summary)
    assert {group["reason"] for group in commit.state["dropped"]} >= {ESCAPED}


def test_demonstration_with_invalid_text_is_not_trained(tokenizer: PromptTokenizer) -> None:
    chats = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": text}] for text in ("2", BAD)]
    prompts = [
        Prompt(issue=i, epoch=0, file=0, row=i, content=chat, label="", metadata={}) for i, chat in enumerate(chats)
    ]
    good, bad = sft_samples(prompts, tokenizer, rollout_id=0)
    assert any(good.loss_mask) and good.status is Status.COMPLETED
    assert not any(bad.loss_mask) and bad.status is Status.FAILED and "not valid Unicode" in bad.metadata["error"]
    assert from_table(to_table([good, bad]))[1].response.count(ESCAPED) == 1
