"""Hugging Face directories: weights read and written one tensor at a time, and the small files that travel with them.

The safetensors format is a JSON header (name -> dtype, shape, place) and raw bytes, so shapes cost no reading, and a file can be
written without holding it in memory. Which names there are is for `storage.layouts`.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from storage.store import hash_file

INDEX = "model.safetensors.index.json"
ASSETS = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".py"}  # suffixes of config, tokenizer and chat template files
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HFWeights:
    """The weights of a Hugging Face directory, read when asked for. A context manager: files stay open inside.

    Raises:
        ValueError: no safetensors, a damaged file, or a number type that Penstock does not train.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.files: dict[str, Path] = {}  # tensor -> file
        self.info: dict[str, TensorInfo] = {}
        for path in weight_files(self.directory):
            for name, entry in read_header(path).items():
                if entry["dtype"] not in DTYPES:
                    raise ValueError(
                        f"{path}: {name} is stored as {entry['dtype']}, needed {', '.join(DTYPES)}: use an unquantised checkpoint"
                    )
                self.files[name] = path
                self.info[name] = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]))
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()
        self._stack.close()

    def fetch(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        path = self.files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
        return self._open[path].get_tensor(name)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that the directory's index names, or the only one there is.

    Raises:
        ValueError: there is none, or the index names one that is not there.
    """
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise ValueError(f"{directory} has neither model.safetensors nor {INDEX}: save the model with `save_pretrained`")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ValueError(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(names)} missing): download it again"
        )
    return [directory / name for name in names]


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> `{"dtype", "shape", "data_offsets"}`.

    Raises:
        ValueError: the file is cut short or is no safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        header = _parse(file.read(length)) if 8 + length <= size else None
    if header is None:
        raise ValueError(f"{path} is no safetensors file or was cut short ({size} bytes): download it again")
    header.pop("__metadata__", None)
    needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != needed:
        raise ValueError(f"{path} has {size} bytes, its header needs {needed}: download it again")
    return header


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(data))
    except ValueError:
        return None


class ShardWriter:
    """Writes named tensors as `model-00001-of-0000N.safetensors` with an index (or one `model.safetensors`), in a given order.

    Args:
        directory: where the files go.
        plan: name and size of every tensor, in the order in which they will come.
        shard_bytes: a shard holds at most this much, or one tensor.
    """

    def __init__(self, directory: Path, plan: list[tuple[str, TensorInfo]], shard_bytes: int) -> None:
        self.directory, self.shards = directory, _split(plan, shard_bytes)
        self.total = sum(info.num_bytes for _, info in plan)

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Consume the tensors of the plan, in its order."""
        for number, shard in enumerate(self.shards):
            with open(self.directory / self._name(number), "wb") as file:
                file.write(_header(shard))
                for name, info in shard:
                    found, tensor = next(tensors)
                    assert (found, tensor.dtype, tuple(tensor.shape)) == (name, info.dtype, info.shape), (
                        f"{found} came, {name} was planned"
                    )
                    file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        if len(self.shards) > 1:
            where = {name: self._name(number) for number, shard in enumerate(self.shards) for name, _ in shard}
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _name(self, number: int) -> str:
        count = len(self.shards)
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _split(plan: list[tuple[str, TensorInfo]], shard_bytes: int) -> list[list[tuple[str, TensorInfo]]]:
    shards: list[list[tuple[str, TensorInfo]]] = [[]]
    filled = 0
    for name, info in plan:
        if shards[-1] and filled + info.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, info))
        filled += info.num_bytes
    return shards


def _header(shard: list[tuple[str, TensorInfo]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in shard:
        entries[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [end, end + info.num_bytes]}
        end += info.num_bytes
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # the format wants the bytes after it aligned
    return struct.pack("<Q", len(data)) + data


def assets(directory: Path) -> list[Path]:
    """The small files beside the weights: config, tokenizer, chat template, generation defaults."""
    files = (path for path in sorted(directory.iterdir()) if path.is_file() and path.suffix in ASSETS)
    return [path for path in files if not path.name.startswith(".") and not path.name.endswith(".index.json")]


def copy_assets(source: Path, target: Path) -> None:
    """Carry the small files over."""
    target.mkdir(parents=True, exist_ok=True)
    for path in assets(source):
        shutil.copyfile(path, target / path.name)


def fingerprint(directory: Path) -> str:
    """A name for exactly these weights and small files: equal fingerprint = equal model and tokenizer."""
    digest = xxhash.xxh3_128()
    for path in [*assets(directory), *weight_files(directory)]:
        digest.update(f"{path.name} {hash_file(path)}\n".encode())
    return digest.hexdigest()
