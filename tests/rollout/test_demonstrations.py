"""SFT data: which tokens are trained, and how it is committed."""

from pathlib import Path

import pytest
from scripted_engine import write_jsonl

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.source import Prompt, PromptSource
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point
from penstock.stages.rollout.sft_data import sft_data_stage, sft_samples
from penstock.stages.rollout.text.templates import Messages
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import RunKeys
from penstock.storage.errors import DataError
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store


def prompt(content: str | Messages) -> Prompt:
    return Prompt(issue=0, epoch=0, file=0, row=0, content=content, label="", metadata={})


def chat(*turns: str) -> Messages:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": turn} for i, turn in enumerate(turns)]


def trained_text(tokenizer: PromptTokenizer, messages: Messages) -> list[str]:
    """The masked tokens, decoded one by one."""
    [sample] = sft_samples([prompt(messages)], tokenizer, rollout_id=0)
    sample.check()
    kept = [token for token, mask in zip(sample.token_ids, sample.loss_mask) if mask]
    return tokenizer.decode([[token] for token in kept], skip_special_tokens=False)


def test_the_answer_and_its_end_token_are_trained(tokenizer: PromptTokenizer) -> None:
    assert trained_text(tokenizer, chat("37+8=", "45")) == ["4", "5", "<|end|>"]


def test_every_assistant_turn_is_trained_and_the_text_is_whole(tokenizer: PromptTokenizer) -> None:
    messages = chat("1+1=", "2", "and 2+2=", "4")
    assert trained_text(tokenizer, messages) == ["2", "<|end|>", "4", "<|end|>"]
    [sample] = sft_samples([prompt(messages)], tokenizer, rollout_id=0)
    [whole] = tokenizer.render_chats([messages], add_generation_prompt=False)
    assert sample.token_ids == tokenizer.encode([whole])[0]
    assert sample.prompt + sample.response == whole


def test_text_after_end_token_is_not_trained(tokenizer: PromptTokenizer) -> None:
    """Qwen's templates end a turn with a line break that no model ever generates."""
    other = PromptTokenizer.__new__(PromptTokenizer)
    other.__dict__ = {**tokenizer.__dict__, "inner": __import__("copy").deepcopy(tokenizer.inner)}
    other.inner.chat_template = tokenizer.inner.chat_template.replace("'<|end|>' }}", "'<|end|>\n' }}")
    assert trained_text(other, chat("37+8=", "45")) == ["4", "5", "<|end|>"]


def test_a_template_that_opens_every_conversation_differently_is_trained_exactly(tokenizer: PromptTokenizer) -> None:
    other = PromptTokenizer.__new__(PromptTokenizer)
    other.__dict__ = {**tokenizer.__dict__, "inner": __import__("copy").deepcopy(tokenizer.inner)}
    other.inner.chat_template = "{{ messages | length }}" + tokenizer.inner.chat_template
    assert trained_text(other, chat("1+1=", "2", "and 2+2=", "4")) == ["2", "<|end|>", "4", "<|end|>"]


@pytest.mark.parametrize("content", ["text", [{"role": "user", "content": "a"}]])
def test_row_without_answer_raises_data_error(tokenizer: PromptTokenizer, content: str | Messages) -> None:
    with pytest.raises(DataError, match="row 0 of file 1"):
        sft_samples([prompt(content)], tokenizer, rollout_id=0)


def test_stage_commits_rows_in_order(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    rows = [{"messages": chat(f"{i}+0=", f"{i}")} for i in range(10)]
    config = RolloutConfig(
        prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows),
        input_key="messages",
        rollout_batch_size=6,
        rollout_shuffle=False,
    )
    store, keys, source = Store(str(tmp_path / "store")), RunKeys("sft"), PromptSource.open(config)
    seen = []
    for r in range(3):
        commit = sft_data_stage(
            RolloutContext(store, config, source, tokenizer),
            keys.rollout_prefix(r),
            "sft",
            r,
            read_resume_point(store, keys, r).state,
        )
        assert commit.policy_version == -1 and commit.summary["rollout/num_samples"] == 6
        seen += read_samples(store, commit)
    assert [sample.response for sample in seen] == [f"{i % 10}<|end|>" for i in range(18)]
    assert len({sample.sample_id for sample in seen}) == 18
    assert all(sample.policy_versions == (-1, -1) and not any(sample.rollout_logprobs) for sample in seen)
