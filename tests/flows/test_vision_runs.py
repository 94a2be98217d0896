"""Runs of tiny vision-language models with real engines: the model must tell the colour of a picture."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from families import IMAGE_TOKEN, VISION, make_family
from penstock_command import penstock
from PIL import Image

from penstock.storage.commit import Commit, RunKeys
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]
GAP = 1e-5  # mean difference of the log-probs of engine and trainer
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 30), "b": (30, 30, 220)}
SIDE = 56  # pixels: four tokens of Qwen2.5-VL
TURNS = '''
import io

from PIL import Image


async def generate(args, sample, sampling_params, engine):
    """Look at the picture, then at another one."""
    await engine.generate(sample, max_new_tokens=2)
    file = io.BytesIO()
    Image.new("RGB", (84, 56), (10, 10, 10)).save(file, "PNG")
    text = "<|user|>and <|vision_start|><|image_pad|><|vision_end|><|end|>"
    if engine.append(sample, text, images=[file.getvalue()]):
        await engine.generate(sample, max_new_tokens=2)
    return sample
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = VISION | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1])
    return make_family(tmp_path_factory.mktemp("model") / "vl", "qwen2.5-vl", vision_config=vision)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of one colour in 24 shades, and a file of prompts."""
    directory, rng, rows = tmp_path_factory.mktemp("data"), random.Random(0), []
    for number in range(24):
        label = "rgb"[number % 3]
        colour = tuple(max(0, min(255, value + rng.randrange(-25, 26))) for value in COLOURS[label])
        Image.new("RGB", (SIDE, SIDE), colour).save(directory / f"{number}.png")
        rows.append({"prompt": "<image>colour?", "images": [f"{number}.png"], "label": label})
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "train.jsonl"


def counts(store: Store, commit: Commit) -> set[tuple[int, int]]:
    """Return the numbers of images and image tokens of the samples, except those that failed because the random model
    generated an image token."""
    samples = read_samples(store, commit)
    used = [sample for sample in samples if sample.status is not Status.FAILED]
    assert len(used) >= len(samples) / 2
    assert all("contains image tokens" in each.metadata["error"] for each in samples if each.status is Status.FAILED)
    return {(len(sample.images), sample.token_ids.count(IMAGE_TOKEN)) for sample in used}


def test_a_picture_in_a_later_turn_is_seen_by_trainer_and_engine_and_replayed(
    model: Path, data: Path, tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    (tmp_path / "turns.py").write_text(TURNS)
    store, keys = Store(str(tmp_path / "store")), RunKeys("vision")
    flags = f"""
        --run vision --store {store.root} --hf-checkpoint {model} --lr 1e-3 --num-rollout 2 --rm-type random
        --prompt-data {data} --input-key prompt --label-key label --apply-chat-template
        --rollout-batch-size 4 --n-samples-per-prompt 4 --no-report --trainer-threads 1 --no-freeze-vision
        --custom-generate-function-path {tmp_path / "turns.py"} --check-weight-update-equal
        --rollout-max-response-len 24
    """
    penstock("train", *flags.split(), "--multimodal-keys", '{"image": "images"}', env=prefect_api)
    for number in range(2):
        rollout, step = store.committed(keys.rollout_prefix(number)), store.committed(keys.step_prefix(number))
        assert rollout is not None and rollout.blobs
        assert step is not None and step.summary["train/train_rollout_logprob_abs_diff"] < GAP
    assert counts(store, rollout) == {(2, 4 + 6)}
    penstock("replay", "vision", "--store", store.root, env=prefect_api)
