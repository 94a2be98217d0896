"""One packed micro-batch as this rank computes it: padding for the parallel layout, the zig-zag split over context-parallel
ranks, and the geometry that attention needs. Made once per micro-batch, used by every layer.

What a caller packs is free of padding: tensor and context parallelism need some, and it is added and taken away again here. Which
samples go into a pack is for `stages/train/batching.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from engines.megatron.replay import StreamRouting


class Packed(Protocol):
    """What the engine reads of a micro-batch; the loss may keep more in it."""

    token_ids: Tensor  # [T] int64, sequences one after the other
    position_ids: Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: Tensor  # [B + 1] int32, starts of the sequences, and T
    max_seqlen: int


@dataclass
class PackedStream:
    """What Megatron's layers hand through to our attention as `packed_seq_params`. Here are t tokens, which see k keys."""

    token_ids: Tensor  # [t]
    positions: Tensor  # [t]
    cu_seqlens_q: Tensor  # [S + 1] int32
    cu_seqlens_kv: Tensor  # [S + 1] int32
    max_seqlen_q: int
    max_seqlen_kv: int
    cos_sin: tuple[Tensor, Tensor] | None = None  # rotary embedding, [t, 1, dimensions that turn] each, fp32
    key_rows: Tensor | None = None  # [k] rows of the keys gathered over context-parallel ranks; None: the t keys, as they are
    buckets: list[Bucket] | None = None  # for attention without a variable-length kernel
    real: Tensor | None = None  # [r] rows of this rank that are no padding; None: all
    origin: Tensor | None = None  # [r] where these r tokens stand in the caller's pack; None: same place
    routing: StreamRouting | None = None  # experts to choose again, or a record of those chosen; None: routers are free
    qkv_format: str = "thd"  # Megatron's word for packed


@dataclass
class Bucket:
    """Sequences of similar length, to be padded to the longest: rows of the stream and their places in the padded batch."""

    shape: tuple[int, int, int]  # B sequences, at most Q queries and K keys each
    query_rows: Tensor  # [sum of query lengths] rows of the stream
    query_places: Tensor  # the same tokens in [B * Q]
    key_rows: Tensor
    key_places: Tensor  # in [B * K]
    mask: Tensor | None  # [B, 1, Q, K] for B sequences of other query than key lengths; None: plain causal

    def to(self, device: torch.device) -> Bucket:
        """The same on a device."""
        indices = (self.query_rows, self.query_places, self.key_rows, self.key_places)
        query_rows, query_places, key_rows, key_places = (index.to(device) for index in indices)
        mask = None if self.mask is None else self.mask.to(device)
        return Bucket(self.shape, query_rows, query_places, key_rows, key_places, mask)


def pack_stream(
    packed: Packed, device: torch.device, tensor: int = 1, context: int = 1, context_rank: int = 0, bucketed: bool = True
) -> PackedStream:
    """Lay a pack out for this rank.

    Args:
        packed: the whole pack, the same on every tensor- and context-parallel rank.
        device: where to compute.
        tensor: sequence-parallel ranks, whose number must divide the stream (1 without sequence parallelism).
        context: number of context-parallel ranks.
        context_rank: this one's.
        bucketed: prepare attention for a device or a dtype without a variable-length kernel.
    """
    if tensor == context == 1:
        stream = _plain_stream(packed, device)
    else:
        stream = _split_stream(packed, device, tensor, context, context_rank)
    if bucketed:
        buckets = make_buckets(stream.cu_seqlens_q.tolist(), stream.cu_seqlens_kv.tolist())
        stream.buckets = [bucket.to(device) for bucket in buckets]
    return stream


def _plain_stream(packed: Packed, device: torch.device) -> PackedStream:
    cu_seqlens = packed.cu_seqlens.to(device, torch.int32)
    return PackedStream(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        token_ids=packed.token_ids.to(device),
        positions=packed.position_ids.to(device),
    )


def _split_stream(packed: Packed, device: torch.device, tensor: int, context: int, rank: int) -> PackedStream:
    """Every sequence is padded to 2 * context equal pieces, of which this rank holds number `rank` and number
    `2 * context - 1 - rank`: so all ranks have equal work under a causal mask. Attention sees each piece as a sequence with more
    keys than queries."""
    starts = packed.cu_seqlens.tolist()
    pieces = 2 * context if context > 1 else 1
    lengths = [-(-(end - start) // pieces) * pieces for start, end in pairwise(starts)]
    if shortfall := -sum(lengths) % (tensor * context * (2 if context > 1 else 1)):
        lengths.append(shortfall)  # one more sequence, of padding only
    starts = [*starts, starts[-1]][: len(lengths) + 1]  # its origin: nowhere

    mine = sorted({rank, pieces - 1 - rank}) if context > 1 else [0]
    held, origins, positions = [], [], []
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    key_rows: list[Tensor] = []
    offset = 0  # of the sequence in the padded stream
    layout = _holders(lengths, context)  # [padded T]: row of each token in the gathered keys
    for index, length in enumerate(lengths):
        size = length // pieces
        known = starts[index + 1] - starts[index] if index + 1 < len(starts) else 0
        for piece in mine:
            at = torch.arange(piece * size, (piece + 1) * size)
            held.append(offset + at)
            positions.append(at)
            origins.append(torch.where(at < known, starts[index] + at, -1))
            query_lengths.append(size)
            key_lengths.append((piece + 1) * size)
            key_rows.append(layout[offset : offset + key_lengths[-1]])
        offset += length
    origin, position = torch.cat(origins), torch.cat(positions)
    real = (origin >= 0).nonzero()[:, 0]
    tokens = packed.token_ids.cpu()
    token_ids = torch.where(origin >= 0, tokens[origin.clamp_min(0)], 0)
    return PackedStream(
        cu_seqlens_q=_cumulative(query_lengths).to(device),
        cu_seqlens_kv=_cumulative(key_lengths).to(device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_kv=max(key_lengths),
        token_ids=token_ids.to(device),
        positions=position.to(device),
        key_rows=torch.cat(key_rows).to(device) if context > 1 else None,
        real=real.to(device),
        origin=origin[real].to(device),
    )


def _holders(lengths: list[int], context: int) -> Tensor:
    """For each token of the padded stream: its row when the ranks' shares are laid one after the other. [sum of lengths]"""
    if context == 1:
        return torch.arange(sum(lengths))
    shares: list[list[Tensor]] = [[] for _ in range(context)]
    offset = 0
    for length in lengths:
        piece = torch.arange(offset, offset + length).view(2 * context, -1)
        for rank in range(context):
            shares[rank] += [piece[rank], piece[2 * context - 1 - rank]]
        offset += length
    return torch.argsort(torch.cat([token for share in shares for token in share]))


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make_buckets(query_starts: list[int], key_starts: list[int]) -> list[Bucket]:
    """Group the sequences so that padding each group to its longest wastes little: two groups per octave of length.

    A pack of the tiny recipe holds 256 sequences of about 10 tokens: one bucket. One by one they would cost 256 calls a layer.
    """
    groups: dict[int, list[int]] = {}
    for index, (start, end) in enumerate(pairwise(key_starts)):
        if query_starts[index + 1] > query_starts[index]:
            groups.setdefault(_round_up(end - start), []).append(index)
    groups_in_order = [group for _, group in sorted(groups.items())]
    return [
        _bucket([query_starts[i : i + 2] for i in group], [key_starts[i : i + 2] for i in group]) for group in groups_in_order
    ]


def _round_up(length: int) -> int:
    """16, 24, 32, 48, 64, 96, ..."""
    size = 16
    while length > size:
        if length <= size + size // 2:
            return size + size // 2
        size *= 2
    return size


def _bucket(queries: list[list[int]], keys: list[list[int]]) -> Bucket:
    longest_query = max(end - start for start, end in queries)
    longest_key = max(end - start for start, end in keys)
    query_rows, query_places = _rows_and_places(queries, longest_query)
    key_rows, key_places = _rows_and_places(keys, longest_key)
    mask = None
    surplus = torch.tensor([(key[1] - key[0]) - (query[1] - query[0]) for query, key in zip(queries, keys)])
    if surplus.any():  # the last query sees the last key
        seen = torch.arange(longest_query)[None, :, None] + surplus[:, None, None] >= torch.arange(longest_key)[None, None, :]
        mask = seen[:, None]
    return Bucket((len(queries), longest_query, longest_key), query_rows, query_places, key_rows, key_places, mask)


def _rows_and_places(bounds: list[list[int]], longest: int) -> tuple[Tensor, Tensor]:
    starts, ends = torch.tensor(bounds).unbind(1)
    lengths = ends - starts
    ordinal = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)  # in its sequence
    batch_starts = torch.arange(len(bounds)) * longest
    return torch.repeat_interleave(starts, lengths) + ordinal, torch.repeat_interleave(batch_starts, lengths) + ordinal
