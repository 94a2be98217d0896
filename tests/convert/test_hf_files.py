"""Hugging Face files: what is written is what safetensors reads, and damage is found before work begins."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.stages.convert.hf_checkpoint import HFWeights, TensorInfo, plan_shards, write_index, write_shard
from penstock.stages.convert.targets import asset_files, model_fingerprint
from penstock.storage.errors import ModelError

TENSORS = {
    "a": torch.randn(7, 3),
    "b": torch.randn(5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4),
    "d": torch.randn(2, 2, 2, dtype=torch.float16),
    "e": torch.tensor(float("nan")),
    "f": torch.randn(6, 4).T,  # not contiguous
}


def write(directory: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = 10**9) -> None:
    plan = [[(name, TensorInfo(tensor.dtype, tuple(tensor.shape)))] for name, tensor in tensors.items()]
    parts = plan_shards(plan, shard_bytes)
    for part in parts:
        write_shard(directory / part.file, part, [(name, tensors[name]) for name, _ in part.tensors])
    write_index(directory, parts)


@pytest.mark.parametrize("shard_bytes", [100, 10**9])
def test_safetensors_library_reads_written_files(tmp_path: Path, shard_bytes: int) -> None:
    write(tmp_path, TENSORS, shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].nan_to_num(), tensor.nan_to_num())
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert {name: path.name for path in files for name in load_file(path)} == index["weight_map"]
    else:
        assert files == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("shard_bytes", [100, 10**9])
def test_weights_are_read_by_name(tmp_path: Path, shard_bytes: int) -> None:
    write(tmp_path, TENSORS, shard_bytes)
    with HFWeights(tmp_path) as weights:
        assert set(weights.info) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert weights.info[name] == TensorInfo(tensor.dtype, tuple(tensor.shape))
            assert torch.equal(weights.fetch(name).nan_to_num(), tensor.nan_to_num())


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="safetensors"):
            HFWeights(tmp_path)


def test_missing_shard_and_tensor_of_the_index_without_a_file_are_named(tmp_path: Path) -> None:
    write(tmp_path, TENSORS, shard_bytes=1)
    lost = (tmp_path / "model-00002-of-00006.safetensors").rename(tmp_path / "lost")
    with pytest.raises(ModelError, match=r"model-00002-of-00006\.safetensors"):
        HFWeights(tmp_path)
    lost.rename(tmp_path / "model-00002-of-00006.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["g"] = "model-00001-of-00006.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor g in model-00001-of-00006\.safetensors"):
        HFWeights(tmp_path)


def test_rows_are_read_without_copies(tmp_path: Path) -> None:
    tensor = torch.randn(3000, 500)  # 6 MB, several pieces
    write(tmp_path, {"a": torch.randn(3), "w": tensor})
    with HFWeights(tmp_path) as weights:
        found = b"".join(bytes(piece) for piece in weights.read_rows("w", 1000, 2999))
        assert found == tensor[1000:2999].numpy().tobytes()
        assert b"".join(bytes(piece) for piece in weights.read_rows("w", 5, 5)) == b""


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        HFWeights(tmp_path)


def test_fingerprint_depends_on_weights_and_small_files(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    (tmp_path / "config.json").write_text("{}")
    first = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("says nothing about the model")
    assert model_fingerprint(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("{}")
    second = model_fingerprint(tmp_path)
    write(tmp_path, {**TENSORS, "a": TENSORS["a"] + 1})
    assert len({first, second, model_fingerprint(tmp_path)}) == 3


def test_assets_are_the_small_files(tmp_path: Path) -> None:
    write(tmp_path, TENSORS, shard_bytes=100)
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", ".hidden.json", "README.md"):
        (tmp_path / name).write_text("{}")
    assert [path.name for path in asset_files(tmp_path)] == [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "tokenizer.json",
    ]
