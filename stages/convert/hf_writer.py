"""Hugging Face weight files, written one tensor after the other: `model-00001-of-0000N.safetensors` and their index.

A file's header says where every tensor lies, so it is written first, from names and shapes alone. Reading is `hf_files`'.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from stages.convert.headers import INDEX
from stages.convert.hf_files import CHUNK, CODES, TensorInfo

Named = tuple[str, TensorInfo]


@dataclass(frozen=True)
class Shard:
    """One file to be."""

    file: str
    groups: list[list[Named]]  # tensors that are made together, in the order in which they lie

    @property
    def tensors(self) -> list[Named]:
        """All of them."""
        return [named for group in self.groups for named in group]

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for _, info in self.tensors)


def shards(groups: Sequence[list[Named]], shard_bytes: int) -> list[Shard]:
    """Distribute groups of tensors over files, in their order. A file holds at most `shard_bytes`, or one group."""
    parts: list[list[list[Named]]] = [[]]
    filled = 0
    for group in groups:
        size = sum(info.num_bytes for _, info in group)
        if parts[-1] and filled + size > shard_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(group)
        filled += size
    count = len(parts)
    names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)] if count > 1 else ["model.safetensors"]
    return [Shard(name, part) for name, part in zip(names, parts, strict=True)]


def write_shard(path: Path, shard: Shard, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Write one file; `tensors` are those of the shard, in its order. Returns its xxh3-128."""
    source, digest = iter(tensors), xxhash.xxh3_128()
    with open(path, "wb") as file:
        header = _header(shard.tensors)
        file.write(header)
        digest.update(header)
        for name, info in shard.tensors:
            found, tensor = next(source)
            assert (found, tensor.dtype, tuple(tensor.shape)) == (name, info.dtype, info.shape), (
                f"{found} {tensor.dtype} {list(tensor.shape)} came, {name} {info} was planned"
            )
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for at in range(0, len(content), CHUNK):
                digest.update(content[at : at + CHUNK])
                file.write(content[at : at + CHUNK])
        assert next(source, None) is None, f"{path.name} is full"
    return digest.hexdigest()


def write_index(directory: Path, written: Sequence[Shard]) -> None:
    """The index of the files, if there is more than one."""
    if len(written) > 1:
        where = {name: shard.file for shard in written for name, _ in shard.tensors}
        index = {"metadata": {"total_size": sum(shard.num_bytes for shard in written)}, "weight_map": dict(sorted(where.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header(tensors: Sequence[Named]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors:
        entries[name] = {"dtype": CODES[info.dtype], "shape": list(info.shape), "data_offsets": [end, end + info.num_bytes]}
        end += info.num_bytes
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # the format wants the bytes after it aligned
    return struct.pack("<Q", len(data)) + data
