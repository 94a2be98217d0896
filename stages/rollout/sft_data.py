"""Commit the rounds of SFT: conversations of a data set become samples to train on; nothing is generated.

Data-source state, shards and commit have the same form as in rollout.py, so training, replay and resume work in the
same way. Only the assistant turns are trained; loss_masks.py locates them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from penstock.stages.rollout.deadline import record_seconds
from penstock.stages.rollout.metrics import length_metrics
from penstock.stages.rollout.prompts.source import Prompt
from penstock.stages.rollout.rollout import RolloutContext, commit_samples, prompt_files_by_name
from penstock.stages.rollout.text.loss_masks import Piece, drops_reasoning, join_pieces, split_trained_text
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.unicode_text import escape_invalid_text

logger = logging.getLogger(__name__)


def sft_data_stage(
    context: RolloutContext, prefix: str, run: str, rollout_id: int, state: dict[str, Any] | None = None
) -> Commit:
    """Commit the next `rollout_batch_size` conversations as one round and return the commit. If the round is already
    committed, only return its commit."""
    if commit := context.store.committed(prefix):
        return commit
    seconds: dict[str, float] = {}
    with record_seconds(seconds, "prepare"):
        prompts, after = context.prompts.take(context.prompts.restore(state), context.config.rollout_batch_size)
        samples = sft_samples(prompts, context.tokenizer, rollout_id, context.max_seq_len)
    return commit_samples(
        context.store,
        prefix,
        samples,
        seconds,
        lambda: {
            "rollout/num_samples": float(len(samples)),
            "perf/rollout_time": sum(seconds.values()),
            **length_metrics(samples),
        },
        kind="rollout",
        index=rollout_id,
        policy_version=-1,
        state={"data_source": after.model_dump(mode="json")},
        **{"run": run, "inputs": prompt_files_by_name(context.config), **context.provenance},
    )


def sft_samples(
    prompts: Sequence[Prompt], tokenizer: PromptTokenizer, rollout_id: int, max_seq_len: int | None = None
) -> list[Sample]:
    """Return one sample per conversation. The loss mask is 1 on the assistant turns, including the token that ends each
    turn. A conversation may have at most `max_seq_len` tokens."""
    conversations = [_split_conversation(prompt, tokenizer) for prompt in prompts]
    encoded = iter(tokenizer.encode([text for text, _ in chain.from_iterable(conversations)]))
    samples = []
    for prompt, pieces in zip(prompts, conversations):
        try:
            token_ids, loss_mask = join_pieces(pieces, list(islice(encoded, len(pieces))), max_seq_len)
        except DataError as error:
            raise DataError(f"{_where(prompt)}: {error}") from None
        group_id = f"{prompt.issue:09d}"
        num_opening = 1 if pieces and not pieces[0][1] else 0
        samples.append(
            Sample(
                sample_id=f"{group_id}-00",
                group_id=group_id,
                trajectory_id=f"{group_id}-00",
                rollout_id=rollout_id,
                prompt="".join(text for text, _ in pieces[:num_opening]),
                response="".join(text for text, _ in pieces[num_opening:]),
                label=prompt.label,
                token_ids=token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=[0.0] * len(token_ids),
                status=Status.COMPLETED,
                metadata={**prompt.metadata, "source": prompt.position},
            )
        )
        if any(text != escape_invalid_text(text) for text, _ in pieces):
            samples[-1].fail("the conversation is not valid Unicode: it has a lone surrogate")
    return samples


def _where(prompt: Prompt) -> str:
    return f"row {prompt.row} of file {prompt.file + 1} of --prompt-data"


def _split_conversation(prompt: Prompt, tokenizer: PromptTokenizer) -> list[Piece]:
    where, messages = _where(prompt), prompt.content
    if not isinstance(messages, list) or not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where} has no assistant message, and SFT trains only on assistant messages: name the column of messages "
            "with --input-key, or remove the row"
        )
    try:
        pieces = split_trained_text(messages, tokenizer, prompt.tools)
    except DataError as error:  # includes TemplateError
        raise type(error)(f"{where}: {error}") from error
    if drops_reasoning(messages, pieces):
        logger.warning(
            "%s: the chat template drops the reasoning of the last assistant message; the reasoning is not trained",
            where,
        )
    return pieces
