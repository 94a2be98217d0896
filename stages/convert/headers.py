"""Headers of safetensors files: which tensors a Hugging Face directory holds, told without reading any of them. No torch here.

A file is 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, data_offsets), and the tensors' bytes, which
must fill the rest of the file without a gap.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from storage.errors import ModelError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are stored."""

    path: Path
    start: int
    dtype: str  # safetensors' code


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    place: Place
    shape: tuple[int, ...]


def stored_tensors(directory: Path, files: list[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of some files of a directory, by name.

    Raises:
        ModelError: a damaged file, a tensor in two files, or one that is not in the file that the index names.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        header, start = read_header(path)
        for name, entry in header.items():
            if name in tensors:
                raise ModelError(
                    f"{tensors[name].place.path} and {path} both have {name}: keep one of them, or download both again"
                )
            tensors[name] = StoredTensor(Place(path, start + entry["data_offsets"][0], entry["dtype"]), tuple(entry["shape"]))
    index = directory / INDEX
    listed = read_index(index) if index.is_file() and files == weight_files(directory) else {}
    if lost := sorted(name for name, file in listed.items() if name not in tensors or tensors[name].place.path.name != file):
        raise ModelError(
            f"{index} says that {listed[lost[0]]} has {lost[0]}, but it does not ({len(lost)} such tensors): download both again"
        )
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that the directory's index names, or the only one there is.

    Raises:
        ModelError: there is none, or the index names one that is missing.
    """
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(read_index(index).values()))
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise ModelError(f"{directory} has neither model.safetensors nor {INDEX}: save the model with `save_pretrained`")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names {missing[0]}, which does not exist ({len(missing)} of {len(names)} missing): download it again"
        )
    return [directory / name for name in names]


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of every tensor.

    Raises:
        ModelError: it is not such an index.
    """
    index = _parsed(path.read_bytes())
    files = index.get("weight_map") if isinstance(index, dict) else None
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(name, str) and Path(name).name == name for name in files.values())
    ):
        raise ModelError(
            f"{path} is not an index of safetensors files (JSON with weight_map: tensor -> file name): download it again"
        )
    return files


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, tensor name -> `{"dtype", "shape", "data_offsets"}`, and where the tensors begin.

    Raises:
        ModelError: the file is not a safetensors file, is shorter or longer than its header says, or the header contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        header = _parsed(file.read(length)) if 8 + length <= size and length <= MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file or was cut short ({size} bytes): download it again")
    header.pop("__metadata__", None)
    if problem := _problem(header, size - 8 - length):
        raise ModelError(f"{path}: {problem}: download it again")
    return header, 8 + length


def block_size(directory: Path) -> tuple[int, int] | None:
    """Return rows and columns of the blocks in which config.json says that weights are quantised; None if they are not.

    Raises:
        ModelError: they are quantised in another way.
    """
    config = directory / "config.json"
    values = _parsed(config.read_bytes()) if config.is_file() else None
    quantization = values.get("quantization_config") if isinstance(values, dict) else None
    if not quantization:
        return None
    method, block = (
        quantization.get(key) if isinstance(quantization, dict) else None for key in ("quant_method", "weight_block_size")
    )
    if method != "fp8" or not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ModelError(
            f"{config} says that the weights are quantised by {method!r} (blocks {block}); Penstock reads plain weights "
            "and fp8 in blocks: use the bf16 or the fp8 checkpoint of this model"
        )
    return block[0], block[1]


def _problem(header: dict[str, Any], num_bytes: int) -> str | None:
    """What contradicts itself in a header, or the `num_bytes` after it."""
    for name, entry in header.items():
        if problem := _entry_problem(name, entry):
            return problem
    end = 0
    for name, (start, stop) in sorted(((n, e["data_offsets"]) for n, e in header.items()), key=lambda tensor: tensor[1]):
        if start != end:
            return f"{name} begins at byte {start}, but the tensor before it ends at {end}"
        end = stop
    if end != num_bytes:
        return f"its header describes {end} bytes of tensors, but it has {num_bytes}"
    return None


def _entry_problem(name: str, entry: dict[str, Any] | None) -> str | None:
    if not isinstance(entry, dict):
        return f"the header has no description of {name}"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{name} has shape {shape} and data_offsets {offsets}, which are not lists of sizes"
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"{name} has the unknown dtype {dtype!r}"
    needed = math.prod(shape) * BITS[dtype]
    if needed != 8 * (offsets[1] - offsets[0]):
        return (
            f"{name} of shape {shape} in {dtype} needs {needed / 8:.0f} bytes, but data_offsets give it {offsets[1] - offsets[0]}"
        )
    return None


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _parsed(data: bytes) -> Any:
    """JSON, or None; an object with the same name twice is not one."""
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)
