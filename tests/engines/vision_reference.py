"""References for the tests of vision-language models: packs of conversations with images, and transformers' results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.training import PackedImages
from tests.engines.megatron_reference import targets_of, under_megatron_names
from tests.families import hf_model

Conversation = list[int | tuple[int, int, int]]  # numbers of text tokens, and grids (frames, rows, columns) of images
SMALL, WIDE, HIGH, ODD = (1, 4, 4), (1, 4, 10), (1, 12, 2), (1, 6, 10)
MIXED: list[list[Conversation]] = [  # packs: with and without images, one and several, of equal and other sizes
    [[9], [3, SMALL, 5], [2, WIDE, 1, HIGH, 4], [1, SMALL, 2, SMALL, 3], [17]],
    [[6], [40], [3]],
    [[4, ODD, 7], [SMALL, 5], [1, HIGH, 1]],
    [[30, SMALL, 2]],
]


@dataclass
class VisionPack:
    token_ids: Tensor  # [T]
    position_ids: Tensor  # [3, T]
    cu_seqlens: Tensor  # [B + 1]
    max_seqlen: int
    images: PackedImages | None
    sequences: list[dict[str, Tensor]]  # transformers' arguments for each sequence
    stream: Any = None
    routing: Any = None


def make_vision_pack(shape: ModelShape, conversations: list[Conversation], seed: int = 0) -> VisionPack:
    vision = shape.vision
    assert vision is not None
    generator = torch.Generator().manual_seed(seed)
    sequences, positions, pixels, grids, starts, lengths = [], [], [], [], [], [0]
    for conversation in conversations:
        parts: list[Tensor] = []
        own = [item for item in conversation if isinstance(item, tuple)]
        for item in conversation:
            if isinstance(item, tuple):
                parts.append(torch.full((vision.num_image_tokens(item),), vision.image_token_id))
            else:
                parts.append(torch.randint(0, vision.image_token_id - 1, (item,), generator=generator))
        tokens = torch.cat(parts)
        sequence = {"input_ids": tokens[None]}
        first = vision.image_starts(tokens.numpy(), own)
        if own:
            patches = sum(frames * rows * columns for frames, rows, columns in own)
            sequence["pixel_values"] = torch.randn(patches, vision.patch_dim, generator=generator)
            sequence["image_grid_thw"] = torch.tensor(own)
            sequence["mm_token_type_ids"] = (tokens == vision.image_token_id).int()[None]
            pixels.append(sequence["pixel_values"])
        sequences.append(sequence)
        positions.append(torch.from_numpy(vision.token_positions(len(tokens), first, own)))
        starts += [lengths[-1] + start for start in first]
        grids += own
        lengths.append(lengths[-1] + len(tokens))
    images = PackedImages(torch.cat(pixels), torch.tensor(grids), torch.tensor(starts)) if grids else None
    return VisionPack(
        token_ids=torch.cat([sequence["input_ids"][0] for sequence in sequences]),
        position_ids=torch.cat(positions, dim=1),
        cu_seqlens=torch.tensor(lengths, dtype=torch.int32),
        max_seqlen=max(after - before for before, after in pairwise(lengths)),
        images=images,
        sequences=sequences,
    )


@dataclass
class Reference:
    shape: ModelShape
    packs: list[VisionPack]
    weights: dict[str, Tensor]  # by Megatron name
    logits: list[Tensor]  # of each pack
    gradients: dict[str, Tensor]  # of the sum of the cross-entropies of all tokens


def reference_of(checkpoint: Path, packs: list[list[Conversation]]) -> Reference:
    shape, model = read_shape(checkpoint), hf_model(checkpoint)
    model.model.language_model.embed_tokens.padding_idx = None  # else transformers gives this token's row no gradient
    made = [make_vision_pack(shape, conversations, seed) for seed, conversations in enumerate(packs)]
    logits, loss = [], torch.zeros(())
    for pack in made:
        model.model.rope_deltas = None
        logits.append(torch.cat([model(**sequence).logits[0] for sequence in pack.sequences]))
        targets, counted = targets_of(pack)  # type: ignore[arg-type]
        loss = loss + F.cross_entropy(logits[-1][counted], targets[counted], reduction="sum")
    loss.backward()
    parameters = dict(model.named_parameters())
    weights = under_megatron_names(shape, {name: param.detach() for name, param in parameters.items()})
    gradients = under_megatron_names(shape, {name: param.grad for name, param in parameters.items()})
    return Reference(shape, made, weights, [x.detach() for x in logits], gradients)
