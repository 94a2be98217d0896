"""Micro-batches of samples with images: positions, patches, loss masks, and the cost of the vision tower."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import IMAGE_TOKEN, make_family
from PIL import Image

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.stages.images import ImageProcessor, SampleImages
from penstock.stages.train.batching import Batch, pack, with_images
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import plan_steps
from penstock.storage.blobs import read_blob, write_blobs
from penstock.storage.errors import DataError
from penstock.storage.image_decoding import load_image
from penstock.storage.samples.sample import Sample, to_table
from penstock.storage.store import Store

SIZES = {"small": (8, 8), "wide": (40, 9), "high": (17, 33)}  # columns x rows of pixels; a token has 8 x 8
TOKENS = {"small": 1, "wide": 5, "high": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("vision") / "model", "qwen3-vl")


def picture(columns: int, rows: int) -> bytes:
    file, pixels = io.BytesIO(), np.random.default_rng(columns).integers(0, 256, (rows, columns, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Rollout:
    """Samples whose images are in a store."""

    def __init__(self, checkpoint: Path, directory: Path) -> None:
        self.store, self.vision = Store(str(directory / "store")), read_shape(checkpoint).vision
        self.processor = ImageProcessor.load(checkpoint)
        names = write_blobs(self.store, [picture(*size) for size in SIZES.values()])
        self.digests = dict(zip(SIZES, names))
        self.rows: list[Sample] = []

    def add(self, *parts: int | str, response: int = 3) -> None:
        """Add a sample of text tokens (their number) and images (their name), and a response."""
        token_ids: list[int] = []
        for part in parts:
            text = range(5, 5 + part) if isinstance(part, int) else [54, *[IMAGE_TOKEN] * TOKENS[part], 55]
            token_ids += text
        mask = [0] * len(token_ids) + [1] * response
        row = Sample(str(len(self.rows)), "g", str(len(self.rows)), 0, reward=1.0)
        row.token_ids, row.loss_mask = token_ids + [20] * response, mask
        row.rollout_logprobs = [-1.0 * bit for bit in mask]
        row.images = [self.digests[part] for part in parts if isinstance(part, str)]
        self.rows.append(row)

    def batch(self) -> Batch:
        table = to_table(self.rows)
        batch = Batch.from_table(table, needs_rewards=True)
        assert self.vision is not None
        return with_images(batch, table, self.vision, SampleImages(self.store, self.processor))

    def patches(self, name: str) -> tuple[np.ndarray, list[int]]:
        made = self.processor.process([load_image(read_blob(self.store, self.digests[name]))])
        return made.pixel_values, made.grid_thw[0].tolist()


@pytest.fixture
def rollout(checkpoint: Path, tmp_path: Path) -> Rollout:
    rollout = Rollout(checkpoint, tmp_path)
    rollout.add(4, "wide", 2)
    rollout.add(7)
    rollout.add("small", 1, "high", 3, "small")
    return rollout


def test_microbatch_has_the_patches_and_positions_of_its_samples_in_order(rollout: Rollout) -> None:
    packed, vision = pack(rollout.batch(), [2, 1, 0]), rollout.vision
    assert vision is not None and packed.images is not None
    names = ["small", "high", "small", "wide"]
    pixels, shared = zip(*map(rollout.patches, ("small", "high", "wide")))  # the small image is there once
    assert torch.equal(packed.images.pixel_values, torch.from_numpy(np.concatenate(pixels)))
    assert packed.images.grid_thw.tolist() == list(shared) and packed.images.image_index.tolist() == [0, 1, 0, 2]
    grids = [rollout.patches(name)[1] for name in names]
    for name, start in zip(names, packed.images.starts.tolist(), strict=True):
        around = packed.token_ids[start - 1 : start + TOKENS[name] + 1].tolist()
        assert around == [54, *[IMAGE_TOKEN] * TOKENS[name], 55]
    assert packed.targets.tolist() == [20] * 9, "image tokens are not trained"
    expected = [
        vision.token_positions(len(row.token_ids), vision.image_starts(np.array(row.token_ids), own), own)
        for row, own in [(rollout.rows[2], grids[:3]), (rollout.rows[1], []), (rollout.rows[0], grids[3:])]
    ]
    assert torch.equal(packed.position_ids, torch.from_numpy(np.concatenate(expected, axis=1)))


@pytest.mark.parametrize("rows", [[1], []])
def test_microbatch_without_images_has_three_equal_positions(rollout: Rollout, rows: list[int]) -> None:
    packed = pack(rollout.batch(), rows)
    assert packed.images is None
    assert torch.equal(packed.position_ids, torch.arange(len(packed.token_ids)).expand(3, -1))


def test_sample_with_more_image_tokens_than_its_images_is_refused(rollout: Rollout) -> None:
    rollout.rows[0].token_ids[-1] = IMAGE_TOKEN
    with pytest.raises(DataError, match=r"6 image tokens .* but its 1 images need 5"):
        pack(rollout.batch(), [0])


def test_batch_has_the_grids_of_the_images_of_each_sample(rollout: Rollout) -> None:
    batch = rollout.batch()
    assert batch.image_grids.tolist() == [rollout.patches(name)[1] for name in ("wide", "small", "high")]
    assert batch.image_index.tolist() == [0, 1, 2, 1]
    assert batch.image_samples.tolist() == [0, 2, 2, 2]


def test_ranks_get_equal_shares_of_the_images(checkpoint: Path, tmp_path: Path) -> None:
    rollout = Rollout(checkpoint, tmp_path)
    for has_image in (True, True, False, False):
        rollout.add(*([1, "high"] if has_image else [11]))  # of equal lengths
    shares = [planned(rollout, read_shape(checkpoint), rank) for rank in (0, 1)]
    assert [sum(packed.images is not None for packed in share) for share in shares] == [1, 1]


def planned(rollout: Rollout, shape: ModelShape, rank: int) -> list[Any]:
    engine = SimpleNamespace(
        data_parallel_rank_and_size=(rank, 2),
        shape=shape,
        device=torch.device("cpu"),
        context_group=None,
        pack_stream=lambda packed: SimpleNamespace(pack_slice=slice(0, len(packed.token_ids))),
    )
    config = TrainConfig(micro_batch_size=1, balance_data=True, global_batch_size=4)
    [step] = plan_steps(engine, rollout.batch(), config)  # type: ignore[arg-type]
    return step
