"""Find and copy the assets of a Hugging Face directory (config, tokenizer, chat template: all files but weights), and
compute hashes that identify a model and detect changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import xxhash

from penstock.engines.weights.hf_headers import read_header, weight_files
from penstock.storage.disk import map_in_threads
from penstock.storage.store import hash_file

# in a converted model's assets: tensors copied unchanged, because Megatron's model lacks them (multi-token prediction)
CARRIED = "carried.safetensors"
ASSET_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"}
NAMED_TEMPLATES = "additional_chat_templates"  # directory of chat templates that are chosen by name
DOCUMENTS = re.compile(r"(license|notice|readme|use_policy|copying)\b.*", re.IGNORECASE)  # travel with a model
NUM_HASH_THREADS = 4


def asset_files(directory: Path) -> list[Path]:
    """Return the paths of the directory's config, tokenizer, chat templates and generation defaults."""
    named = (directory / NAMED_TEMPLATES).glob("*.jinja")
    files = (path for path in sorted([*directory.iterdir(), *named]) if path.suffix in ASSET_SUFFIXES)
    return [
        path
        for path in files
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(".index.json")
    ]


def copy_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat templates, licence and model card from the directory `source` to the directory
    `target`."""
    documents = [path for path in source.iterdir() if path.is_file() and DOCUMENTS.fullmatch(path.name)]
    for path in [*asset_files(source), *documents]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def model_fingerprint(directory: Path, hashes: dict[str, str] | None = None) -> str:
    """Return a hash of a model's weights, config and tokenizer: equal hashes mean the same model and tokenizer.

    Args:
        directory: Hugging Face directory.
        hashes: known hashes of weight files, by file name; the other files are hashed here.
    """
    known, digest = hashes or {}, xxhash.xxh3_128()
    files = [*asset_files(directory), *weight_files(directory)]
    file_hashes = map_in_threads(lambda path: known.get(path.name) or hash_file(path), files, NUM_HASH_THREADS)
    for path, xxh3 in zip(files, file_hashes, strict=True):
        digest.update(f"{path.relative_to(directory)} {xxh3}\n".encode())
    return digest.hexdigest()


def header_hash(directory: Path) -> str:
    """Return a hash of config, tokenizer and the weight files' headers, without reading weights. Different hashes mean
    different models; equal hashes do not prove equal weights."""
    digest = xxhash.xxh3_128(assets_hash(directory).encode())
    for path in weight_files(directory):
        digest.update(f"{path.name} {json.dumps(read_header(path))}\n".encode())
    return digest.hexdigest()


def assets_hash(directory: Path) -> str:
    """Return a hash of config, tokenizer and chat template and of a converted model's multi-token prediction tensors
    (`CARRIED`)."""
    digest = xxhash.xxh3_128()
    for path in [*asset_files(directory), *directory.glob(CARRIED)]:
        digest.update(f"{path.relative_to(directory)} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def stat_hash(directory: Path) -> str:
    """Return a hash of the directory's path and of the sizes, modification times and inodes of assets and weight files.
    It changes whenever a file is written; a copy of the directory has a different hash."""
    digest = xxhash.xxh3_128(str(directory.resolve()).encode())
    for path in [*asset_files(directory), *weight_files(directory)]:
        stat = path.stat()
        name, times = path.relative_to(directory), f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
        digest.update(f"{name} {stat.st_size} {times} {stat.st_ino}\n".encode())
    return digest.hexdigest()
