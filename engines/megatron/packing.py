"""Convert a packed micro-batch to the tokens that one rank processes (`PackedStream`): pad the micro-batch for the
parallel sizes, split it in zig-zag order over context-parallel ranks, and compute the indices that attention needs.

A stream is built once per micro-batch and used by every layer. Callers pack without padding; the padding that tensor
and context parallelism need is added here, and the engine removes it from the results. `stages/train/batching.py`
decides which samples are packed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from penstock.engines.megatron.model.attention_kernel import AttentionKernel
from penstock.engines.megatron.model.router_replay import StreamRouting


class PackedTokens(Protocol):
    """A packed micro-batch (pack) of B sequences with T tokens in total: the fields that the engine reads.

    With routing replay the engine also reads `routing: RoutingRecord | None`. A loss function may use further fields.
    """

    token_ids: Tensor  # [T] int64, the concatenated sequences
    position_ids: Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: Tensor  # [B + 1] int32, index of each sequence's first token, and T
    max_seqlen: int  # number of tokens of the longest sequence


@dataclass
class PackedStream:
    """The tokens of a micro-batch that this rank processes: t tokens (rows) in S sequences, padding included.

    Megatron's layers pass the stream to `CoreAttention` and `MLASelfAttention` as `packed_seq_params`. Under context
    parallelism each of this rank's pieces of a sequence counts as a sequence. k: number of keys of all sequences.
    """

    token_ids: Tensor  # [t]
    positions: Tensor  # [t] position in the sequence
    cu_seqlens_q: Tensor  # [S + 1] int32, cumulative number of queries
    cu_seqlens_kv: Tensor  # [S + 1] int32, cumulative number of keys
    max_seqlen_q: int
    max_seqlen_kv: int
    cos_sin: tuple[Tensor, Tensor] | None = None  # RoPE cosines and sines, [t, 1, rope_dim] each, fp32
    key_rows: Tensor | None = None  # [k] indices into the keys gathered over context-parallel ranks; None: no gather
    buckets: list[Bucket] | None = None  # sequences grouped by length, for the kernel "padded"
    real_rows: Tensor | None = None  # [r] indices of this rank's rows that are not padding; None: all rows
    pack_index: Tensor | None = None  # [r] index in the unpadded micro-batch of each of `real_rows`; None: the same
    routing: StreamRouting | None = None  # expert ids to replay or record; None: the routers select
    kernel: AttentionKernel = "padded"
    qkv_format: str = "thd"  # Megatron's name for packed sequences


@dataclass
class Bucket:
    """B sequences of similar length, which attention pads to one batch.

    Every token has an index in the stream (row) and an index in the flattened padded batch (place).
    """

    shape: tuple[int, int, int]  # (B, Q, K): number of sequences, maximum number of queries and of keys
    query_rows: Tensor  # [sum of query lengths] index of each query in the stream
    query_places: Tensor  # [sum of query lengths] index of each query in the padded batch [B * Q]
    key_rows: Tensor  # [sum of key lengths] index of each key in the stream's keys
    key_places: Tensor  # [sum of key lengths] index of each key in the padded batch [B * K]
    mask: Tensor | None  # [B, 1, Q, K] if a sequence has more keys than queries; None: plain causal mask

    def to(self, device: torch.device) -> Bucket:
        """Return a copy of the bucket with all tensors on `device`."""
        indices = (self.query_rows, self.query_places, self.key_rows, self.key_places)
        query_rows, query_places, key_rows, key_places = (index.to(device) for index in indices)
        mask = None if self.mask is None else self.mask.to(device)
        return Bucket(self.shape, query_rows, query_places, key_rows, key_places, mask)


def pack_stream(
    packed: PackedTokens,
    device: torch.device,
    tensor: int = 1,
    context: int = 1,
    context_rank: int = 0,
    kernel: AttentionKernel = "padded",
) -> PackedStream:
    """Return the tokens of a packed micro-batch that this rank processes, padded and split.

    Args:
        packed: the whole micro-batch, the same on every tensor- and context-parallel rank.
        device: device of the stream's tensors.
        tensor: sequence-parallel size (1 without sequence parallelism); the stream is padded to a multiple of it.
        context: context-parallel size.
        context_rank: this rank's index in its context-parallel group.
        kernel: attention kernel that the model uses; `buckets` are computed only for "padded".
    """
    if tensor == context == 1:
        cu_seqlens = packed.cu_seqlens.to(device, torch.int32)
        stream = PackedStream(
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_kv=packed.max_seqlen,
            token_ids=packed.token_ids.to(device),
            positions=packed.position_ids.to(device),
        )
    else:
        stream = _split_stream(packed, device, tensor, context, context_rank)
    stream.kernel = kernel
    if kernel == "padded":
        buckets = make_buckets(stream.cu_seqlens_q.tolist(), stream.cu_seqlens_kv.tolist())
        stream.buckets = [bucket.to(device) for bucket in buckets]
    return stream


def _split_stream(packed: PackedTokens, device: torch.device, tensor: int, context: int, rank: int) -> PackedStream:
    """Return the tokens of a packed micro-batch that one context-parallel rank processes (see `pack_stream`).

    Every sequence is padded and split into 2 * `context` equal pieces; the rank gets pieces `rank` and
    2 * `context` - 1 - `rank`, which balances the work under a causal mask. For attention each piece is a sequence of
    its own, whose keys also include all earlier pieces.
    """
    starts = packed.cu_seqlens.tolist()
    pieces = 2 * context if context > 1 else 1
    lengths = [-(-(end - start) // pieces) * pieces for start, end in pairwise(starts)]
    if shortfall := -sum(lengths) % (tensor * context * (2 if context > 1 else 1)):
        lengths.append(shortfall)  # an additional sequence of padding only
    starts = [*starts, starts[-1]][: len(lengths) + 1]

    local_pieces = sorted({rank, pieces - 1 - rank}) if context > 1 else [0]
    pack_indices, positions, key_rows = [], [], []
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    offset = 0  # index of the sequence's first token in the padded micro-batch
    gathered_rows = _indices_after_context_gather(lengths, context)
    for index, length in enumerate(lengths):
        size = length // pieces
        num_tokens = starts[index + 1] - starts[index] if index + 1 < len(starts) else 0
        for piece in local_pieces:
            position = torch.arange(piece * size, (piece + 1) * size)
            positions.append(position)
            pack_indices.append(torch.where(position < num_tokens, starts[index] + position, -1))
            query_lengths.append(size)
            key_lengths.append((piece + 1) * size)
            key_rows.append(gathered_rows[offset : offset + key_lengths[-1]])
        offset += length
    pack_index = torch.cat(pack_indices)
    real_rows = (pack_index >= 0).nonzero()[:, 0]
    token_ids = torch.where(pack_index >= 0, packed.token_ids.cpu()[pack_index.clamp_min(0)], 0)
    return PackedStream(
        cu_seqlens_q=_cumulative_lengths(query_lengths).to(device),
        cu_seqlens_kv=_cumulative_lengths(key_lengths).to(device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_kv=max(key_lengths),
        token_ids=token_ids.to(device),
        positions=torch.cat(positions).to(device),
        key_rows=torch.cat(key_rows).to(device) if context > 1 else None,
        real_rows=real_rows.to(device),
        pack_index=pack_index[real_rows].to(device),
    )


def _cumulative_lengths(lengths: list[int]) -> Tensor:
    """Return the cumulative lengths, starting with 0. [number of lengths + 1] int32"""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _indices_after_context_gather(lengths: list[int], context: int) -> Tensor:
    """Return, for each token of the padded micro-batch, its index after a gather of the tokens of all context-parallel
    ranks. [sum of lengths]"""
    if context == 1:
        return torch.arange(sum(lengths))
    shares: list[list[Tensor]] = [[] for _ in range(context)]
    offset = 0
    for length in lengths:
        pieces = torch.arange(offset, offset + length).view(2 * context, -1)
        for rank in range(context):
            shares[rank] += [pieces[rank], pieces[2 * context - 1 - rank]]
        offset += length
    return torch.argsort(torch.cat([tokens for share in shares for tokens in share]))


def make_buckets(query_starts: list[int], key_starts: list[int]) -> list[Bucket]:
    """Group the sequences of a stream by length (`round_up_to_bucket_length`), so that padding each group is cheap.

    For example, 256 sequences of about 10 tokens become one bucket: one attention call per layer instead of 256.

    Args:
        query_starts: [S + 1] cumulative number of queries.
        key_starts: [S + 1] cumulative number of keys.
    """
    groups: dict[int, list[int]] = {}
    for index, (start, end) in enumerate(pairwise(key_starts)):
        if query_starts[index + 1] > query_starts[index]:
            groups.setdefault(round_up_to_bucket_length(end - start), []).append(index)
    buckets = []
    for _, group in sorted(groups.items()):
        queries = torch.tensor([query_starts[index : index + 2] for index in group])
        keys = torch.tensor([key_starts[index : index + 2] for index in group])
        num_queries, num_keys = queries.diff()[:, 0], keys.diff()[:, 0]
        shape = (len(group), int(num_queries.max()), int(num_keys.max()))
        surplus, mask = num_keys - num_queries, None
        if surplus.any():  # the last query attends to the last key
            last_key = torch.arange(shape[1])[None, :, None] + surplus[:, None, None]
            mask = (last_key >= torch.arange(shape[2])[None, None, :])[:, None]
        buckets.append(
            Bucket(
                shape, *_stream_and_padded_indices(queries, shape[1]), *_stream_and_padded_indices(keys, shape[2]), mask
            )
        )
    return buckets


def round_up_to_bucket_length(length: int) -> int:
    """Return `length` rounded up to the next of 16, 24, 32, 48, 64, 96, ... (two sizes per power of two)."""
    size = 16
    while length > size:
        if length <= size + size // 2:
            return size + size // 2
        size *= 2
    return size


def _stream_and_padded_indices(bounds: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the index of every token in the stream, and in the flattened padded batch [B * longest].

    Args:
        bounds: [B, 2] start and end of each sequence in the stream.
        longest: length to which the sequences are padded.
    """
    starts, ends = bounds.unbind(1)
    lengths = ends - starts
    total = int(lengths.sum())
    index_in_sequence = torch.arange(total) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    rows = torch.repeat_interleave(starts, lengths) + index_in_sequence
    batch_starts = torch.arange(len(bounds)) * longest
    return rows, torch.repeat_interleave(batch_starts, lengths) + index_in_sequence
