"""Kills, replay and audit of runs whose prompts have images."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from harness import Pipeline, World, tiny_flags
from matrix import kill_at, verdict
from penstock_command import penstock

from penstock.stages.rollout.group import policy_spans
from penstock.storage.blobs import blob_key
from penstock.storage.samples.shards import read_samples

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "examples/shapes/data.py"


@pytest.fixture
def pictures(world: World) -> World:
    """The world with the model and the pictures of examples/shapes."""
    root = world.root / "shapes"
    runpy.run_path(str(EXAMPLE))["main"](str(root))
    rows = (root / "train.jsonl").read_text().splitlines(keepends=True)
    world.model, world.train_data, world.eval_data = root / "model", root / "few.jsonl", root / "eval.jsonl"
    world.train_data.write_text("".join(rows[:12]))
    world.eval_data.write_text("".join(rows[12:16]))
    world.start_prefect()
    return world


def flags_of(world: World, rounds: int, mode: str = "plain") -> list[str]:
    short = ["--rollout-max-response-len", "4", "--eval-max-response-len", "4"]
    images = ["--multimodal-keys", '{"image": "images"}', "--no-freeze-vision"]
    return [*tiny_flags(world, rounds, mode), *short, *images]


def check_images(pipeline: Pipeline, rounds: int) -> None:
    """Check that every round lists its images, that the store has them, and that engine and trainer saw the same: the
    log-probs of both are equal where no earlier policy has generated tokens of the round."""
    for number in range(rounds):
        rollout = pipeline.store.committed(pipeline.keys.rollout_prefix(number))
        step = pipeline.store.committed(pipeline.keys.step_prefix(number))
        assert rollout is not None and step is not None
        assert rollout.blobs and all(pipeline.store.read(blob_key(digest)) for digest in rollout.blobs)
        spans = [span for sample in read_samples(pipeline.store, rollout) for span in policy_spans(sample)]
        is_stale = any(version < number for version, _ in spans)
        assert is_stale or step.summary["train/train_rollout_logprob_abs_diff"] < 1e-5
        assert step.state["fingerprint"]["images"]["processor"] == "Qwen2VLImageProcessorPil"


def test_run_with_images_survives_a_kill_and_replays_bit_for_bit(pictures: World) -> None:
    """The pictures are gone before the replay: the store has all that it needs."""
    pipeline = Pipeline(pictures, "images", str(pictures.root / "store"), flags_of(pictures, 2))
    [kill] = kill_at(pipeline, [("rollout-after-upload", "tree")])
    assert kill["num_killed"]
    (pictures.root / "shapes/pictures").rename(pictures.root / "elsewhere")
    assert verdict(pipeline, "plain")["replayed_rounds"] == 2
    check_images(pipeline, 2)


@pytest.mark.full
def test_kills_of_a_run_with_images_on_a_faulty_object_store(pictures: World) -> None:
    """Only boundaries at which images are written, read or kept: rounds leave unfinished groups with images in the
    buffer, and the pictures are gone before the replay."""
    options = pictures.start_s3(faults=0.05)
    pipeline = Pipeline(pictures, "images", "s3://bucket/store", flags_of(pictures, 4, "synchronous"), options)
    schedule = [
        ("eval-generating", "engine"),
        ("rollout-before-upload", "tree"),
        ("rollout-after-commit", "engine"),
        ("train-mid-step", "tree"),
        ("publish-after", "trainer"),
    ]
    assert all(kill["num_killed"] for kill in kill_at(pipeline, schedule))
    (pictures.root / "shapes/pictures").rename(pictures.root / "elsewhere")
    assert verdict(pipeline)["replayed_rounds"] == 4
    check_images(pipeline, 4)
    penstock("verify", "images", *pipeline.place, env=pictures.environment)
