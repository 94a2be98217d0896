"""Commit rounds that no engine generates: the conversations of SFT, or the samples of a torch file.

Such a round has data-source state, shards and commit in the form of rollout.py, so training, resume and replay work in
the same way. In SFT, only the assistant turns are trained; loss_masks.py locates them.

A torch file (--save-debug-rollout-data) has {"rollout_id": ..., "samples": [...]}, with a dictionary per sample under
the names of `UserSample`; its optional entry `penstock` has further fields. The file is read once; training reads the
round's shards. The policy version of a loaded round is -1 (unknown).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from penstock.stages.rewards.outcome import parse_reward
from penstock.stages.rollout.collect import record_seconds
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.metrics import length_metrics, rollout_metrics, sample_preview
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound
from penstock.stages.rollout.prompts.prompt_images import LoadedImages, PromptImages
from penstock.stages.rollout.prompts.source import Prompt, SourceState
from penstock.stages.rollout.rollout import ResumePoint, RolloutContext, commit_samples
from penstock.stages.rollout.text.loss_masks import Piece, drops_reasoning, join_pieces, split_trained_text
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.torch_files import load_torch_file, save_torch_file
from penstock.storage.commit import DEBUG_DATA, Commit, escape_invalid_text
from penstock.storage.errors import DataError
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

logger = logging.getLogger(__name__)


def sft_data_stage(
    context: RolloutContext, prefix: str, run: str, rollout_id: int, state: dict[str, Any] | None
) -> Commit:
    """Commit the next `rollout_batch_size` conversations as a round, unless the round is committed; return its commit.
    `state`: data position after the previous round; None: the start of the data."""
    if commit := context.store.committed(prefix):
        return commit
    seconds: dict[str, float] = {}
    with record_seconds(seconds, "prepare"):
        prompts, after = context.prompts.take(context.prompts.restore(state), context.config.rollout_batch_size)
        images = PromptImages(context.config, context.tokenizer.directory, context.store)
        samples = sft_samples(prompts, context.tokenizer, rollout_id, context.max_seq_len, images)
    return commit_samples(
        context,
        prefix,
        RolloutRound(run, rollout_id, policy_version=-1),
        samples,
        seconds,
        lambda: {
            "rollout/num_samples": float(len(samples)),
            "perf/rollout_time": sum(seconds.values()),
            **length_metrics(samples),
        },
        state={"data_source": after.model_dump(mode="json")},
    )


def sft_samples(
    prompts: Sequence[Prompt],
    tokenizer: PromptTokenizer,
    rollout_id: int,
    max_seq_len: int | None = None,
    images: PromptImages | None = None,
) -> list[Sample]:
    """Return one sample per conversation. The loss mask is 1 on the assistant turns, including the token that ends each
    turn. A conversation may have at most `max_seq_len` tokens. `images` writes the images of the conversations to the
    store; None: conversations without images."""
    loaded = [LoadedImages() for _ in prompts] if images is None else images.write(prompts)
    places = [f"row {prompt.row} of file {prompt.file + 1} of --prompt-data" for prompt in prompts]
    conversations = [_split_conversation(prompt, tokenizer, place) for prompt, place in zip(prompts, places)]
    encoded = iter(tokenizer.encode([text for text, _ in chain.from_iterable(conversations)]))
    samples = []
    for prompt, place, pieces, of_prompt in zip(prompts, places, conversations, loaded):
        ids, problem = list(islice(encoded, len(pieces))), ""
        if any(text != escape_invalid_text(text) for text, _ in pieces):
            problem = "the conversation is not valid Unicode: it has a lone surrogate"
        if images is not None:
            ids, of_prompt = images.expand_or_fail(of_prompt, ids)
            problem = f"{place}: {of_prompt.problem}" if of_prompt.problem else problem
        try:
            token_ids, loss_mask = join_pieces(pieces, ids, max_seq_len)
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
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
                images=list(of_prompt.digests),
                status=Status.COMPLETED,
                metadata={**prompt.metadata, "source": prompt.position},
            )
        )
        if problem:
            samples[-1].fail(problem)
    return samples


def _split_conversation(prompt: Prompt, tokenizer: PromptTokenizer, where: str) -> list[Piece]:
    """Return the pieces of a conversation. `where`: its file and row, for messages. Raises DataError."""
    messages = prompt.content
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


# ---- files of --save-debug-rollout-data ------------------------------------------------------------------------------

# Metadata about the run that generated a sample. It is not loaded, because it would be wrong in another run.
_OF_ORIGIN = ("policy_spans", "start_rollout_id", "num_prompt_tokens")


def save_rollout_file(store: Store, commit: Commit, path: Path, rollout_id: int | str) -> None:
    """Write the samples that a rollout or an evaluation has committed to `path`. Raises OSError."""
    samples = read_samples(store, commit)
    group_index = {name: index for index, name in enumerate(dict.fromkeys(sample.group_id for sample in samples))}
    rows = [row_of_sample(sample, index, group_index[sample.group_id]) for index, sample in enumerate(samples)]
    save_torch_file(path, {"rollout_id": rollout_id, "samples": rows})


def row_of_sample(sample: Sample, index: int, group_index: int) -> dict[str, Any]:
    """Return a sample under the names of `UserSample`. `index` is the sample's number in the round."""
    import torch

    start, experts = sample.prompt_length, sample.routed_experts
    return {
        "group_index": group_index,
        "index": index,
        "prompt": sample.prompt,
        "tokens": sample.token_ids,
        "response": sample.response,
        "response_length": sample.response_length,
        "label": sample.label,
        "reward": sample.reward,
        "loss_mask": sample.loss_mask[start:],
        "rollout_log_probs": sample.rollout_logprobs[start:],
        "remove_sample": False,
        "status": sample.status.value,
        "metadata": sample.metadata,
        "penstock": {
            "sample_id": sample.sample_id,
            "group_id": sample.group_id,
            "trajectory_id": sample.trajectory_id,
            "rewards": sample.rewards,
            "policy_versions": list(sample.policy_versions),
            "images": sample.images,  # names of blobs; the store that loads the file must have them
            "routed_experts": None if experts is None else torch.frombuffer(bytearray(experts), dtype=torch.uint8),
        },
    }


def load_rollout_file(
    path: Path, config: RolloutConfig, *, num_in_step: int, fraction: float | None = None
) -> list[list[Sample]]:
    """Return the groups of samples in a file written by --save-debug-rollout-data, checked and with the ids that they
    have in the file. With `fraction`, only this fraction of the groups is used: the first and the last ones. Without
    group indices, a group is `n_samples_per_prompt` consecutive samples. `num_in_step`: --global-batch-size."""
    content = load_torch_file(path)
    rows = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise DataError(
            f"{path} has no list `samples` of dictionaries: give a file that --save-debug-rollout-data has written"
        )
    groups: dict[Any, Group] = {}
    for index, row in enumerate(rows):
        group = row.get("group_index")
        key = index // config.n_samples_per_prompt if group is None else group
        try:
            groups.setdefault(key, []).append(sample_of_row(row, index, config))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise DataError(f"{path}: sample {index} cannot be trained on: {reason}") from error
    kept = list(groups.values())
    if fraction is not None:
        count = max(1, int(len(kept) * fraction))
        kept = kept[: count // 2] + kept[len(kept) - (count - count // 2) :]
    sizes = [len({sample.trajectory_id for sample in group}) for group in kept]
    if len(set(sizes)) > 1 or sum(sizes) % num_in_step:
        raise DataError(
            f"{path} has {len(sizes)} groups with {min(sizes)} to {max(sizes)} trajectories, {sum(sizes)} in total: "
            f"groups must have equal sizes, and the total must be a multiple of --global-batch-size {num_in_step}"
        )
    return kept


def sample_of_row(row: dict[str, Any], index: int, config: RolloutConfig) -> Sample:
    """Return a row as a sample, with the same checks as for samples of user-defined functions."""
    own = row.get("penstock") or {}
    tokens, prompt = list(row["tokens"]), row.get("prompt", "")
    num_prompt = len(tokens) - int(row["response_length"])
    trajectory = str(own.get("trajectory_id") or row.get("rollout_id") or f"row-{index}")
    label = row.get("label")
    view = UserSample.of(
        Sample(
            sample_id="",
            group_id="",
            trajectory_id=trajectory,
            rollout_id=0,
            prompt=prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
            label="" if label is None else str(label),
            token_ids=tokens[:num_prompt],
            loss_mask=[0] * num_prompt,
            rollout_logprobs=[0.0] * num_prompt,
        ),
        num_prompt,
    )
    view.token_ids, view.response = tokens, row.get("response", "")
    for name, value in (("loss_mask", row.get("loss_mask")), ("rollout_logprobs", row.get("rollout_log_probs"))):
        if value is not None:
            setattr(view, name, value)
    view.remove_sample, view.status = bool(row.get("remove_sample")), row.get("status", Status.COMPLETED)
    view.metadata = {name: value for name, value in (row.get("metadata") or {}).items() if name not in _OF_ORIGIN}
    sample = checked_sample(view)
    if sample.status is Status.FAILED:
        sample.metadata.setdefault("error", "the sample was saved with status failed")
    if row.get("reward") is not None:
        parse_reward(row["reward"], config.reward_key, "the file").apply(sample)
    sample.rewards = dict(own.get("rewards") or sample.rewards)
    sample.images = list(own.get("images") or ())
    experts = own.get("routed_experts")
    sample.routed_experts = None if experts is None else experts.numpy().tobytes()
    return sample


def loaded_rollout_stage(
    context: RolloutContext, prefix: str, round: RolloutRound, path: Path, point: ResumePoint, **options: Any
) -> Commit:
    """Commit the samples of a file as a round, and return the commit; `options` are those of `load_rollout_file`. The
    position in --prompt-data and the buffered groups stay as they were before the round (`point`)."""
    seconds: dict[str, float] = {}
    state = point.state or SourceState(segments=()).model_dump(mode="json")
    with record_seconds(seconds, "prepare"):
        groups = load_rollout_file(path, context.config, **options)
        samples = number_samples(groups, round.rollout_id, state)
    return commit_samples(
        context,
        prefix,
        round,
        samples,
        seconds,
        lambda: rollout_metrics(samples) | {"perf/rollout_time": sum(seconds.values())},
        buffer=point.buffer,
        state={
            "data_source": {**state, "issued": state["issued"] + len(groups)},
            "shown": sample_preview(samples, context.config.num_shown_samples),
        },
        inputs={DEBUG_DATA: str(path)},
    )


def number_samples(groups: Sequence[Group], rollout_id: int, state: dict[str, Any]) -> list[Sample]:
    """Set the ids of all samples to the next ids after the data source's position `state`, and return the samples. The
    metadata field `source` says that their prompts are not from a file of --prompt-data."""
    for issue, group in enumerate(groups, state["issued"]):
        numbers = {name: number for number, name in enumerate(dict.fromkeys(s.trajectory_id for s in group))}
        parts = dict.fromkeys(numbers, 0)
        for sample in group:
            name = sample.trajectory_id
            sample.group_id = f"{issue:09d}"
            sample.trajectory_id = f"{sample.group_id}-{numbers[name]:02d}"
            sample.sample_id = sample.trajectory_id + (f".{parts[name]}" if parts[name] else "")
            sample.rollout_id = rollout_id
            sample.metadata["source"] = {"epoch": state.get("epoch", 0), "file": -1, "row": -1}
            parts[name] += 1
    return [sample for group in groups for sample in group]
