"""From a committed rollout to packed micro-batches: who trains which sample, in which step, in which pack.

Everything here is a function of the table and a few numbers, so every rank computes the same plan and takes its own part. The
engine gets packs; the objectives get streams over the N trained tokens alone, so that a masked token never reaches a loss. No
process groups, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from stages.train.algorithms.objectives import TokenStreams

PAD_TOKEN = 0


@dataclass(frozen=True)
class Batch:
    """One rollout as flat arrays. B samples, S tokens in all."""

    offsets: np.ndarray  # [B + 1] int64, sample i is tokens offsets[i]:offsets[i + 1]
    token_ids: np.ndarray  # [S] int64
    loss_mask: np.ndarray  # [S] bool; never on a sample's first token, which nothing predicts
    rollout_logprobs: np.ndarray  # [S] float32
    rewards: np.ndarray  # [B] float64, NaN = not graded
    group_index: np.ndarray  # [B] int64, numbered in order of appearance
    trajectory_index: np.ndarray  # [B] int64, numbered in order of appearance

    @classmethod
    def from_table(cls, table: pa.Table, *, graded: bool) -> Batch:
        """Read the columns of storage.sample without a Python loop over rows.

        Args:
            table: committed samples, in the order written.
            graded: the loss needs rewards: a sample without one (its generation or grading failed) is not trained.
        """
        offsets, token_ids = _flat(table, "token_ids")
        loss_mask = _flat(table, "loss_mask")[1].astype(bool)
        rewards = table["reward"].to_numpy().astype(np.float64)  # null becomes NaN
        lengths = np.diff(offsets)
        loss_mask[offsets[:-1][lengths > 0]] = False
        if graded:
            loss_mask &= np.repeat(~np.isnan(rewards), lengths)
        return cls(
            offsets=offsets,
            token_ids=token_ids.astype(np.int64),
            loss_mask=loss_mask,
            rollout_logprobs=_flat(table, "rollout_logprobs")[1],
            rewards=rewards,
            group_index=_numbered(table, "group_id"),
            trajectory_index=_numbered(table, "trajectory_id"),
        )

    @property
    def num_trained(self) -> np.ndarray:  # [B]
        """Trained tokens of each sample."""
        running = np.concatenate([[0], np.cumsum(self.loss_mask)])
        return running[self.offsets[1:]] - running[self.offsets[:-1]]


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False).copy()


def _numbered(table: pa.Table, name: str) -> np.ndarray:
    column = table[name].combine_chunks()
    strings = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return strings.dictionary_encode().indices.to_numpy().astype(np.int64)


# ---- the plan ---------------------------------------------------------------------------------------------------------------


def optimizer_steps(trajectory_index: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """Sample rows of each optimizer step: consecutive blocks of `global_batch_size` trajectories, siblings together.

    Raises:
        ValueError: a remainder would be left over; nothing is dropped silently.
    """
    num_trajectories = int(trajectory_index.max(initial=-1)) + 1
    if num_trajectories == 0 or num_trajectories % global_batch_size:
        raise ValueError(
            f"the rollout holds {num_trajectories} trajectories, which --global-batch-size {global_batch_size} does not "
            "divide: choose it so that rollout batch x samples per prompt is a multiple of it"
        )
    step_of_row = trajectory_index // global_batch_size
    return [np.flatnonzero(step_of_row == step) for step in range(num_trajectories // global_batch_size)]


def plan_microbatches(lengths: Sequence[int], capacity: int, multiple_of: int) -> list[list[int]]:
    """Indices of the samples of each micro-batch.

    One first-fit pass in order of arrival; a sample longer than `capacity` sits alone. The number of micro-batches is then raised
    to a multiple of `multiple_of` (data-parallel ranks x pipeline group) by splitting the heaviest one that has several samples,
    and by empty ones when there is nothing left to split.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity)
        bins[place].append(index)
        room[place] -= length
    while not bins or len(bins) % multiple_of:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b), default=None)
        if heaviest is None:
            bins.append([])
        else:
            bins[bins.index(heaviest) : bins.index(heaviest) + 1] = _halves(heaviest, lengths)
    return bins


def _halves(samples: list[int], lengths: Sequence[int]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    weights = [0, 0]
    for index in sorted(samples, key=lambda i: -lengths[i]):  # longest first, into the lighter half
        lighter = int(weights[1] < weights[0])
        halves[lighter].append(index)
        weights[lighter] += lengths[index]
    return [sorted(half) for half in halves]


# ---- packs ------------------------------------------------------------------------------------------------------------------


@dataclass
class Packed:
    """One micro-batch: B sequences behind each other as T tokens, and what is known of the N of them that are trained.

    There is no padding here. What tensor and context parallelism need of it the engine adds and takes away again.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [B + 1] int32, starts of the sequences, and T
    max_seqlen: int
    trained: Tensor  # [N] int64, rows of the hidden states whose predictions are trained, ascending
    targets: Tensor  # [N] int64, the trained tokens
    weights: Tensor  # [N] float32, weight x loss summed over the step's tokens is the step's loss
    sample_index: Tensor  # [N] int64, row in the rollout
    streams: TokenStreams  # [N] each

    def on(self, device: torch.device, rows: Tensor | None = None) -> Packed:
        """The same with what concerns the loss on `device`, and only for the tokens whose hidden states are here.

        Args:
            device: where the loss is computed; the engine moves the tokens itself.
            rows: [r] positions (in T) of this rank's hidden states under context parallelism; None = all T.
        """
        kept: slice | Tensor = slice(None)
        trained = self.trained
        if rows is not None:
            place = torch.full((len(self.token_ids),), -1)
            place[rows.cpu()] = torch.arange(len(rows))
            kept = place[self.trained] >= 0
            trained = place[self.trained[kept]]
        streams = {name: stream[kept].to(device) for name, stream in vars(self.streams).items() if stream is not None}
        return replace(
            self,
            trained=trained.to(device),
            targets=self.targets[kept].to(device),
            weights=self.weights[kept].to(device),
            sample_index=self.sample_index[kept].to(device),
            streams=TokenStreams(**streams),
        )


def pack(
    batch: Batch,
    rows: Sequence[int],  # samples of this micro-batch
    weights: np.ndarray,  # [S] per token of the rollout, zero where not trained
    advantages: np.ndarray,  # [B]
) -> Packed:
    """Lay samples out behind each other. No rows give one pad token, so that the rank still joins every collective."""
    source = [np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in rows]  # tokens of the rollout, sample by sample
    lengths = [len(tokens) for tokens in source] or [1]
    tokens = np.concatenate(source) if source else np.zeros(0, dtype=np.int64)
    cu_seqlens = np.cumsum([0, *lengths])
    # A position predicts the token after it. The first token of a sample is never in the mask, so none predicts across a border.
    trained = np.flatnonzero(batch.loss_mask[tokens[1:]])
    targets = tokens[trained + 1]
    samples = np.repeat(np.asarray(rows, dtype=np.int64), lengths if source else 0)[trained]
    return Packed(
        token_ids=torch.from_numpy(batch.token_ids[tokens] if source else np.array([PAD_TOKEN])),
        position_ids=torch.from_numpy(np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=max(lengths),
        trained=torch.from_numpy(trained),
        targets=torch.from_numpy(batch.token_ids[targets]),
        weights=torch.from_numpy(weights[targets].astype(np.float32)),
        sample_index=torch.from_numpy(samples),
        streams=TokenStreams(
            advantages=torch.from_numpy(advantages[samples].astype(np.float32)),
            rollout_logprobs=torch.from_numpy(batch.rollout_logprobs[targets]),
        ),
    )
