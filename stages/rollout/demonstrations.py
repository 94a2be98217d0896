"""The "rollout" of SFT: rows of a data set as samples whose assistant turns are trained. Nothing is generated.

Same data source, same shards, same commit as in rollout.py, so that everything after it (training, replay, resume) is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from stages.rollout.config import RolloutConfig
from stages.rollout.metrics import length_metrics
from stages.rollout.prompts.source import Messages, Prompt, PromptSource
from stages.rollout.rollout import commit_samples, inputs_of, timed
from stages.rollout.tokenizer import PromptTokenizer, Tools
from storage.refs import Commit
from storage.sample import Sample, Status
from storage.store import Store

Piece = tuple[str, bool]  # text, whether the assistant wrote it


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
        ValueError: the data changed, or a row cannot be learnt from.
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
    """Conversations as samples: the mask is 1 on the assistant's tokens, the token that ends its turn included."""
    conversations = split_turns([_messages(prompt) for prompt in prompts], tokenizer, [prompt.tools for prompt in prompts])
    # Piece by piece, and not the whole text at once: a prompt is then tokenised exactly as it will be when it is answered.
    encoded = iter(tokenizer.encode([text for text, _ in chain.from_iterable(conversations)]))
    samples = []
    for prompt, pieces in zip(prompts, conversations):
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for _, is_assistant in pieces:
            ids = next(encoded)
            token_ids += ids
            loss_mask += _turn_mask(ids, tokenizer.end_token_id) if is_assistant else [0] * len(ids)
        group_id = f"{prompt.issue:09d}"
        samples.append(
            Sample(
                sample_id=f"{group_id}-00",
                group_id=group_id,
                trajectory_id=f"{group_id}-00",
                rollout_id=rollout_id,
                prompt=pieces[0][0],
                response="".join(text for text, _ in pieces[1:]),
                label=prompt.label,
                token_ids=token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=[0.0] * len(token_ids),
                status=Status.COMPLETED,
                metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
            )
        )
    return samples


def split_turns(chats: Sequence[Messages], tokenizer: PromptTokenizer, tools: Sequence[Tools] | None = None) -> list[list[Piece]]:
    """Each conversation as rendered text, cut where the assistant begins to write and where its turn ends.

    Raises:
        ValueError: the template renders the beginning of a conversation differently once it goes on, so there is no such place.
    """
    cuts: list[tuple[int, bool]] = []  # conversation, whether the cut ends a turn of the assistant
    prefixes: list[Messages] = []
    openings = []
    theirs: list[Tools] = []  # one per opening
    for index, chat in enumerate(chats):
        for turn, message in enumerate(chat):
            if message["role"] == "assistant":
                cuts += [(index, False), (index, True)]
                openings.append(chat[:turn])
                prefixes.append(chat[: turn + 1])
                theirs.append(tools[index] if tools else None)
    opened = tokenizer.render_chats(openings, add_generation_prompt=True, tools=theirs)
    closed = tokenizer.render_chats(prefixes, add_generation_prompt=False, tools=theirs)
    pieces: list[list[Piece]] = [[] for _ in chats]
    so_far = [""] * len(chats)
    for (index, is_assistant), text in zip(cuts, chain.from_iterable(zip(opened, closed))):
        before = so_far[index]
        if not text.startswith(before):
            raise ValueError(
                "the chat template writes earlier turns anew when a conversation goes on (thinking removed, for "
                "instance), so it cannot be cut into turns: give one row per answer, with the assistant's turn last"
            )
        pieces[index].append((text[len(before) :], is_assistant))
        so_far[index] = text
    return pieces


def _messages(prompt: Prompt) -> Messages:
    if not isinstance(prompt.content, list) or not any(message["role"] == "assistant" for message in prompt.content):
        raise ValueError(
            f"row {prompt.row} of file {prompt.file + 1} of --prompt-data has no assistant's turn, and SFT learns from "
            "nothing else: name the column of messages with --input-key"
        )
    return prompt.content


def _turn_mask(ids: list[int], end_token_id: int | None) -> list[int]:
    """1 up to the token that ends the turn; what a template writes behind it (a line break, mostly) is never generated."""
    if end_token_id not in ids:
        return [1] * len(ids)
    last = len(ids) - 1 - ids[::-1].index(end_token_id)
    return [1] * (last + 1) + [0] * (len(ids) - 1 - last)
