"""Safetensors headers that contradict their bytes, and weights that do not fit config.json, are refused by headers
alone."""

import json
import math
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.families import read_shape
from penstock.engines.weights.hf_headers import INDEX, check_weights, read_header, weight_files
from penstock.flows.commands.demo_model import make_tiny_model
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.errors import ModelError
from penstock.storage.store import Store

ROOT = Path(__file__).parents[2]
GOOD = {
    "a": ["F32", [2, 3], [0, 24]],
    "b": ["BF16", [4], [24, 32]],
    "c": ["F32", [0, 9], [32, 32]],
    "d": ["U8", [], [32, 33]],
}


def write_file(path: Path, tensors: dict[str, Any], num_bytes: int = 33, text: str | None = None) -> Path:
    header = {name: dict(zip(("dtype", "shape", "data_offsets"), entry)) for name, entry in tensors.items()}
    content = (json.dumps(header | {"__metadata__": {"format": "pt"}}) if text is None else text).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(num_bytes))
    return path


def test_valid_header_is_read(tmp_path: Path) -> None:
    header, start = read_header(write_file(tmp_path / "x.safetensors", GOOD))
    assert header.keys() == GOOD.keys() and start + 33 == (tmp_path / "x.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("change", "num_bytes", "culprit"),
    [
        ({"a": ["F32", [3, 3], [0, 24]]}, 33, "a of shape"),
        ({"a": ["F4", [3], [0, 24]]}, 33, "a of shape"),
        ({"b": ["BF16", [4], [20, 28]]}, 33, "b begins at byte 20"),
        ({"b": ["BF16", [4], [28, 36]]}, 33, "b begins at byte 28"),
        ({"a": ["F32", [2, 3], [4, 28]]}, 33, "a begins at byte 4"),
        ({"e": ["U8", [3], [0, 3]]}, 33, "a begins at byte 0"),
        ({}, 32, "describes 33 bytes"),
        ({}, 34, "describes 33 bytes"),
        ({"b": ["BF16", [4], [32, 24]]}, 33, "b has shape"),
        ({"b": ["BF16", [-4], [24, 32]]}, 33, "b has shape"),
        ({"b": ["BF16", [2.0, 2], [24, 32]]}, 33, "b has shape"),
        ({"b": ["BF16", [True, 4], [24, 32]]}, 33, "b has shape"),
        ({"b": ["BF16", 4, [24, 32]]}, 33, "b has shape"),
        ({"b": ["BF16", [4], None]}, 33, "b has shape"),
        ({"b": ["F7", [4], [24, 32]]}, 33, "'F7'"),
        ({"b": [None, [4], [24, 32]]}, 33, "b has the unknown dtype"),
    ],
)
def test_header_that_contradicts_its_file_is_refused(
    change: dict[str, Any], num_bytes: int, culprit: str, tmp_path: Path
) -> None:
    path = write_file(tmp_path / "model.safetensors", GOOD | change, num_bytes)
    with pytest.raises(ModelError, match=culprit) as error:
        HFWeights(tmp_path)
    assert str(path) in str(error.value) and len(str(error.value).replace(str(tmp_path), "")) <= 300


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": {}, "a": {}}', "[" * 50_000, "\x00"])
def test_invalid_header_is_refused(text: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", {}, 0, text)
    with pytest.raises(ModelError, match="safetensors"):
        read_header(path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "one.safetensors", GOOD)
    write_file(tmp_path / "two.safetensors", {"a": GOOD["a"], "z": ["U8", [9], [24, 33]]})
    index = {name: "one.safetensors" for name in GOOD} | {"z": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"one\.safetensors.*two\.safetensors"):
        HFWeights(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "one.safetensors", "b": "two.safetensors"},
        {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "z": "two.safetensors"},
    ],
    ids=["elsewhere", "nowhere"],
)
def test_index_that_names_another_file_is_refused(weight_map: dict[str, str], tmp_path: Path) -> None:
    write_file(tmp_path / "one.safetensors", GOOD)
    write_file(tmp_path / "two.safetensors", {"z": ["U8", [9], [0, 9]]}, 9)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=rf"{INDEX}.*two\.safetensors"):
        HFWeights(tmp_path)


@pytest.mark.parametrize("files", [{}, [], {"a": 3}, {"a": "../x.safetensors"}, None], ids=str)
def test_invalid_index_is_refused(files: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match="index"):
        weight_files(tmp_path)


# ---- against config.json ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hf"), seed=3, tied=False, dtype="bfloat16")


def edited(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The header with entries changed or removed (None), and offsets that fit."""
    out, end = {}, 0
    for name, entry in (header | changes).items():
        if entry is not None:
            dtype, shape = entry["dtype"], entry["shape"]
            size = (4 if dtype == "F32" else 1 if dtype.startswith("F8") else 2) * math.prod(shape)
            out[name] = [dtype, shape, [end, end + size]]
            end += size
    return out


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "entry", "culprit"),
    [
        (UP, None, rf"lacks 1 tensors that config.json requires, e.g. {UP}"),
        ("model.layers.9.mlp.up_proj.weight", {"dtype": "BF16", "shape": [3]}, "has model.layers.9"),
        (UP, {"dtype": "BF16", "shape": [3, 3]}, rf"{UP} has shape \[3, 3\]"),
        (UP, {"dtype": "I32", "shape": None}, f"{UP} is stored as I32"),
        (UP, {"dtype": "F8_E4M3", "shape": None}, f"{UP} is stored as F8_E4M3"),
    ],
    ids=["missing", "unknown", "shape", "integers", "fp8"],
)
def test_weights_that_contradict_config_are_refused(
    name: str, entry: dict[str, Any] | None, culprit: str, source: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(source, tmp_path / "hf"))
    header, _ = read_header(source / "model.safetensors")
    if entry is not None and entry["shape"] is None:
        entry = {**entry, "shape": header[name]["shape"]}
        header[name] = entry
    tensors = edited(header, **{name: entry})
    if entry is not None and entry["dtype"] == "I32":
        tensors = edited(header, **{name: {**entry, "dtype": "F32"}})
        tensors[name][0] = "I32"
    write_file(directory / "model.safetensors", tensors, max(stop for _, _, (_, stop) in tensors.values()))
    shape = read_shape(directory)
    with pytest.raises(ModelError, match=culprit):
        check_weights(directory, shape)
    with pytest.raises(ModelError):
        convert_hf(Store(str(tmp_path / "store")), directory)
    assert not [name for name in Store(str(tmp_path / "store")).list("models") if name.endswith(".commit.json")]


@pytest.mark.parametrize(
    "value",
    [
        *("awq", [], {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        *({"quant_method": "fp8", "weight_block_size": size} for size in (128, None)),
    ],
    ids=str,
)
def test_other_quantizations_are_refused(value: Any, source: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(source, tmp_path / "hf"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": value}))
    if not value:
        check_weights(directory, read_shape(directory))
        return
    with pytest.raises(ModelError, match=r"config\.json"):
        check_weights(directory, read_shape(directory))


def test_checking_weights_imports_no_torch(source: Path) -> None:
    code = (
        "import sys\nfrom penstock.engines.families import read_shape\n"
        "from penstock.engines.weights.hf_headers import check_weights\n"
        "check_weights(sys.argv[1], read_shape(sys.argv[1]))\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(source)], cwd=ROOT, check=False).returncode == 0
