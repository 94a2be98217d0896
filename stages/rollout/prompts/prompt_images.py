"""Read the images of prompts: find their files, decode them as a check, count their tokens, write them to the store.

A row names its images by paths, URIs, or has their bytes (prompt_rows.py). A file is read when its prompt is issued,
and only from the directories and URIs of --image-roots, or from the directory of the prompt file: prompt data are often
downloaded, and must not make a run read, store and publish other files. An image that cannot be used fails the samples
of its prompt, not the round.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.stages.images import ImageProcessor, expand_image_tokens, read_image_token_id
from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.prompt_files import DATA_SUFFIXES, parse_slice, suffix_of
from penstock.stages.rollout.prompts.source import Prompt
from penstock.stages.rollout.text.templates import preview
from penstock.storage.blobs import write_blobs
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import DataError, check_rules
from penstock.storage.file_store import FileStore
from penstock.storage.image_decoding import MAX_BYTES, load_image

_NUM_THREADS = 8  # prompts whose images are read and decoded concurrently
_DATA_URI = re.compile(r"data:[^,]*?(;base64)?,", re.IGNORECASE)


@dataclass
class LoadedImages:
    """The images of a prompt, or why one of them cannot be used."""

    files: list[bytes] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # names of the blobs, once they are written
    problem: str = ""  # "" if all images can be used


@dataclass
class PromptImages:
    """Reads the images of the prompts of a run, for the model whose checkpoint is in `directory`."""

    config: PromptConfig
    directory: Path
    store: FileStore | None = None  # where images are written; None: only check them
    _loaded: dict[tuple[int, int], LoadedImages] = field(default_factory=dict)  # (file, row), until they are written

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor of the model; loaded when the first prompt has an image. Raises ModelError."""
        return ImageProcessor.load(self.directory, self.config.image_min_pixels, self.config.image_max_pixels)

    @cached_property
    def image_token_id(self) -> int | None:
        """The id of the model's image token; None for a text model."""
        return read_image_token_id(self.directory)

    def count_extra_tokens(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return by how many tokens each prompt is longer than its text, which has one token for each image. For an
        image that cannot be used, 0: the prompt is issued, and its samples fail."""
        loaded = self.load(prompts)
        self._loaded |= {(prompt.file, prompt.row): images for prompt, images in zip(prompts, loaded) if prompt.images}
        return [sum(images.num_tokens) - len(images.num_tokens) for images in loaded]

    def write(self, prompts: Sequence[Prompt]) -> list[LoadedImages]:
        """Read the images of prompts, and write them to the store as blobs. Return those of each prompt, in order."""
        loaded = self.load(prompts)
        self._loaded.clear()
        assert self.store is not None, "images are written only in a run"
        digests = iter(write_blobs(self.store, [file for images in loaded for file in images.files]))
        for images in loaded:
            images.digests = [next(digests) for _ in images.files]
        return loaded

    def expand(self, loaded: LoadedImages, pieces: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the token ids of a prompt or a conversation, given in pieces, with as many image tokens as its images
        have. Raises DataError."""
        if loaded.problem:
            raise DataError(loaded.problem)
        if self.image_token_id is None:
            return [list(piece) for piece in pieces]
        return expand_image_tokens(pieces, self.image_token_id, loaded.num_tokens)

    def expand_or_fail(
        self, loaded: LoadedImages, pieces: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], LoadedImages]:
        """Return the token ids of `expand`, and `loaded`. If the images cannot be used: the ids without image tokens,
        and no images, but the problem. So a sample has image tokens only for its images."""
        try:
            return self.expand(loaded, pieces), loaded
        except DataError as error:
            kept = [[id for id in piece if id != self.image_token_id] for piece in pieces]
            return kept, LoadedImages(problem=str(error))

    def load(self, prompts: Sequence[Prompt]) -> list[LoadedImages]:
        """Read and decode the images of prompts. Return those of each prompt, in order. Raises ModelError."""
        if not any(prompt.images for prompt in prompts):
            return [LoadedImages() for _ in prompts]
        _ = self.processor  # loaded before the threads start
        return map_in_threads(self._load_one, prompts, _NUM_THREADS)

    def _load_one(self, prompt: Prompt) -> LoadedImages:
        if known := self._loaded.get((prompt.file, prompt.row)):
            return known
        loaded = LoadedImages()
        own = [directory_of_entry(self.config.prompt_data[prompt.file])] if prompt.file >= 0 else []
        for number, source in enumerate(prompt.images, start=1):
            try:
                file = read_image_file(source, self.config.image_roots or own)
                loaded.num_tokens.append(self.processor.num_tokens(load_image(file)))
            except DataError as error:
                return LoadedImages(problem=str(error).replace("the image", f"image {number}", 1))
            loaded.files.append(file)
        return loaded


def directory_of_entry(entry: str) -> str:
    """Return the directory of an entry of --prompt-data: of a file the parent, of a glob pattern the last directory
    before the first wildcard, of data that `save_to_disk` wrote their directory."""
    path = parse_slice(entry)[0]
    fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
    if fixed == path and suffix_of(path) not in DATA_SUFFIXES:
        return path
    parent, slash, _ = fixed.rpartition("/")
    return parent or slash or "."


def read_image_file(source: str, roots: Sequence[str]) -> bytes:
    """Return the bytes of an image of a row. A relative path is looked up in the first of `roots`, and no file outside
    of `roots` is read. Raises DataError."""
    if match := _DATA_URI.match(source):
        try:
            return base64.b64decode(source[match.end() :] if match[1] else "!", validate=True)
        except ValueError:
            raise DataError("the image is a data: URI that is not base64: write data:image/png;base64,...") from None
    shown = preview(source)
    rules = [
        ("::" in source or "\0" in source, "is a chained URI or has a NUL: give a path or a plain URI"),
        (not roots, "has no directory from which images may be read: give --image-roots"),
    ]
    check_rules(((is_violated, f"the image {shown} {problem}") for is_violated, problem in rules), DataError)
    is_relative, problem = "://" not in source and not posixpath.isabs(source), ""
    try:
        fs, path = _locate(f"{roots[0].rstrip('/') or ''}/{source}" if is_relative else source)
        is_inside = any(
            type(other) is type(fs) and path.startswith(f"{directory.rstrip('/')}/")
            for other, directory in map(_locate, roots)
        )
        if not is_inside:
            problem = (
                f"is outside of {', '.join(roots)}, from where images may be read: move it there, or name its "
                "directory with --image-roots"
            )
        elif isinstance(fs, LocalFileSystem) and fs.info(path)["type"] == "other":
            problem = "is a pipe or a device: give a file"
        else:
            with fs.open(path, "rb") as file:
                data: bytes = file.read(MAX_BYTES + 1)
                return data
    except DataError:
        raise
    except Exception as error:  # fsspec drivers have their own error types
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        problem = f"cannot be read ({reason:.120}): correct the path or the permissions"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = "does not exist: correct the path, or create the file"
    raise DataError(f"the image {shown} {problem}")


def _locate(uri: str) -> tuple[Any, str]:
    """Return the file system of a path or URI, and the path in it, without symbolic links and `..`."""
    fs, path = fsspec.core.url_to_fs(uri)
    if isinstance(fs, LocalFileSystem):
        return fs, os.path.realpath(path)
    if ".." in path.split("/"):
        raise DataError(f"the image {preview(uri)} has `..` in its URI: give the URI without it")
    return fs, path.rstrip("/")
