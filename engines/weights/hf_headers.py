"""Headers of safetensors files: read them without reading weights, and check that the tensors of a Hugging Face
directory match its config.json. Does not import torch, because preflight checks use it too.

A file consists of the header's length (8 bytes), the header (JSON: name -> dtype, shape, data_offsets), and the
tensors' bytes, which must fill the rest of the file without a gap.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np

from penstock.engines.families import tensor_layout
from penstock.engines.families.entries import describe_gguf
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorLayout
from penstock.storage.errors import ModelError, check_rules

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"  # suffix of the tensor with the scales of an fp8 weight
READABLE = ("F64", "F32", "BF16", "F16")  # dtype codes of unquantized weights
MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
STACKED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")  # names of tensors in files
SAMPLED_BYTES = 1 << 30  # bytes of weights that preflight reads to find values that are not finite
# dtype code -> integer type, mask of all bits except the sign, smallest masked value that is NaN or infinite
NOT_FINITE: dict[str, tuple[Any, int, int]] = {
    "F64": (np.uint64, (1 << 63) - 1, 0x7FF << 52),
    "F32": (np.uint32, (1 << 31) - 1, 0xFF << 23),
    "BF16": (np.uint16, (1 << 15) - 1, 0xFF << 7),
    "F16": (np.uint16, (1 << 15) - 1, 0x1F << 10),
    "F8_E4M3": (np.uint8, (1 << 7) - 1, 0x7F),
}


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor's bytes in a file."""

    path: Path
    start: int  # byte offset in the file
    dtype: str  # dtype code of safetensors, such as BF16
    # if the file has the transpose of the tensor as columns of a matrix: the first of them, and the matrix's number of
    # columns; `start` is the matrix's
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class StoredTensor:
    """Location and shape of a tensor, from the header of its file."""

    location: TensorLocation
    shape: tuple[int, ...]


def stored_tensors(directory: Path, files: list[Path]) -> dict[str, StoredTensor]:
    """Return location and shape of every tensor in the weight files `files` of a directory, by tensor name."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        header, start = read_header(path)
        for name, entry in header.items():
            if name in tensors:
                raise ModelError(
                    f"{tensors[name].location.path} and {path} both contain the tensor {name}: remove one of these "
                    "files, or download both again"
                )
            tensors[name] = StoredTensor(
                TensorLocation(path, start + entry["data_offsets"][0], entry["dtype"]), tuple(entry["shape"])
            )
    index = directory / INDEX
    if not index.is_file() or files != weight_files(directory):
        return tensors
    listed, stored = read_index(index), {name: tensor.location.path.name for name, tensor in tensors.items()}
    lost, unlisted = {name for name, file in listed.items() if stored.get(name) != file}, stored.keys() - listed.keys()
    first_lost, first_unlisted = min(lost, default=""), min(unlisted, default="")
    rules = (
        (
            lost,
            f"{index} lists the tensor {first_lost} in {listed.get(first_lost)}, but {listed.get(first_lost)} does not "
            f"contain this tensor ({len(lost)} tensors are missing): download both files again",
        ),
        (
            unlisted,
            f"{index} does not list the tensor {first_unlisted} of {stored.get(first_unlisted)} "
            f"({len(unlisted)} tensors are not listed), so other programs would not load it: download the index again",
        ),
    )
    check_rules(rules, ModelError)
    return tensors


def unstack_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace the tensors that stack the experts of a layer, [experts, in, out], by the experts' weights [out, in]. The
    matrix gate_up_proj of an expert has the columns of gate_proj, then those of up_proj."""
    unstacked: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = STACKED_EXPERTS.fullmatch(name)
        if match is None or len(tensor.shape) != 3:
            unstacked[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        num_experts, size, width = tensor.shape
        num_bytes, own = size * width * BITS[tensor.location.dtype] // 8, width // len(parts)
        for expert in range(num_experts):
            start = tensor.location.start + expert * num_bytes
            for index, part in enumerate(parts):
                location = replace(tensor.location, start=start, columns=(index * own, width))
                unstacked[f"{match[1]}.{expert}.{part}.weight"] = StoredTensor(location, (own, size))
    return unstacked


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that the directory's index names; without an index, `model.safetensors`."""
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(read_index(index).values()))
    elif (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        missing_files = f"{directory} has neither model.safetensors nor {INDEX}: save the model with `save_pretrained`"
        raise ModelError(describe_gguf(directory) or missing_files)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names {missing[0]}, which does not exist ({len(missing)} of {len(names)} files are missing): "
            "download the missing files again"
        )
    return [directory / name for name in names]


def read_index(path: Path) -> dict[str, str]:
    """Return the map from tensor names to file names of a safetensors index."""
    index = _parse_json(path.read_bytes())
    files: Any = index.get("weight_map") if isinstance(index, dict) else None
    names = list(files.values()) if isinstance(files, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(
            f"{path} is not an index of safetensors files (JSON with weight_map: tensor -> file name): download it "
            "again"
        )
    return dict(files)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file (tensor name -> `{"dtype", "shape", "data_offsets"}`) and the byte offset
    of the first tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        header = _parse_json(file.read(length)) if 8 + length <= size and length <= MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file or is truncated ({size} bytes): download it again")
    header.pop("__metadata__", None)
    if problem := _header_problem(header, size - 8 - length):
        raise ModelError(f"{path}: {problem}: download it again")
    return header, 8 + length


def block_size(directory: Path) -> tuple[int, int] | None:
    """Return the (rows, columns) of a quantization block from config.json; None if the weights are not quantized."""
    config = directory / "config.json"
    values = _parse_json(config.read_bytes()) if config.is_file() else None
    quantization = values.get("quantization_config") if isinstance(values, dict) else None
    if not quantization:
        return None
    entries = quantization if isinstance(quantization, dict) else {}
    method, block = entries.get("quant_method"), entries.get("weight_block_size")
    if method != "fp8" or not _is_size_list(block) or len(block) != 2 or 0 in block:
        raise ModelError(
            f"{config} has quantization_config with quant_method {method!r} and weight_block_size {block}; Penstock "
            "reads unquantized and block-quantized fp8 weights: use the bf16 or the fp8 checkpoint of this model"
        )
    return block[0], block[1]


def check_weights(directory: str | Path, shape: ModelShape) -> None:
    """Check that the weight files of a Hugging Face directory have every tensor in the expected shape."""
    directory = Path(directory)
    stored = stored_tensors(directory, weight_files(directory))
    tensors, block, layout = unstack_experts(stored), block_size(directory), tensor_layout(shape)
    scales = {name for name in tensors if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors}
    check_tensors(directory, {name: tensor.shape for name, tensor in tensors.items() if name not in scales}, layout)
    for name in layout.hf_shapes:
        location = tensors[name].location
        if location.dtype not in READABLE and not (location.dtype == "F8_E4M3" and block and name + SCALE in scales):
            refuse_dtype(location, name)
    check_first_values(stored)


def check_first_values(tensors: Mapping[str, StoredTensor]) -> None:
    """Check that the first values of every tensor are finite, or all values if the files have at most SAMPLED_BYTES
    together. A conversion checks all values later. Raises ModelError."""
    of_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, tensor in tensors.items():
        of_file.setdefault(tensor.location.path, []).append((name, tensor))
    is_small = sum(path.stat().st_size for path in of_file) <= SAMPLED_BYTES
    max_bytes = SAMPLED_BYTES if is_small else SAMPLED_BYTES // len(tensors) // 8 * 8
    for path, named in of_file.items():
        with path.open("rb") as file:
            for name, tensor in named:
                dtype = tensor.location.dtype
                file.seek(tensor.location.start)
                check_finite(path, name, file.read(min(math.prod(tensor.shape) * BITS[dtype] // 8, max_bytes)), dtype)


def check_finite(path: Path, name: str, values: bytes | memoryview, dtype: str) -> None:
    """Check that values of the tensor `name` are finite: `values` are their bytes in the safetensors dtype `dtype`.
    Values of dtypes that are not in NOT_FINITE are accepted."""
    if dtype not in NOT_FINITE:
        return
    word, magnitude, limit = NOT_FINITE[dtype]
    words = np.frombuffer(values, word)
    if words.size and int((words & word(magnitude)).max()) >= limit:
        raise ModelError(
            f"{path}: {name} has values that are NaN or infinite, from which training cannot recover: use an "
            "intact checkpoint"
        )


def refuse_dtype(location: TensorLocation, name: str) -> NoReturn:
    """Raise the error for a tensor whose dtype or quantization is not supported."""
    raise ModelError(
        f"{location.path}: {name} is stored as {location.dtype}, but Penstock reads {', '.join(READABLE)}, and F8_E4M3 "
        f"with scales ({name + SCALE}) and weight_block_size in config.json: use an unquantized checkpoint"
    )


def check_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]], layout: TensorLayout) -> None:
    """Check that a checkpoint has exactly the tensors of its model, in the expected shapes."""
    needed = layout.hf_shapes.keys()
    missing = needed - shapes.keys()
    unknown = {name for name in shapes.keys() - needed - layout.copies.keys() if not layout.is_untrained(name)}
    rules = (
        (
            missing,
            f"{directory} lacks {len(missing)} tensors that config.json requires, e.g. {min(missing, default=None)}: "
            "download the checkpoint again, or correct config.json",
        ),
        (
            unknown,
            f"{directory} has {min(unknown, default=None)} ({len(unknown)} unknown tensors), which "
            f"{layout.shape.family} models do not have: use an unmodified checkpoint of this family",
        ),
    )
    check_rules(rules, ModelError)
    for name in sorted(needed) + sorted(layout.copies.keys() & shapes.keys()):
        expected = layout.hf_shapes[layout.copies.get(name, name)]
        if shapes[name] != expected:
            raise ModelError(
                f"{directory}: {name} has shape {list(shapes[name])}, config.json needs {list(expected)}: correct "
                "config.json"
            )


def _header_problem(header: dict[str, Any], num_bytes: int) -> str | None:
    """Return a description of an inconsistency in a safetensors header, or between the header and the `num_bytes` of
    tensors that follow it; None if there is none."""
    for name, entry in header.items():
        if not isinstance(entry, dict):
            return f"the header entry of {name} is not an object"
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not _is_size_list(shape) or not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            return f"{name} has shape {shape} and data_offsets {offsets}, but needs a list of sizes and [begin, end]"
        if not isinstance(dtype, str) or dtype not in BITS:
            return f"{name} has the unknown dtype {dtype!r}"
        needed, span = math.prod(shape) * BITS[dtype], offsets[1] - offsets[0]
        if needed != 8 * span:
            found = f"needs {needed / 8:.0f} bytes, but its data_offsets span {span} bytes"
            return f"{name} of shape {shape} in {dtype} {found}"
    end = 0
    for name, entry in sorted(header.items(), key=lambda tensor: tensor[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end:
            return f"{name} begins at byte {start}, but the previous tensor ends at byte {end}"
        end = stop
    return None if end == num_bytes else f"the header describes {end} bytes of tensors, but the file has {num_bytes}"


def _is_size_list(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _parse_json(data: bytes) -> Any:
    """Return the value of a JSON text; None if the text is invalid or an object has duplicate keys."""

    def refuse_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a JSON object has duplicate keys")
        return dict(pairs)

    try:
        return json.loads(data, object_pairs_hook=refuse_duplicate_names)
    except (ValueError, RecursionError):
        return None
