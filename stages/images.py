"""Images as a vision-language model reads them: cut them into patches, count their tokens.

A sample refers to its images by the SHA-256 of the original files, which are blobs of the store (storage/blobs.py).
Everything else is computed again from these bytes, with equal results on every machine that has the same versions of
Pillow and transformers (`ImageProcessor.fingerprint`):

    read_blob(store, digest) -> load_image(bytes) -> ImageProcessor.process(images) -> pixel_values, grid_thw

In the token ids of a sample, an image is a run of `image_token_id`: one token for each merge_size x merge_size patches.
"""

from __future__ import annotations

import importlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
import PIL
from PIL import Image, features

from penstock.engines.families.shape import image_starts
from penstock.engines.generation import PromptImage
from penstock.storage.blobs import read_blob, write_blobs
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError, ModelError, check_rules
from penstock.storage.file_store import FileStore
from penstock.storage.image_decoding import load_image
from penstock.storage.samples.sample import Sample

KEPT_IMAGES = 256
_STEPS = ("do_resize", "do_rescale", "do_normalize")  # entries of preprocessor_config.json that must not be false
_CLASS = "Qwen2VLImageProcessorPil"
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", _CLASS)


# ---- patches ---------------------------------------------------------------------------------------------------------


def read_image_token_id(directory: Path) -> int | None:
    """Return the id of the image token of the checkpoint in `directory`; None for a text model. Raises ModelError."""
    path = directory / "config.json"
    return _read_json(path).get("image_token_id") if path.exists() else None


@dataclass(frozen=True)
class ProcessedImages:
    """The images of one or several samples, in the order of their tokens, as the vision tower reads them."""

    pixel_values: np.ndarray  # [P, patch_dim] float32, the patches of all images one after another
    grid_thw: np.ndarray  # [I, 3] int64, (frames, rows, columns) of patches of each image; frames is 1


@dataclass(frozen=True)
class ImageProcessor:
    """The image processor of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint: transformers' class without torchvision
    (`Qwen2VLImageProcessorPil`), also where torchvision is installed, so that the bits do not depend on it."""

    image_token_id: int  # `image_token_id` of config.json
    min_pixels: int  # an image with fewer pixels is enlarged
    max_pixels: int  # an image with more pixels is reduced
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2  # merge_size x merge_size patches become one token
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    resample: int = Image.Resampling.BICUBIC.value

    @classmethod
    def load(cls, directory: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> Self:
        """Load the processor of the checkpoint in `directory`. `min_pixels` and `max_pixels` (--image-min-pixels,
        --image-max-pixels) replace those of the checkpoint. Raises ModelError."""
        config = _read_json(Path(directory) / "config.json")
        file = Path(directory) / "preprocessor_config.json"
        if not file.exists() and (Path(directory) / "processor_config.json").exists():
            file = Path(directory) / "processor_config.json"
        options = _read_json(file)
        options = options.get("image_processor", options)
        kind = options.get("image_processor_type")
        rules = [
            (
                kind not in _PROCESSORS or config.get("image_token_id") is None,
                f"{file} has the image processor {kind!r}, and config.json the image token "
                f"{config.get('image_token_id')!r}; prompts with images need {_PROCESSORS[0]} and an image_token_id: "
                "use a Qwen2-VL, Qwen2.5-VL or Qwen3-VL checkpoint",
            ),
            *(
                (not options.get(name, True), f"{file} has {name} false, which is not supported: remove the entry")
                for name in _STEPS
            ),
        ]
        check_rules(rules, ModelError)
        size = options.get("size") or {}
        bounds: dict[str, Any] = {
            "min_pixels": min_pixels or options.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
            "max_pixels": max_pixels or options.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        }
        names = {field.name for field in fields(cls)} - {"image_token_id", *bounds}
        values = {name: options[name] for name in names if options.get(name) is not None}
        values |= {name: tuple(values[name]) for name in ("image_mean", "image_std") if name in values}
        processor = cls(image_token_id=config["image_token_id"], **bounds, **values)
        if processor.max_pixels < max(processor.min_pixels, (processor.patch_size * processor.merge_size) ** 2):
            raise ModelError(
                f"images of {file} would have at least {processor.min_pixels} and at most {processor.max_pixels} "
                "pixels: correct --image-min-pixels and --image-max-pixels"
            )
        return processor

    @property
    def patch_dim(self) -> int:
        """Return the number of values of a patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def process(self, images: Sequence[np.ndarray]) -> ProcessedImages:
        """Resize images ([H, W, 3] uint8, from `load_image`) to a multiple of the patch size within the bounds, and
        cut them into normalized patches. Equal images give equal bits, in any batch."""
        if not images:
            return ProcessedImages(np.empty((0, self.patch_dim), np.float32), np.empty((0, 3), np.int64))
        result = self._inner.preprocess(list(images), input_data_format="channels_last")
        pixel_values, grid_thw = result["pixel_values"], result["image_grid_thw"]
        assert pixel_values.dtype == np.float32 and pixel_values.shape[1] == self.patch_dim
        return ProcessedImages(pixel_values, grid_thw)

    def num_tokens(self, image: np.ndarray) -> int:
        """Return the number of tokens of an image ([H, W, 3])."""
        rows, columns = self.num_blocks(image)
        return rows * columns

    def scaled_file(self, image: np.ndarray) -> bytes:
        """Return a PNG file of an image ([H, W, 3]) in the size that `process` gives it. An engine that only normalizes
        the pixels of this file reads the same values as the trainer."""
        factor, (rows, columns), file = self.patch_size * self.merge_size, self.num_blocks(image), io.BytesIO()
        scaled = Image.fromarray(image).resize((columns * factor, rows * factor), Image.Resampling(self.resample))
        scaled.save(file, "PNG", compress_level=1)
        return file.getvalue()

    def num_blocks(self, image: np.ndarray) -> tuple[int, int]:
        """Return the rows and columns of blocks of merge_size x merge_size patches of an image ([H, W, 3]), computed
        from its size only, as transformers' `smart_resize` does, whose module takes seconds to import."""
        factor, (height, width) = self.patch_size * self.merge_size, image.shape[:2]
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            rows, columns = max(1, math.floor(height / beta / factor)), max(1, math.floor(width / beta / factor))
        elif rows * columns * factor**2 < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * beta / factor), math.ceil(width * beta / factor)
        return rows, columns

    @classmethod
    def from_fingerprint(cls, fingerprint: Mapping[str, Any]) -> Self:
        """Return the processor with a recorded fingerprint, but with the libraries of this machine."""
        values = {field.name: fingerprint[field.name] for field in fields(cls)}
        return cls(**values | {name: tuple(values[name]) for name in ("image_mean", "image_std")})

    def fingerprint(self) -> dict[str, Any]:
        """Return the name, options and library versions on which the bits of `load_image` and `process` depend."""
        return {
            "processor": _CLASS,
            "transformers": version("transformers"),
            "pillow": PIL.__version__,
            "libjpeg": features.version("libjpeg_turbo") or features.version("jpg"),
            "libwebp": features.version("webp"),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()},
        }

    @cached_property
    def _inner(self) -> Any:
        # Imported late, because it imports torch and takes seconds: only where images are processed.
        module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        return getattr(module, _CLASS)(
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            patch_size=self.patch_size,
            temporal_patch_size=self.temporal_patch_size,
            merge_size=self.merge_size,
            image_mean=list(self.image_mean),
            image_std=list(self.image_std),
            rescale_factor=self.rescale_factor,
            resample=self.resample,
        )


def read_image_processor(rollout: Commit) -> ImageProcessor | None:
    """Return the image processor of a committed rollout; None if its samples have no images."""
    recorded = rollout.state.get("image_processor")
    return None if recorded is None else ImageProcessor.from_fingerprint(recorded)


@dataclass(eq=False)
class SampleImages:
    """Reads the images of samples from the store, for requests to engines and for the trainer. Thread-safe. The last
    results are kept, because the samples of a group have the same images."""

    store: FileStore
    processor: ImageProcessor

    def __post_init__(self) -> None:
        self.process = lru_cache(KEPT_IMAGES)(
            lambda digest: self.processor.process([load_image(read_blob(self.store, digest))])
        )
        self.scaled_file = lru_cache(KEPT_IMAGES)(self._scaled_file)

    def of_prompt(self, token_ids: Sequence[int], digests: Sequence[str]) -> list[PromptImage]:
        """Return the images of a prompt for an engine. Raises DataError if they do not fit to the prompt's tokens."""
        files = [self.scaled_file(digest) for digest in digests]
        starts = image_starts(np.asarray(token_ids), self.processor.image_token_id, [count for _, count in files])
        return [PromptImage(data, start, count) for start, (data, count) in zip(starts, files)]

    def add(self, sample: Sample, token_ids: Sequence[int], files: Sequence[bytes]) -> list[int]:
        """Add images to a sample, as the image tokens in `token_ids` come next; write them to the store. Return the ids
        with the image token of each file repeated as often as its image needs. Raises DataError."""
        counts = [self.processor.num_tokens(load_image(data)) for data in files]
        [expanded] = expand_image_tokens([token_ids], self.processor.image_token_id, counts)
        sample.images += write_blobs(self.store, files)
        return expanded

    def fail_unusable(self, samples: Sequence[Sample]) -> None:
        """Fail the samples whose image tokens are not those of their images, because the model generated one: the
        trainer cannot find the images in them."""
        for sample in samples:
            if any(sample.loss_mask):
                try:
                    self.of_prompt(sample.token_ids, sample.images)
                except DataError as error:
                    sample.fail(f"the response contains image tokens: {error}")

    def _scaled_file(self, digest: str) -> tuple[bytes, int]:
        """Return the file of an image for an engine, and the image's number of tokens."""
        image = load_image(read_blob(self.store, digest))
        return self.processor.scaled_file(image), self.processor.num_tokens(image)

    def grid(self, digest: str) -> tuple[int, int, int]:
        """Return (frames, rows, columns) of patches of one image."""
        rows, columns = self.processor.num_blocks(load_image(read_blob(self.store, digest)))
        return 1, rows * self.processor.merge_size, columns * self.processor.merge_size


def fingerprint_of_images(rollout: Commit) -> dict[str, Any]:
    """Return the part of a numerics fingerprint that the images of a rollout add: {} if it has none, otherwise its
    processor with the libraries of this process."""
    processor = read_image_processor(rollout)
    return {"images": processor.fingerprint()} if processor else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = "it is not a JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ModelError(
        f"{path}, which prompts with images need, cannot be read ({reason}): use a Qwen2-VL, Qwen2.5-VL or Qwen3-VL "
        "checkpoint with this file"
    )


def expand_image_tokens(
    pieces: Sequence[Sequence[int]], image_token_id: int, num_tokens: Sequence[int]
) -> list[list[int]]:
    """Return token ids, given in consecutive pieces, with the i-th `image_token_id` repeated `num_tokens[i]` times.
    Raises DataError if the number of image tokens is not that of the images."""
    num_places = sum(list(piece).count(image_token_id) for piece in pieces)
    if num_places != len(num_tokens):
        raise DataError(
            f"the rendered text has {num_places} image tokens for {len(num_tokens)} images: remove image tokens from "
            "the text of the row, or use a chat template that writes one for each image"
        )
    left = iter(num_tokens)
    return [
        [token for id in piece for token in ([id] * next(left) if id == image_token_id else [id])] for piece in pieces
    ]
