"""Decoding and processing of images: every format gives its pixels or is refused in one sentence, and the patches are
those of transformers, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import BAD, GOOD

from penstock.stages.images import (
    ImageProcessor,
    expand_image_tokens,
    fingerprint_of_images,
    read_image_token_id,
)
from penstock.storage import image_decoding
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError, ModelError
from penstock.storage.image_decoding import load_image

QWEN2 = {
    "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
SIZES = [(24, 40), (1, 1), (3, 500), (500, 3), (27, 29), (28, 28), (120, 160), (7, 1400)]


def write_model(directory: Path, processor: dict[str, Any] | None, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"image_token_id": 7, **config}))
    if processor is not None:
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", GOOD)
def test_readable_image_gives_its_pixels(name: str) -> None:
    make, pixels, tolerance = GOOD[name]
    array = load_image(make())
    assert array.dtype == np.uint8 and array.shape == pixels.shape and array.flags.c_contiguous
    difference = np.abs(array.astype(int) - pixels)
    assert np.median(difference) <= min(tolerance, 3) and difference.max() <= tolerance


@pytest.mark.parametrize("name", BAD)
def test_unreadable_image_is_refused_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD[name]
    monkeypatch.setattr(image_decoding, "MAX_BYTES", 1 << 20)
    with pytest.raises(DataError, match=rf"^the image {message}") as caught:
        load_image(make())
    text = str(caught.value)
    assert "\n" not in text and len(text) < 260 and ": " in text


@pytest.mark.parametrize("options", [{**QWEN2, "size": {"shortest_edge": 6272, "longest_edge": 9408}}, QWEN3])
def test_patches_equal_those_of_transformers_in_any_batch(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours, arrays = ImageProcessor.load(write_model(tmp_path, options)), [noise(*size) for size in SIZES]
    size = {"shortest_edge": ours.min_pixels, "longest_edge": ours.max_pixels}
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    reference = Qwen2VLImageProcessorPil(size=size, **{name: options[name] for name in names})
    theirs = reference.preprocess(arrays, input_data_format="channels_last", return_tensors="np")
    result = ours.process(arrays)
    assert result.pixel_values.dtype == np.float32 and result.grid_thw.dtype == np.int64
    assert np.array_equal(result.pixel_values, theirs["pixel_values"])
    assert np.array_equal(result.grid_thw, theirs["image_grid_thw"])
    assert result.pixel_values.shape == (result.grid_thw.prod(1).sum(), ours.patch_dim)
    alone = [ours.process([array]).pixel_values for array in arrays]
    assert np.array_equal(np.concatenate(alone), result.pixel_values)
    assert [ours.num_tokens(array) for array in arrays] == (result.grid_thw.prod(1) // ours.merge_size**2).tolist()


def test_number_of_tokens_equals_that_of_transformers_for_many_sizes(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    random = np.random.default_rng(1)
    for options, bounds in ((QWEN2, {}), (QWEN3, {"min_pixels": 1024, "max_pixels": 5000})):
        processor = ImageProcessor.load(write_model(tmp_path, options), **bounds)
        factor = processor.patch_size * processor.merge_size
        for height in random.integers(1, 6000, 300).tolist():
            width = int(np.clip(random.integers(1, 6000), -(-height // 200), 200 * height))
            rows, columns = smart_resize(height, width, factor, processor.min_pixels, processor.max_pixels)
            array = np.broadcast_to(np.uint8(0), (height, width, 3))
            assert processor.num_tokens(array) == rows * columns // factor**2, (height, width)


def test_bounds_replace_those_of_the_model_and_bound_the_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path, QWEN2)
    assert ImageProcessor.load(model).num_tokens(noise(1000, 1000)) == 36 * 36
    small = ImageProcessor.load(model, max_pixels=28 * 28 * 9)
    assert (small.min_pixels, small.max_pixels, small.num_tokens(noise(1000, 1000))) == (3136, 7056, 9)
    assert ImageProcessor.load(model, min_pixels=28 * 28 * 100).num_tokens(noise(28, 28)) == 100
    with pytest.raises(ModelError, match="correct --image-min-pixels and --image-max-pixels"):
        ImageProcessor.load(model, min_pixels=9000, max_pixels=8000)
    with pytest.raises(ModelError, match="correct --image-min-pixels and --image-max-pixels"):
        ImageProcessor.load(model, min_pixels=1, max_pixels=700)  # below the size of one token


@pytest.mark.parametrize(
    ("processor", "config", "message"),
    [
        (None, {}, "preprocessor_config.json, which prompts with images need"),
        ({"image_processor_type": "CLIPImageProcessor"}, {}, "'CLIPImageProcessor'"),
        (QWEN2, {"image_token_id": None}, "image token None"),
        ({**QWEN2, "do_resize": False}, {}, "do_resize false"),
    ],
)
def test_model_without_supported_processor_is_refused(
    tmp_path: Path, processor: dict[str, Any] | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ImageProcessor.load(write_model(tmp_path, processor, **config))
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ImageProcessor.load(tmp_path)


def test_processor_in_processor_config_is_found(tmp_path: Path) -> None:
    own = ImageProcessor.load(write_model(tmp_path / "one", QWEN3))
    model = write_model(tmp_path / "two", None)
    (model / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3, "processor_class": "x"}))
    assert ImageProcessor.load(model) == own


def test_fingerprint_survives_json_and_makes_the_processor_again(tmp_path: Path) -> None:
    processor = ImageProcessor.load(write_model(tmp_path, QWEN3), max_pixels=100_000)
    recorded = json.loads(json.dumps(processor.fingerprint()))
    assert recorded == processor.fingerprint() and ImageProcessor.from_fingerprint(recorded) == processor
    assert {"processor", "transformers", "pillow", "libjpeg", "min_pixels", "max_pixels"} <= recorded.keys()
    other = ImageProcessor.load(tmp_path, max_pixels=100_001)
    assert other.fingerprint() != recorded


def test_round_with_images_has_their_processor_in_its_fingerprint(tmp_path: Path) -> None:
    processor = ImageProcessor.load(write_model(tmp_path, QWEN3))
    recorded = {**processor.fingerprint(), "pillow": "1.0"}  # of another machine
    assert fingerprint_of_images(Commit(kind="rollout", state={"image_processor": recorded})) == {
        "images": processor.fingerprint()
    }
    assert fingerprint_of_images(Commit(kind="rollout")) == {}


def test_image_token_of_text_model_is_none(tmp_path: Path) -> None:
    assert read_image_token_id(write_model(tmp_path, None)) == 7
    (tmp_path / "config.json").write_text("{}")
    assert read_image_token_id(tmp_path) is None and read_image_token_id(tmp_path / "missing") is None


def test_image_tokens_are_repeated_across_pieces() -> None:
    assert expand_image_tokens([[1, 7, 2], [3], [7, 7]], 7, [2, 1, 3]) == [[1, 7, 7, 2], [3], [7, 7, 7, 7]]
    assert expand_image_tokens([[1, 2], []], 7, []) == [[1, 2], []]
    for counts in ([1], [1, 1, 1], []):
        with pytest.raises(DataError, match=f"2 image tokens for {len(counts)} images"):
            expand_image_tokens([[7, 7]], 7, counts)
