"""Convert a packed micro-batch to the tokens that one rank processes (`PackedStream`): pad the micro-batch for the
parallel sizes, split it over context-parallel ranks, and group its sequences by length.

A stream is built once per micro-batch and used by every layer. Callers pack without padding; the padding that tensor
and context parallelism need is added here, and the engine removes it from the results. `stages/train/batching.py`
decides which samples are packed together.

Routing replay: reuse recorded expert ids in the training forward pass. The ids were selected in the forward pass
that computed the old log-probs (R2, the GSPO report, arXiv 2507.18071 section 5.3), or by the inference engine (R3,
arXiv 2510.11370). Only the expert ids are replayed; the weights of the experts' outputs are computed from the current
router's logits, so that the router gets gradients. The record belongs to one micro-batch and is passed to the routers
in its `PackedStream`. A global variable would not work: pipeline parallelism interleaves micro-batches, and
recomputation calls a layer again much later.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families.shape import Vision
from penstock.engines.training import EnginePack, PackedImages

if TYPE_CHECKING:
    from penstock.engines.megatron.model.transformer_config import AttentionKernel

UNKNOWN = -1  # in place of an expert id that was not recorded: the router then selects the expert
BUCKET_LENGTHS = [length << power for power in range(3, 40) for length in (2, 3)]  # 16, 24, 32, 48, 64, 96, ...


@dataclass
class PackedStream:
    """The tokens of a micro-batch that this rank processes: t tokens (rows), padding included.

    Under context parallelism each rank has an equal, contiguous part of the padded micro-batch, in which sequences may
    begin or end in the middle. The fields about sequences are those of the whole padded micro-batch, because attention
    processes all of its tokens (see `model/attention.py`). Megatron's layers pass the stream to `CoreAttention` and
    `MLASelfAttention` as `packed_seq_params`.
    """

    token_ids: Tensor  # [t]
    positions: Tensor  # [t] position in the sequence; [3, t] with M-RoPE
    cu_seqlens: Tensor  # [S + 1] int32, index of each sequence's first token, and the padded micro-batch's length T
    max_seqlen: int  # number of tokens of the longest sequence
    first_token: int  # index in the micro-batch of this rank's first token
    num_tokens: int  # r: number of this rank's tokens that are not padding; the padding comes after them
    cos_sin: tuple[Tensor, Tensor] | None = None  # RoPE cosines and sines, [t, 1, rope_dim] each, fp32
    buckets: list[Bucket] | None = None  # sequences grouped by length, for the kernel "padded"
    routing: StreamRouting | None = None  # expert ids to replay or record; None: the routers select
    images: StreamImages | None = None  # on ranks of the first pipeline stage
    kernel: AttentionKernel = "padded"
    qkv_format: str = "thd"  # Megatron's name for packed sequences

    @property
    def pack_slice(self) -> slice:
        """Return the slice of the micro-batch's tokens that this rank processes."""
        return slice(self.first_token, self.first_token + self.num_tokens)

    def router_rows(self, rank: int, ranks: int) -> Tensor:
        """Return the index in the micro-batch of each token that the routers of one rank of a sequence-parallel group
        process, -1 for padding. [t / ranks], on the CPU"""
        rows = torch.arange(self.first_token, self.first_token + len(self.token_ids))
        rows[self.num_tokens :] = UNKNOWN
        return rows.chunk(ranks)[rank]


@dataclass
class Segments:
    """Segments of tokens within which attention is computed: the part of a `PackedStream` that attention needs."""

    cu_seqlens: Tensor  # [S + 1] int32, index of each segment's first token, and their total length
    max_seqlen: int
    buckets: list[Bucket] | None
    kernel: AttentionKernel


@dataclass
class Bucket:
    """B sequences of similar length, which attention pads to one batch.

    Every token has an index in the padded micro-batch (row) and an index in the flattened padded batch (place).
    """

    num_sequences: int  # B
    rows: Tensor  # [sum of lengths]
    places: Tensor  # [sum of lengths]
    max_seqlen: int  # L: padded length of every sequence


def pack_stream(
    packed: EnginePack,
    device: torch.device,
    tensor: int = 1,
    context: int = 1,
    context_rank: int = 0,
    kernel: AttentionKernel = "padded",
) -> PackedStream:
    """Return the tokens of a packed micro-batch that this rank processes. An additional sequence pads the micro-batch
    to a multiple of `tensor` (the sequence-parallel size) * `context` tokens, which are split over the `context` ranks.
    The micro-batch is the same on every tensor- and context-parallel rank."""
    total = len(packed.token_ids)
    padding = -total % (tensor * context)
    size = (total + padding) // context  # number of tokens of each rank
    first = context_rank * size
    token_ids, positions, cu_seqlens = packed.token_ids, packed.position_ids, packed.cu_seqlens
    if padding:
        token_ids = F.pad(token_ids, (0, padding))
        more = torch.arange(padding, device=positions.device).expand(*positions.shape[:-1], padding)
        positions = torch.cat((positions, more), dim=-1)
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + padding))
    return PackedStream(
        token_ids=token_ids[first : first + size].to(device),
        positions=positions[..., first : first + size].to(device),
        cu_seqlens=cu_seqlens.to(device, torch.int32),
        max_seqlen=max(packed.max_seqlen, padding),
        buckets=make_buckets(cu_seqlens.tolist(), device) if kernel == "padded" else None,
        first_token=first,
        num_tokens=min(max(total - first, 0), size),
        kernel=kernel,
    )


def make_buckets(starts: list[int], device: torch.device, exact: bool = False) -> list[Bucket]:
    """Group the sequences of a micro-batch by length, rounded up to one of BUCKET_LENGTHS. Each bucket needs little
    padding and one attention call per layer; 256 sequences of about 10 tokens become one bucket. With `exact` only
    sequences of equal length share a bucket, which needs no padding. `starts` has the index of each sequence's first
    token and, last, the number of tokens."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, end in pairwise(starts):
        if end > start:
            group = end - start if exact else bisect_left(BUCKET_LENGTHS, end - start)
            groups.setdefault(group, []).append((start, end))
    buckets = []
    for _, sequences in sorted(groups.items()):
        longest = max(end - start for start, end in sequences)
        rows = torch.cat([torch.arange(start, end) for start, end in sequences])
        places = torch.cat(
            [index * longest + torch.arange(end - start) for index, (start, end) in enumerate(sequences)]
        )
        buckets.append(Bucket(len(sequences), rows.to(device), places.to(device), longest))
    return buckets


@dataclass
class StreamImages:
    """The images of a micro-batch, and the rows of this rank's hidden states that belong to image tokens."""

    pixel_values: Tensor  # [P, patch_dim] as in `PackedImages`
    grids: list[list[int]]  # (frames, rows, columns) of patches of each image
    rows: Tensor  # [n] rows of image tokens
    features: Tensor  # [n] which of the tower's output rows stands in each of them
    deepstack: list[Tensor] = field(default_factory=list)  # [n, H] for each of the first decoder layers
    gradients: list[Tensor | None] = field(default_factory=list)  # of `deepstack`, set by the backward pass


def place_images(
    images: PackedImages, stream: PackedStream, vision: Vision, tensor: int, tensor_rank: int
) -> StreamImages:
    """Return the images of a micro-batch for one of `tensor` sequence-parallel ranks, which share the rows of
    `stream`."""
    grids, size, device = images.grid_thw.tolist(), len(stream.token_ids) // tensor, stream.token_ids.device
    counts = [vision.num_image_tokens(grid) for grid in grids]
    features = torch.arange(sum(counts)).split(counts)  # the tower's output rows of each image
    places = list(zip(images.starts.tolist(), images.image_index.tolist(), strict=True))
    tokens = torch.cat([torch.arange(start, start + counts[image]) for start, image in places])  # ascending
    first = stream.first_token + tensor_rank * size
    start, stop = torch.searchsorted(tokens, torch.tensor([first, first + size])).tolist()
    own = torch.cat([features[image] for _, image in places])[start:stop]
    return StreamImages(images.pixel_values, grids, (tokens[start:stop] - first).to(device), own.to(device))


@dataclass
class StreamRouting:
    """The recorded expert ids of the T tokens of one micro-batch, for the routers of this rank. These routers may
    process only a part of the tokens, and padding. The ids of a layer may be missing, those of a token UNKNOWN."""

    # layer number in the whole model, from 0 -> expert ids, [T, top_k] int16 on the CPU
    choices: dict[int, Tensor]
    num_tokens: int  # T
    # [n] index in the micro-batch of each token that a router processes, on the CPU; -1: padding. None: all tokens
    rows: Tensor | None
    recording: bool  # whether `replay` also adds the expert ids that it returns to `choices`

    def replay(self, layer: int, selected: Tensor) -> Tensor:
        """Return the expert ids that a layer (numbered in the whole model, from 0) must use: the recorded ids, or those
        that the current router selected for tokens without a record. [n, top_k]"""
        experts, recorded = selected, self.choices.get(layer)
        if recorded is not None:
            if self.rows is not None:
                recorded = torch.where(self.rows[:, None] >= 0, recorded[self.rows.clamp_min(0)], UNKNOWN)
            recorded = recorded.to(selected.device, selected.dtype)
            experts = torch.where(recorded >= 0, recorded, selected)  # all top_k ids of a token are recorded, or none
        if self.recording:
            used = experts.to("cpu", torch.int16)
            if self.rows is None:
                self.choices[layer] = used
            else:
                unknown = torch.full((self.num_tokens, used.shape[1]), UNKNOWN, dtype=torch.int16)
                real = self.rows >= 0
                self.choices.setdefault(layer, unknown)[self.rows[real]] = used[real]
        return experts
