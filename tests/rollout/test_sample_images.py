"""Images of samples on their way to an engine: files, places, further turns, and responses with image tokens."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import IMAGE_TOKEN, make_family
from PIL import Image
from scripted_engine import ScriptedClient

from penstock.engines.generation import Generation, PromptImage
from penstock.stages.images import ImageProcessor, SampleImages
from penstock.stages.rollout.agents.conversation import AgentSession, Conversation
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import EngineGenerator, GroupRunner
from penstock.stages.rollout.plugins.custom_generation import EngineHandle
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError
from penstock.storage.image_decoding import load_image
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.store import Store

ROUND = RolloutRound("run", rollout_id=0, policy_version=0)


class Client(ScriptedClient):
    """Records the images of requests, and says the next of its replies."""

    def __init__(self, *replies: list[int]) -> None:
        super().__init__(["http://engine"])
        self.replies = list(replies)
        self.shown: list[tuple[list[int], list[PromptImage]]] = []

    async def generate_each(self, prompts: Any, samplings: Any, *, images: Any = (), session: Any = None) -> Any:
        self.shown += [(list(ids), list(own)) for ids, own in zip(prompts, images, strict=True)]
        replies = [self.replies.pop(0) for _ in prompts]
        return [Generation(ids, [-1.0] * len(ids), "stop", [("run/0", len(ids))]) for ids in replies]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("vision") / "model", "qwen3-vl")


@pytest.fixture
def images(checkpoint: Path, tmp_path: Path) -> SampleImages:
    return SampleImages(Store(str(tmp_path / "store")), ImageProcessor.load(checkpoint))


def picture(columns: int, rows: int) -> bytes:
    file, pixels = io.BytesIO(), np.random.default_rng(rows).integers(0, 256, (rows, columns, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def new_sample(images: SampleImages, *sizes: tuple[int, int]) -> Sample:
    """Return a pending sample whose prompt has pictures (columns and rows of pixels; a token has 8 x 8)."""
    sample = Sample("g-00", "g", "g-00", 0)
    ids = [7, *[token for _ in sizes for token in (54, IMAGE_TOKEN, 55)], 8]
    sample.token_ids = images.add(sample, ids, [picture(*size) for size in sizes])
    sample.loss_mask, sample.rollout_logprobs = [0] * len(sample.token_ids), [0.0] * len(sample.token_ids)
    return sample


@pytest.mark.parametrize("size", [(41, 17), (300, 90), (3, 5)])
def test_the_file_for_an_engine_gives_the_patches_of_the_original(images: SampleImages, size: tuple[int, int]) -> None:
    processor, original = images.processor, load_image(picture(*size))
    scaled = load_image(processor.scaled_file(original))
    expected, made = processor.process([original]), processor.process([scaled])
    assert np.array_equal(made.pixel_values, expected.pixel_values)
    assert np.array_equal(made.grid_thw, expected.grid_thw)
    assert scaled.shape[0] * scaled.shape[1] == processor.num_tokens(original) * 64


def test_requests_of_a_group_have_the_images_of_its_samples(images: SampleImages, checkpoint: Path) -> None:
    client, config = Client([9, 1], [8, 1]), RolloutConfig()
    tokenizer = PromptTokenizer(checkpoint, apply_chat_template=True)
    samples = [new_sample(images, (16, 8), (8, 24)), new_sample(images)]
    asyncio.run(EngineGenerator(client, config, tokenizer, ROUND, images)(samples))
    (ids, shown), (_, nothing) = client.shown
    assert nothing == [] and [(image.start, image.num_tokens) for image in shown] == [(2, 2), (6, 3)]
    assert [ids[image.start : image.start + image.num_tokens] for image in shown] == [
        [IMAGE_TOKEN] * 2,
        [IMAGE_TOKEN] * 3,
    ]
    assert [load_image(image.data).shape for image in shown] == [(8, 16, 3), (24, 8, 3)]


def test_a_response_with_an_image_token_fails_its_sample_only(images: SampleImages, checkpoint: Path) -> None:
    client, tokenizer = Client([9, IMAGE_TOKEN, 1], [8, 1]), PromptTokenizer(checkpoint, apply_chat_template=True)
    generator = EngineGenerator(client, RolloutConfig(), tokenizer, ROUND, images)

    async def run() -> list[Sample]:
        slots: Any = asyncio.Semaphore(1)
        runner = GroupRunner(ROUND, generator, None, None, None, slots, False, images=images)  # type: ignore[arg-type]
        return await runner.run_samples([new_sample(images, (16, 8)) for _ in range(2)], grade=False)

    failed, fine = asyncio.run(run())
    assert failed.status is Status.FAILED and not any(failed.loss_mask)
    assert "contains image tokens" in failed.metadata["error"]
    assert fine.status is Status.COMPLETED


# ---- several turns ---------------------------------------------------------------------------------------------------


def handle_of(images: SampleImages | None, checkpoint: Path, *replies: list[int]) -> EngineHandle:
    tokenizer = PromptTokenizer(checkpoint, apply_chat_template=True)
    config = RolloutConfig(rollout_max_response_len=60)
    return EngineHandle(Client(*replies), tokenizer, config, ROUND, images)


def test_an_appended_image_is_shown_in_the_next_turn(images: SampleImages, checkpoint: Path) -> None:
    handle, sample = handle_of(images, checkpoint, [9, 1], [8, 1]), new_sample(images, (8, 8))

    async def talk() -> None:
        await handle.generate(sample)
        assert handle.append(sample, "<|vision_start|><|image_pad|><|vision_end|>", images=[picture(16, 8)])
        await handle.generate(sample)

    asyncio.run(talk())
    client: Any = handle.client
    assert [[image.num_tokens for image in shown] for _, shown in client.shown] == [[1], [1, 2]]
    assert len(sample.images) == 2 and sample.loss_mask == [0] * 5 + [1, 1] + [0] * 4 + [1, 1]


def test_an_image_without_room_is_not_added(images: SampleImages, checkpoint: Path) -> None:
    handle, sample = handle_of(images, checkpoint), new_sample(images)
    assert not handle.append(sample, "<|image_pad|>", images=[picture(64, 64)])
    assert sample.images == [] and sample.status is Status.TRUNCATED


@pytest.mark.parametrize(("text", "message"), [("ab", "0 image tokens for 1 images"), ("<|image_pad|>" * 2, "2 image")])
def test_text_with_other_places_than_images_is_refused(
    images: SampleImages, checkpoint: Path, text: str, message: str
) -> None:
    handle, sample = handle_of(images, checkpoint), new_sample(images)
    with pytest.raises(DataError, match=message):
        handle.append(sample, text, images=[picture(8, 8)])
    assert sample.images == []


def part(columns: int) -> dict[str, Any]:
    uri = f"data:image/png;base64,{base64.b64encode(picture(columns, 8)).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def test_messages_of_a_conversation_have_images(images: SampleImages, checkpoint: Path) -> None:
    handle = handle_of(images, checkpoint, [9, 1], [8, 1], [7, 1])
    sample = UserSample.of(new_sample(images))
    session = AgentSession(handle, sample, "", "", lambda: None)
    first, more = user("see", part(16)), user(part(24), "and this", part(8))

    async def talk() -> None:
        one = await session.complete([first])
        await session.complete([first, one.message, more])
        await session.complete([user("see", part(32))])  # another image: another conversation

    asyncio.run(talk())
    client: Any = handle.client
    assert [[image.num_tokens for image in shown] for _, shown in client.shown] == [[2], [2, 3, 1], [4]]
    long, short = session.samples()
    assert (len(long.images), len(short.images)) == (3, 1)
    for ids, shown in client.shown:
        for image in shown:
            assert ids[image.start - 1 : image.start + image.num_tokens + 1] == [54, *[58] * image.num_tokens, 55]


def test_a_failed_turn_leaves_no_image(images: SampleImages, checkpoint: Path) -> None:
    handle = handle_of(images, checkpoint, [9, 1])
    conversation = Conversation(handle, UserSample.of(new_sample(images)))

    async def talk() -> None:
        await conversation.reply([user("see", part(16))])
        with pytest.raises(IndexError):  # the scripted client has no further reply
            await conversation.reply([user(part(24))])

    asyncio.run(talk())
    assert len(conversation.sample.images) == 1 and conversation.sample.token_ids.count(IMAGE_TOKEN) == 2


@pytest.mark.parametrize("source", ["/etc/passwd", "http://127.0.0.1/a.png"])
def test_an_agent_cannot_name_files(images: SampleImages, checkpoint: Path, source: str) -> None:
    conversation = Conversation(handle_of(images, checkpoint, [9, 1]), UserSample.of(new_sample(images)))
    message = user("see", {"type": "image_url", "image_url": {"url": source}})
    with pytest.raises(DataError, match="base64"):
        asyncio.run(conversation.reply([message]))
