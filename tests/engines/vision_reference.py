"""References for the tests of vision-language models: packs of conversations with images, and transformers' results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
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
    # Images of equal size in one conversation are one image.
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
    sequences, positions, pixels, grids, starts, image_index, lengths = [], [], [], [], [], [], [0]
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
            used = list(dict.fromkeys(own))
            image_index += [len(pixels) + used.index(grid) for grid in own]
            made = {grid: torch.randn(prod(grid), vision.patch_dim, generator=generator) for grid in used}
            sequence["pixel_values"] = torch.cat([made[grid] for grid in own])
            sequence["image_grid_thw"] = torch.tensor(own)
            sequence["mm_token_type_ids"] = (tokens == vision.image_token_id).int()[None]
            pixels += made.values()
            grids += used
        sequences.append(sequence)
        positions.append(torch.from_numpy(vision.token_positions(len(tokens), first, own)))
        starts += [lengths[-1] + start for start in first]
        lengths.append(lengths[-1] + len(tokens))
    images = None
    if grids:
        images = PackedImages(torch.cat(pixels), torch.tensor(grids), torch.tensor(starts), torch.tensor(image_index))
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
