"""From a committed rollout to packed micro-batches.

The engine gets packs; estimators and objectives get streams over trained tokens alone, so that a masked token never reaches a loss.
A rollout has N of them, numbered in order of samples and positions: a micro-batch says which ones it holds. Which samples go into
which pack is for `plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from engines.megatron.replay import RoutingRecord
from stages.train.algorithms.sequences import SampleSums
from stages.train.algorithms.streams import TokenStreams
from stages.train.routing import EngineChoices

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
    engine_choices: EngineChoices | None = None  # which experts the engine sent the tokens to, if the trainer is to do the same

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

    @cached_property
    def lengths(self) -> np.ndarray:  # [B]
        """Tokens of each sample."""
        return np.diff(self.offsets)

    @cached_property
    def trained(self) -> np.ndarray:  # [N]
        """Places of the trained tokens."""
        return np.flatnonzero(self.loss_mask)

    @cached_property
    def sample_index(self) -> np.ndarray:  # [N]
        """Sample of each trained token; ascending."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)[self.trained]

    @cached_property
    def num_trained(self) -> np.ndarray:  # [B]
        """Trained tokens of each sample."""
        return np.bincount(self.sample_index, minlength=len(self.lengths))


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False).copy()


def _numbered(table: pa.Table, name: str) -> np.ndarray:
    column = table[name].combine_chunks()
    strings = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    return strings.dictionary_encode().indices.to_numpy().astype(np.int64)


# ---- packs ------------------------------------------------------------------------------------------------------------------


@dataclass
class Packed:
    """One micro-batch: S sequences behind each other as T tokens, and what is known of the n of them that are trained.

    There is no padding here. What tensor and context parallelism need of it the engine adds and takes away again.
    """

    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32, starts of the sequences, and T
    max_seqlen: int
    trained: Tensor  # [n] int64, rows of the hidden states whose predictions are trained, ascending
    targets: Tensor  # [n] int64, the trained tokens
    ordinal: Tensor  # [n] int64, which of the rollout's N trained tokens they are
    samples: SampleSums  # to which sequence each belongs
    streams: TokenStreams | None = None  # [n] each; known when advantages have been estimated
    weights: Tensor | None = None  # [n] float32, weight x loss summed over the step's tokens is the step's loss
    routing: RoutingRecord | None = None  # which experts the tokens went to, if they are to go there again

    def on(self, device: torch.device, rows: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Packed:
        """The same with what concerns the loss on `device`, and only for the tokens whose hidden states are here.

        Args:
            device: where the loss is computed; the engine moves the tokens itself.
            rows: [r] positions (in T) of this rank's hidden states under context parallelism; None = all T.
            group: the ranks that have the other ones.
        """
        kept: slice | Tensor = slice(None)
        trained = self.trained
        if rows is not None:
            place = torch.full((len(self.token_ids),), -1)
            place[rows.cpu()] = torch.arange(len(rows))
            kept = place[self.trained] >= 0
            trained = place[self.trained[kept]]
        return replace(
            self,
            trained=trained.to(device),
            targets=self.targets[kept].to(device),
            ordinal=self.ordinal[kept].to(device),
            samples=SampleSums(self.samples.index[kept].to(device), self.samples.num_tokens.to(device), group),
        )


def pack(batch: Batch, rows: Sequence[int]) -> Packed:
    """Lay samples out behind each other. No rows give one pad token, so that the rank still joins every collective."""
    source = [np.arange(batch.offsets[row], batch.offsets[row + 1]) for row in rows]  # tokens of the rollout, sample by sample
    lengths = [len(tokens) for tokens in source] or [1]
    tokens = np.concatenate(source) if source else np.zeros(0, dtype=np.int64)
    cu_seqlens = np.cumsum([0, *lengths])
    # A position predicts the token after it. The first token of a sample is never in the mask, so none predicts across a border.
    trained = np.flatnonzero(batch.loss_mask[tokens[1:]])
    targets = tokens[trained + 1]
    sequence = np.repeat(np.arange(len(rows)), lengths if source else 0)[trained]
    return Packed(
        token_ids=torch.from_numpy(batch.token_ids[tokens] if source else np.array([PAD_TOKEN])),
        position_ids=torch.from_numpy(np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=max(lengths),
        trained=torch.from_numpy(trained),
        targets=torch.from_numpy(batch.token_ids[targets]),
        ordinal=torch.from_numpy(np.searchsorted(batch.trained, targets)),
        samples=SampleSums(torch.from_numpy(sequence), torch.from_numpy(batch.num_trained[list(rows)])),
        routing=None if batch.engine_choices is None else batch.engine_choices.record(rows),
    )
