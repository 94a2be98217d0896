"""What lies beside the weights of a Hugging Face directory, and names for all of it together: which model is this, and is it untouched?

Weights are read by `hf_files`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import xxhash

from stages.convert.headers import read_header, weight_files
from storage.disk import in_parallel
from storage.store import hash_file

CARRIED = "carried.safetensors"  # beside a converted model's small files: tensors that Megatron has no place for
ASSETS = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"}  # suffixes of config, tokenizer and chat template files
_NUM_HASHES = 4  # files hashed at a time


def assets(directory: Path) -> list[Path]:
    """The small files beside the weights: config, tokenizer, chat template, generation defaults."""
    files = (path for path in sorted(directory.iterdir()) if path.is_file() and path.suffix in ASSETS)
    return [path for path in files if not path.name.startswith(".") and not path.name.endswith(".index.json")]


def copy_assets(source: Path, target: Path) -> None:
    """Carry the small files over."""
    target.mkdir(parents=True, exist_ok=True)
    for path in assets(source):
        shutil.copyfile(path, target / path.name)


def fingerprint(directory: Path, hashes: dict[str, str] | None = None) -> str:
    """A name for exactly these weights and small files: equal fingerprint = equal model and tokenizer.

    Args:
        directory: of Hugging Face files.
        hashes: of weight files, by name, where they are known already.
    """
    known, digest = hashes or {}, xxhash.xxh3_128()
    files = [*assets(directory), *weight_files(directory)]
    found = in_parallel(lambda path: known.get(path.name) or hash_file(path), files, _NUM_HASHES)
    for path, xxh3 in zip(files, found, strict=True):
        digest.update(f"{path.name} {xxh3}\n".encode())
    return digest.hexdigest()


def headers(directory: Path) -> str:
    """A name for the small files and the shapes of the weights, told without reading these: other headers, another model."""
    digest = xxhash.xxh3_128(small_files(directory).encode())
    for path in weight_files(directory):
        digest.update(f"{path.name} {json.dumps(read_header(path))}\n".encode())
    return digest.hexdigest()


def small_files(directory: Path) -> str:
    """A name for the small files, and for the tensors that lie beside those of a converted model."""
    digest = xxhash.xxh3_128()
    for path in [*assets(directory), *directory.glob(CARRIED)]:
        digest.update(f"{path.name} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def untouched(directory: Path) -> str:
    """A name for the files as they lie there: equal as long as nobody writes them. Tells nothing of copies elsewhere."""
    digest = xxhash.xxh3_128(str(directory.resolve()).encode())
    for path in [*assets(directory), *weight_files(directory)]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}\n".encode())
    return digest.hexdigest()
