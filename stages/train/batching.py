"""Convert a committed rollout to flat arrays (`Batch`), and pack samples into micro-batches (`pack`).

The engine gets packed sequences; advantage estimators and losses get data of the trained tokens only, so a masked token
does not contribute to a loss. The N trained tokens of a rollout are numbered 0 to N-1 by sample and position, and each
micro-batch stores the numbers of its trained tokens. `microbatches.py` chooses the samples of each micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.families.shape import ModelShape, Vision, experts_format
from penstock.engines.training import PackedImages
from penstock.stages.images import ProcessedImages, SampleImages
from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.stages.train.algorithms.divergences import Teacher
from penstock.stages.train.algorithms.experience import SegmentReducer, TokenFields
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import OptionError, RunError
from penstock.storage.samples.routed_experts import ExpertsFormat
from penstock.storage.samples.sample import TEACHER, TRAIN_REWARD
from penstock.storage.samples.shards import list_column, trained_mask

PAD_TOKEN = 0
NUM_THREADS = 8  # that process the images of a micro-batch


@dataclass(frozen=True)
class Batch:
    """One rollout as flat arrays: B samples, S tokens in total."""

    offsets: np.ndarray  # [B + 1] int64, sample i is tokens offsets[i]:offsets[i + 1]
    token_ids: np.ndarray  # [S] int64
    loss_mask: np.ndarray  # [S] bool, True = trained; False for the first token of a sample, which is not predicted
    rollout_logprobs: np.ndarray  # [S] float32, log-probs of the inference engine at sampling
    rewards: np.ndarray  # [B] float64, NaN = not graded
    group_index: np.ndarray  # [B] int64, numbered in order of appearance
    trajectory_index: np.ndarray  # [B] int64, numbered in order of appearance
    rollout_id: int = 0  # number of the round
    num_new: int | None = None  # samples of the round itself; those after them are replayed; None: all are new
    reward_components: dict[str, np.ndarray] = field(default_factory=dict)  # [B] float64 each, NaN = not recorded
    train_rewards: np.ndarray | None = None  # [B] float64, in place of `rewards` if a user-defined function set them
    teacher_logprobs: np.ndarray | None = None  # [S] float32, if they were computed with the rollout
    teacher_top_k: tuple[np.ndarray, np.ndarray] | None = None  # [N, k] ids and log-probs, if the samples have them
    teacher_index: np.ndarray | None = None  # [B] int64, which teacher in the trainer a sample has; None: the first
    hinted: Batch | None = None  # the same samples after the prompts that the teacher sees, if these are others
    engine_choices: EngineChoices | None = None  # expert ids of the engine's routers, if the trainer replays them
    images: BatchImages | None = None  # of a vision-language model
    image_grids: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))  # [I, 3] as in `PackedImages`
    image_index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] image that stands at a place
    image_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [N] sample of each place

    @classmethod
    def from_table(cls, table: pa.Table, *, needs_rewards: bool, components: Iterable[str] = ()) -> Batch:
        """Convert a table of samples (columns: penstock.storage.samples.sample), without a Python loop over rows.

        Args:
            table: committed samples, in the order in which they were written.
            needs_rewards: whether the loss uses rewards; samples without one (generation or grading failed) are then
                not trained on.
            components: names of the reward components that the advantage estimator compares.
        """
        offsets, loss_mask = trained_mask(table, needs_rewards=needs_rewards)
        rewards = table["reward"].to_numpy().astype(np.float64)  # null becomes NaN
        return cls(
            offsets=offsets,
            token_ids=list_column(table, "token_ids")[1].astype(np.int64),
            loss_mask=loss_mask,
            rollout_logprobs=list_column(table, "rollout_logprobs")[1],
            rewards=rewards,
            group_index=_number_by_first_appearance(table, "group_id"),
            trajectory_index=_number_by_first_appearance(table, "trajectory_id"),
            rollout_id=pc.max(table["rollout_id"]).as_py() or 0,
            reward_components={name: _read_component(table, name, rewards) for name in components},
            train_rewards=_read_train_rewards(table, rewards),
        )

    @cached_property
    def lengths(self) -> np.ndarray:  # [B]
        """Number of tokens of each sample."""
        return np.diff(self.offsets)

    @cached_property
    def trained_positions(self) -> np.ndarray:  # [N]
        """Positions of the trained tokens in the flat arrays."""
        return np.flatnonzero(self.loss_mask)

    @cached_property
    def trained_ordinals(self) -> np.ndarray:  # [S]
        """Number of each trained token among the trained tokens. Meaningless for other tokens."""
        return np.cumsum(self.loss_mask) - 1

    @cached_property
    def sample_index(self) -> np.ndarray:  # [N]
        """Sample index of each trained token, ascending."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[self.trained_positions]

    @cached_property
    def num_trained_tokens(self) -> np.ndarray:  # [B]
        """Number of trained tokens of each sample."""
        return np.bincount(self.sample_index, minlength=len(self.lengths))


def train_flops(
    shape: ModelShape, batch: Batch, samples: np.ndarray, *, frozen: bool = False, trains_vision: bool = False
) -> float:
    """Return the FLOPs of one forward and backward pass over samples of a batch, which passes an image of several
    samples once; `ModelShape.train_flops` says what counts."""
    images = np.unique(batch.image_index[np.isin(batch.image_samples, samples)])
    lengths, grids = batch.lengths[samples], batch.image_grids[images].tolist()
    tokens, squares = int(lengths.sum()), int((lengths**2).sum())
    return shape.train_flops(tokens, squares, grids, frozen=frozen, trains_vision=trains_vision)


def with_images(batch: Batch, table: pa.Table, vision: Vision, images: SampleImages | None) -> Batch:
    """Return a batch with the images of its samples, which `table` names and `images` reads; None: there are none."""
    digests = table["images"].to_pylist()
    used = list(dict.fromkeys(chain.from_iterable(digests)))
    assert images or not used, "the rollout has images, but its commit has no image processor"
    numbers = {digest: number for number, digest in enumerate(used)}
    grids = map_in_threads(images.grid, used, NUM_THREADS) if images else []
    return replace(
        batch,
        images=BatchImages(vision, digests, images.process if images else None),
        image_grids=np.array(grids, np.int64).reshape(-1, 3),
        image_index=np.array([numbers[digest] for own in digests for digest in own], np.int64),
        image_samples=np.repeat(np.arange(len(digests)), [len(own) for own in digests]),
    )


def read_teacher_logprobs(table: pa.Table, batch: Batch) -> np.ndarray:  # [S] float32
    """Return the teacher's log-probs of all tokens, 0.0 for samples that are not trained on. Raises RunError if a
    trained sample has no teacher log-probs."""
    offsets, values = list_column(table, "teacher_logprobs")
    has_values = np.diff(offsets) == batch.lengths
    if (batch.num_trained_tokens[~has_values] > 0).any():
        raise RunError(
            "the rollout has samples without a teacher's log-probs, because it was generated without a teacher: start "
            "a new run with --opd-teacher-engine or --opd-teacher-url"
        )
    result = np.zeros(len(batch.token_ids), np.float32)
    result[np.repeat(has_values, batch.lengths)] = values
    return result


def add_teacher_data(batch: Batch, table: pa.Table, config: AlgorithmConfig) -> Batch:
    """Return the batch with what distillation needs of the samples: what an engine's teacher said, which teacher in the
    trainer a sample has, and the prompts that the teacher sees. Raises RunError if it is missing."""
    if config.reads_teacher_logprobs and not config.distills_vocabulary:
        batch = replace(batch, teacher_logprobs=read_teacher_logprobs(table, batch))
    if config.stored_top_k:
        batch = replace(batch, teacher_top_k=_read_top_k(table, batch, config.stored_top_k))
    if config.loads_teacher and len(config.teacher_names) > 1:
        names = {name: number for number, name in enumerate(config.teacher_names)}
        given = [json.loads(text).get(TEACHER) for text in table["metadata"].to_pylist()]
        if unknown := sorted({repr(name) for name in given} - {repr(name) for name in names}):
            raise RunError(
                f"samples of the rollout have the teacher {unknown[0]}, but --opd-teacher-load has "
                f"{', '.join(names)}: start a new run with a teacher for each name in the column of --opd-teacher-key"
            )
        batch = replace(batch, teacher_index=np.array([names[name] for name in given], np.int64))
    return replace(batch, hinted=_with_teacher_prompts(table, batch)) if config.hinted else batch


def _read_top_k(table: pa.Table, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:  # [N, k] each
    """Return ids and log-probs of the teacher's k most probable tokens at each trained token. The samples may store
    more."""
    trained = batch.num_trained_tokens > 0
    problem = "the rollout was generated without --opd-top-k, so it has no tokens of a teacher"
    if "teacher_top_ids" in table.column_names:
        offsets, ids = list_column(table, "teacher_top_ids")
        logprobs, counts = list_column(table, "teacher_top_logprobs")[1], np.diff(offsets)
        stored = int((counts[trained] // batch.lengths[trained]).max(initial=k))
        is_complete = (counts[trained] == stored * batch.lengths[trained]).all()
        lacking = f"samples of the rollout lack the teacher's {k} most probable tokens at some positions"
        problem = "" if is_complete else lacking
    if problem:
        raise RunError(
            f"{problem}: start a new run with --opd-teacher-engine or --opd-teacher-url, and --opd-top-k {k}"
        )
    local = batch.trained_positions - batch.offsets[batch.sample_index]
    first = (offsets[batch.sample_index] + local * stored)[:, None] + np.arange(k)
    return ids[first], logprobs[first]


def _with_teacher_prompts(table: pa.Table, batch: Batch) -> Batch:
    """Return the samples after the prompts that the teacher sees. The trained tokens and their numbers are the same;
    samples without trained tokens are not changed."""
    problem = (
        "the rollout has no prompts for the teacher, because it was generated without --opd-self: start a new run with "
        "--opd-self and --opd-hint-key"
    )
    if "teacher_prompt_ids" in table.column_names:
        offsets, prompts = list_column(table, "teacher_prompt_ids")
        lacking = np.flatnonzero((batch.num_trained_tokens > 0) & (np.diff(offsets) == 0)).tolist()
        names = [table["sample_id"][row] for row in lacking[:1]]
        advice = "which --opd-self needs: generate it from a prompt of --prompt-data"
        problem = f"sample {names[0]} has no prompt for the teacher, {advice}" if names else ""
    if problem:
        raise RunError(problem)
    token_ids, masks = [], []
    for row, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:])):
        prompt, tokens, mask = (
            prompts[offsets[row] : offsets[row + 1]],
            batch.token_ids[start:end],
            batch.loss_mask[start:end],
        )
        if mask.any():
            first = int(mask.argmax())
            tokens = np.concatenate([prompt.astype(np.int64), tokens[first:]])
            mask = np.concatenate([np.zeros(len(prompt), bool), mask[first:]])
        token_ids.append(tokens)
        masks.append(mask)
    return replace(
        batch,
        offsets=np.cumsum([0, *map(len, token_ids)]),
        token_ids=np.concatenate(token_ids),
        loss_mask=np.concatenate(masks),
        engine_choices=None,
    )


def spread(values: Tensor, trained: Batch, recorded: Batch) -> Tensor:  # [N] -> [M]
    """Return `values`, which belong to the N trained tokens of `trained`, for the M trained tokens of `recorded`: the
    same rollout before a user-defined function masked tokens. Masked tokens get 0."""
    full = torch.zeros(len(recorded.token_ids), dtype=values.dtype)
    full[torch.from_numpy(trained.trained_positions)] = values
    return full[torch.from_numpy(recorded.trained_positions)]


def _read_train_rewards(table: pa.Table, rewards: np.ndarray) -> np.ndarray | None:  # [B] float64
    """Return the rewards that a user-defined function of the rollout has set for training (NaN for samples without a
    reward), or None if it has set none. Raises RunError if only some of the samples with a reward (not NaN in
    `rewards`) have a reward for training."""
    values = pc.map_lookup(table["rewards"], TRAIN_REWARD, "first")
    if values.null_count == len(values):
        return None
    result = values.to_numpy().astype(np.float64)
    if np.isnan(result[~np.isnan(rewards)]).any():
        raise RunError(
            f"only some samples of the rollout have the reward component {TRAIN_REWARD}, a name that is reserved for "
            "--custom-reward-post-process-path: rename this component of your reward"
        )
    return result


def _read_component(table: pa.Table, name: str, rewards: np.ndarray) -> np.ndarray:  # [B] float64
    """Return a component of every sample's reward; NaN for samples without a reward (NaN in `rewards`). Raises RunError
    if a sample with a reward does not have the component."""
    result = pc.map_lookup(table["rewards"], name, "first").to_numpy().astype(np.float64)
    result[np.isnan(rewards)] = np.nan
    if num_missing := np.isnan(result[~np.isnan(rewards)]).sum():
        raise RunError(
            f"{num_missing} samples of the rollout have a reward without the component {name!r} of "
            "--gdpo-reward-weights: start a new run whose reward function always returns a finite number for it"
        )
    return result


def _number_by_first_appearance(table: pa.Table, name: str) -> np.ndarray:
    """Return the strings of a column as integers [B], numbered in order of first appearance."""
    return table[name].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


@dataclass
class PackedMicrobatch:
    """One micro-batch: S sequences, concatenated to T tokens, and the data of its n trained tokens.

    A micro-batch is not padded; the engine adds and removes the padding that tensor and context parallelism need.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence; [3, T] with images (`EnginePack`)
    cu_seqlens: Tensor  # [S + 1] int32, start of each sequence, then T
    max_seqlen: int
    trained: Tensor  # [n] int64, positions (of hidden states) that predict the trained tokens, ascending
    targets: Tensor  # [n] int64, token ids of the trained tokens
    ordinal: Tensor  # [n] int64, number of each trained token among the N trained tokens of the rollout
    samples: SegmentReducer  # sums over the trained tokens of each sequence
    hinted: PackedMicrobatch | None = None  # the same samples after the prompts that the teacher sees
    teacher: Teacher | None = None  # the teacher's distributions at the n positions, for --opd-divergence
    fields: TokenFields | None = None  # inputs of the loss, [n] each; set after the advantages are computed
    weights: Tensor | None = None  # [n] float32; the loss of a step is the sum of weight x loss over its tokens
    routing: dict[int, Tensor] | None = None  # recorded expert ids of the tokens, for routing replay (`EnginePack`)
    images: PackedImages | None = None  # of a vision-language model (`EnginePack`)
    stream: Any = None  # tokens of this rank on the device (`EnginePack`)

    def to_local(self, device: torch.device, tokens: slice, group: dist.ProcessGroup | None = None) -> PackedMicrobatch:
        """Return a copy whose loss inputs are on `device` and contain only trained tokens with hidden states on this
        rank.

        Args:
            device: device on which the loss is computed; the engine moves `token_ids` itself.
            tokens: tokens (of T) whose hidden states this rank has: all, except under context parallelism.
            group: context-parallel ranks that hold the other positions of the same sequences.
        """
        kept = slice(*torch.searchsorted(self.trained, torch.tensor([tokens.start, tokens.stop])).tolist())
        return replace(
            self,
            trained=(self.trained[kept] - tokens.start).to(device),
            targets=self.targets[kept].to(device),
            ordinal=self.ordinal[kept].to(device),
            samples=SegmentReducer(self.samples.index[kept].to(device), self.samples.num_tokens.to(device), group),
        )


def pack(batch: Batch, sample_indices: Sequence[int]) -> PackedMicrobatch:
    """Pack samples of a batch into one micro-batch. Without samples, the micro-batch is one pad token, so that this
    rank still takes part in every collective."""
    per_sample = [np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in sample_indices]
    lengths = [len(tokens) for tokens in per_sample] or [1]
    tokens = np.concatenate(per_sample) if per_sample else np.zeros(0, dtype=np.int64)  # positions in the flat arrays
    cu_seqlens = np.cumsum([0, *lengths])
    positions, images = torch.from_numpy(np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)), None
    if batch.images is not None:
        positions, images = batch.images.pack(batch, sample_indices)
    # A position predicts the next token. The loss mask is False for the first token of every sample, so the last
    # position of a sample is not trained to predict the first token of the next sample.
    trained = np.flatnonzero(batch.loss_mask[tokens[1:]])
    targets = tokens[trained + 1]
    sequence = np.repeat(np.arange(len(sample_indices)), lengths if per_sample else 0)[trained]
    return PackedMicrobatch(
        token_ids=torch.from_numpy(batch.token_ids[tokens] if per_sample else np.array([PAD_TOKEN])),
        position_ids=positions,
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=max(lengths),
        trained=torch.from_numpy(trained),
        targets=torch.from_numpy(batch.token_ids[targets]),
        ordinal=torch.from_numpy(batch.trained_ordinals[targets]),
        samples=SegmentReducer(
            torch.from_numpy(sequence), torch.from_numpy(batch.num_trained_tokens[list(sample_indices)])
        ),
        routing=None if batch.engine_choices is None else batch.engine_choices.decode(sample_indices),
        images=images,
    )


@dataclass(frozen=True)
class BatchImages:
    """The images of the samples of a rollout, which are processed when a micro-batch is packed."""

    vision: Vision
    digests: list[list[str]]  # [B] images of each sample, in the order of their tokens
    process: Callable[[str], ProcessedImages] | None  # returns the patches of one image; None: there are no images

    def pack(self, batch: Batch, sample_indices: Sequence[int]) -> tuple[Tensor, PackedImages | None]:
        """Return the positions of the tokens of a micro-batch of samples, [3, T], and its images."""
        digests = [self.digests[row] for row in sample_indices]
        used = list(dict.fromkeys(digest for own in digests for digest in own))
        processed = dict(zip(used, map_in_threads(self.process, used, NUM_THREADS))) if self.process else {}
        positions, starts, end = [np.zeros((3, int(not digests)), np.int64)], [], 0
        for row, own in zip(sample_indices, digests):
            token_ids = batch.token_ids[batch.offsets[row] : batch.offsets[row + 1]]
            own_grids = [processed[digest].grid_thw[0] for digest in own]
            own_starts = self.vision.image_starts(token_ids, own_grids)
            positions.append(self.vision.token_positions(len(token_ids), own_starts, own_grids))
            starts += [end + start for start in own_starts]
            end += len(token_ids)
        all_positions = torch.from_numpy(np.concatenate(positions, axis=1))
        if not used:
            return all_positions, None
        pixels = torch.from_numpy(np.concatenate([processed[digest].pixel_values for digest in used]))
        grids = torch.from_numpy(np.concatenate([processed[digest].grid_thw for digest in used]).astype(np.int64))
        image_index = torch.tensor([used.index(digest) for own in digests for digest in own])
        return all_positions, PackedImages(pixels, grids, torch.tensor(starts), image_index)


@dataclass(frozen=True)
class EngineChoices:
    """Expert ids that the engine's routers chose for every token of a rollout, encoded as bytes per sample. `decode`
    decodes the samples of one micro-batch when the micro-batch is packed."""

    format: ExpertsFormat
    column: pa.ChunkedArray  # [B] bytes of each sample; null = not recorded
    lengths: np.ndarray  # [B] number of tokens of each sample

    @classmethod
    def from_table(cls, table: pa.Table, shape: ModelShape) -> EngineChoices:
        """Read the column `routed_experts` of a committed rollout."""
        option = "--use-rollout-routing-replay"
        experts = experts_format(shape, option)
        column = table["routed_experts"]
        if len(table) and column.null_count == len(table):
            raise OptionError(
                f"{option}: the samples of this rollout have no routed experts: generate the rollout with {option}, or "
                "train without it"
            )
        return cls(experts, column, pc.list_value_length(table["token_ids"]).to_numpy().astype(np.int64))

    def decode(self, sample_indices: Sequence[int]) -> dict[int, Tensor]:
        """Return the recorded expert ids of a micro-batch of samples: MoE layer -> [tokens, top_k]. Without samples,
        the micro-batch is one pad token, and no experts are recorded.
        """
        parts = [self.format.decode(self.column[int(row)].as_py(), int(self.lengths[row])) for row in sample_indices]
        if not parts:
            return {}
        chosen = torch.from_numpy(np.concatenate(parts))  # [T, layers with experts, top_k]
        return {layer: chosen[:, i] for i, layer in enumerate(self.format.routed_layers)}
