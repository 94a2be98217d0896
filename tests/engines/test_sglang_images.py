"""Images in requests to the real SGLang: its log-probs equal transformers' for the token ids that were sent, before and
after new weights."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import AB, IMAGE_TOKEN, VISION, VISION_END, VISION_START, hf_model, make_family
from PIL import Image
from safetensors.torch import load_file
from transformers import Qwen2VLImageProcessorPil

from penstock.engines.backends import connect, engine_backend
from penstock.engines.families import read_shape
from penstock.engines.generation import Generation, PromptImage, WeightTransport
from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
TOLERANCE = 1e-4
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
# SGLang reads only patches of 14 x 14 with Qwen2.5-VL.
CHANGES = {"qwen2.5-vl": {"vision_config": VISION | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1])}}
A, B = 28, 29  # tokens of the characters a and b; the tokenizer has a token for "ab" as well


class Engine:
    """A server of a tiny vision-language model, and transformers' models of its two sets of weights."""

    def __init__(self, directory: Path, family: str) -> None:
        self.path, other = (
            make_family(directory / str(seed), family, seed=seed, **CHANGES.get(family, {})) for seed in (0, 1)
        )
        self.shape, self.models = read_shape(self.path), [hf_model(self.path), hf_model(other)]
        self.other_weights = load_file(other / "model.safetensors")
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(self.path)
        spec = ServerSpec(model_path=str(self.path), log_dir=str(directory))
        args = engine_backend().server_args(EngineOptions(spec, vision="trained"), has_gpus=False)
        self.server = engine_backend().server_class(spec.model_copy(update={"args": args}))
        self.url = self.server.start()

    def prompt(self, *parts: int | Image.Image) -> tuple[list[int], list[PromptImage], list[Image.Image]]:
        """Return a prompt of token ids and pictures."""
        token_ids: list[int] = []
        images, pictures = [], []
        assert self.shape.vision is not None
        side = self.shape.vision.patch_size * self.shape.vision.merge_size
        for part in parts:
            if isinstance(part, int):
                token_ids.append(part)
                continue
            num_tokens, file = part.width * part.height, io.BytesIO()
            part = part.resize((part.width * side, part.height * side), Image.Resampling.NEAREST)
            part.save(file, "PNG")
            images.append(PromptImage(file.getvalue(), len(token_ids) + 1, num_tokens))
            pictures.append(part)
            token_ids += [VISION_START, *[IMAGE_TOKEN] * num_tokens, VISION_END]
        return token_ids, images, pictures

    def ask(self, *prompts: tuple[list[int], list[PromptImage], list[Image.Image]]) -> list[Generation]:
        async def call() -> list[Generation]:
            async with connect([self.url], 120) as client:
                ids, images = [prompt[0] for prompt in prompts], [prompt[1] for prompt in prompts]
                return await client.generate_each(ids, [GREEDY] * len(prompts), images=images)

        return asyncio.run(call())

    @torch.no_grad()
    def error(self, model: Any, prompt: list[int], pictures: list[Image.Image], generation: Generation) -> float:
        """Return the largest difference between an engine's log-probs and those of transformers' model."""
        response = generation.token_ids  # up to an image token, of which transformers would not know the image
        response = response[: response.index(IMAGE_TOKEN) if IMAGE_TOKEN in response else None]
        ids = torch.tensor([prompt + response])
        arguments: dict[str, Any] = {"input_ids": ids}
        if pictures:
            made = self.processor(pictures, do_resize=False, return_tensors="pt")
            is_image = (ids == IMAGE_TOKEN).int()
            arguments |= {**made, "mm_token_type_ids": is_image}
        model.model.rope_deltas = None
        logprobs = model(**arguments).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return (expected - torch.tensor(generation.logprobs[: len(response)])).abs().max().item()


def picture(columns: int, rows: int) -> Image.Image:
    """Return a random picture of columns x rows blocks, which become one token each."""
    pixels = np.random.default_rng(columns * 100 + rows).integers(0, 256, (rows, columns, 3), np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module", params=["qwen2.5-vl", "qwen3-vl"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("images"), request.param)
    yield engine
    engine.server.stop()


def test_logprobs_of_prompts_with_images_equal_those_of_transformers(engine: Engine) -> None:
    prompts = [
        engine.prompt(2, 9, picture(2, 2), 12, 16, 14),
        engine.prompt(picture(5, 2), 9, picture(2, 6), 7, 8),
        engine.prompt(2, 9, 12, 16),  # without an image
        engine.prompt(2, 9, picture(2, 2), 12, 16, 14),
    ]
    generations = engine.ask(*prompts)
    errors = [engine.error(engine.models[0], ids, shown, g) for (ids, _, shown), g in zip(prompts, generations)]
    print(errors)
    assert max(errors) < TOLERANCE
    assert [g.counts.prompt for g in generations] == [len(ids) for ids, *_ in prompts]
    other = [shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for shown in prompts[0][2]]
    assert engine.error(engine.models[0], prompts[0][0], other, generations[0]) > 10 * TOLERANCE


def test_token_ids_stay_the_same_where_decoding_and_encoding_changes_them(engine: Engine) -> None:
    ids, images, shown = engine.prompt(2, A, B, picture(2, 2), A, B, 14)
    [generation] = engine.ask((ids, images, shown))
    assert engine.error(engine.models[0], ids, shown, generation) < TOLERANCE
    encoded_again = engine.prompt(2, AB, picture(2, 2), AB, 14)[0]
    assert engine.error(engine.models[0], encoded_again, shown, generation) > 10 * TOLERANCE


def test_a_conversation_continues_with_further_images(engine: Engine) -> None:
    ids, images, shown = engine.prompt(2, 9, picture(3, 2), 14)
    [first] = engine.ask((ids, images, shown))
    reply = [token for token in first.token_ids if token != IMAGE_TOKEN]
    longer, more, added = engine.prompt(9, picture(2, 4), 3)
    whole = ids + reply + longer
    images += [PromptImage(image.data, image.start + len(ids + reply), image.num_tokens) for image in more]
    [second] = engine.ask((whole, images, shown))
    assert engine.error(engine.models[0], whole, [*shown, *added], second) < TOLERANCE
    assert second.counts.cached > 0


def test_new_weights_of_the_vision_tower_are_used_for_images_that_were_seen_before(engine: Engine) -> None:
    prompt = engine.prompt(2, 9, picture(4, 4), 12, 16, 14)
    engine.ask(prompt)
    client = connect([engine.url], 120)
    client.update_weights(iter(engine.other_weights.items()), "run/1", WeightTransport(in_flight="in_place"))
    [generation] = engine.ask(prompt)
    assert engine.error(engine.models[1], prompt[0], prompt[2], generation) < TOLERANCE


def test_server_that_fails_after_its_children_have_started_ends_with_the_reason(tmp_path: Path) -> None:
    path = make_family(tmp_path / "model", "qwen3-vl")
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json"):
        settings = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(settings | {"processor_class": "MissingProcessor"}))
    spec = ServerSpec(model_path=str(path), log_dir=str(tmp_path))
    args = engine_backend().server_args(EngineOptions(spec, vision="trained"), has_gpus=False)
    with pytest.raises(RuntimeError, match="has no attribute tokenizer"):
        engine_backend().server_class(spec.model_copy(update={"args": args})).start()
