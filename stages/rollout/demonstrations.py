"""The "rollout" of SFT: rows of a data set as samples whose assistant turns are trained. Nothing is generated.

Data source, shards and commit are those of rollout.py, so everything after it (training, replay, resume) is the same. Which tokens are
trained is decided in loss_masks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

from stages.rollout.config import RolloutConfig
from stages.rollout.loss_masks import Piece, dropped_thoughts, split_pieces
from stages.rollout.metrics import length_metrics
from stages.rollout.prompts.source import Prompt, PromptSource
from stages.rollout.rollout import commit_samples, inputs_of, timed
from stages.rollout.tokenizer import PromptTokenizer
from storage.errors import DataError
from storage.refs import Commit
from storage.sample import Sample, Status
from storage.store import Store

logger = logging.getLogger(__name__)


def demonstration_stage(
    store: Store,
    prefix: str,
    *,
    run: str,
    rollout_id: int,
    source: PromptSource,
    tokenizer: PromptTokenizer,
    config: RolloutConfig,
    state: dict[str, Any] | None = None,
    stamp: dict[str, Any] | None = None,
) -> Commit:
    """Commit `rollout_batch_size` demonstrations as one round, unless it is committed already. Arguments as in `rollout_stage`.

    Raises:
        DataError: the data changed, or a row has nothing to train on.
        TemplateError: the template fails for a row, or its answers cannot be located.
    """
    if commit := store.committed(prefix):
        return commit
    seconds: dict[str, float] = {}
    with timed(seconds, "prepare"):
        prompts, after = source.take(source.restore(state), config.rollout_batch_size)
        samples = demonstrations(prompts, tokenizer, rollout_id)
    return commit_samples(
        store,
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
        **({"run": run, "inputs": inputs_of(config)} | (stamp or {})),
    )


def demonstrations(prompts: Sequence[Prompt], tokenizer: PromptTokenizer, rollout_id: int) -> list[Sample]:
    """Return conversations as samples: the mask is 1 on what the assistant generates, the token that ends its turn included.

    Raises:
        DataError, TemplateError: of the first row that cannot be used; the message names it.
    """
    conversations = [_pieces(prompt, tokenizer) for prompt in prompts]
    # Piece by piece, and not the whole text at once: a prompt is then tokenised exactly as it will be when it is answered.
    encoded = iter(tokenizer.encode([text for text, _ in chain.from_iterable(conversations)]))
    samples = []
    for prompt, pieces in zip(prompts, conversations):
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for _, is_trained in pieces:
            ids = next(encoded)
            token_ids += ids
            loss_mask += [int(is_trained)] * len(ids)
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
                metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
            )
        )
    return samples


def _pieces(prompt: Prompt, tokenizer: PromptTokenizer) -> list[Piece]:
    where = f"row {prompt.row} of file {prompt.file + 1} of --prompt-data"
    messages = prompt.content
    if not isinstance(messages, list) or not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{where} has no assistant message, and SFT trains on nothing else: name the column of messages with --input-key"
        )
    try:
        pieces = split_pieces(messages, tokenizer, prompt.tools)
    except DataError as error:  # TemplateErrors among them
        raise type(error)(f"{where}: {error}") from error
    if dropped_thoughts(messages, pieces):
        logger.warning("%s: the chat template drops the thoughts of the last answer, so they are not trained", where)
    return pieces
