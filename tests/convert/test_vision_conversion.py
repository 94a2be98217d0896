"""Vision-language models: Hugging Face -> torch_dist -> Hugging Face gives the same bits, and the logits of a prompt
with an image equal those of transformers, also of a part of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import commit_of
from families import VISION_FAMILIES, make_family
from safetensors.torch import load_file, save_file

from penstock.engines.families import read_config, read_shape
from penstock.engines.weights.hf_headers import check_weights
from penstock.stages.convert.conversion_check import TOLERANCE, choose_part_to_compare, compare_logits
from penstock.stages.convert.to_hf import Origin, export_to
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.errors import ModelError, OptionError
from penstock.storage.store import Store


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_round_trip_is_exact_and_logits_equal_transformers(name: str, store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", name, seed=7, dtype="bfloat16")
    model = convert_hf(store, source, check_logits=True)
    assert commit_of(store, model).summary["convert/logits_difference"] < TOLERANCE / 10
    back = export_to(
        store, model.uri, Origin(Path(model.uri) / "hf_assets"), str(tmp_path / "back"), shard_bytes=40_000
    )
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1
    written = {key: tensor for file in files for key, tensor in load_file(file).items()}
    stored = load_file(source / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(torch.equal(tensor.view(torch.int16), stored[key].view(torch.int16)) for key, tensor in written.items())
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert (Path(back.uri) / "config.json").read_text() == (source / "config.json").read_text()
    part = choose_part_to_compare(read_config(source / "config.json"), max_whole_parameters=0)
    assert part.layers == (0, 3)
    result = compare_logits(Path(model.uri), source, part)
    assert result.difference is not None and result.difference < TOLERANCE / 10


def test_logits_of_another_tower_are_refused(store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", "qwen3-vl")
    model, tensors = convert_hf(store, source), load_file(source / "model.safetensors")
    tensors["model.visual.blocks.2.mlp.linear_fc2.weight"] *= 1.1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="differ by"):
        compare_logits(Path(model.uri), source)


def test_fp8_export_keeps_the_tower_and_refuses_stacked_experts(store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "dense", "qwen2.5-vl")
    back = export_to(store, convert_hf(store, source).uri, Origin(source, "fp8"), str(tmp_path / "fp8"))
    tensors = load_file(Path(back.uri) / "model.safetensors")
    quantized = {key for key, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert "model.layers.0.mlp.down_proj.weight" in quantized and not any("visual" in key for key in quantized)
    config = json.loads((Path(back.uri) / "config.json").read_text())
    assert "visual.blocks.0.attn.qkv" in config["quantization_config"]["modules_to_not_convert"]
    moe = make_family(tmp_path / "moe", "qwen3-vl-moe")
    with pytest.raises(OptionError, match="--export-dtype fp8 does not support the stacked experts"):
        export_to(store, convert_hf(store, moe).uri, Origin(moe, "fp8"), str(tmp_path / "refused"))


def test_another_vocabulary_size_is_written_into_text_config(store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", "qwen3-vl")
    back = export_to(store, convert_hf(store, source).uri, Origin(source, vocab_size=60), str(tmp_path / "back"))
    config = json.loads((Path(back.uri) / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == 60 and "vocab_size" not in config
    assert len(load_file(Path(back.uri) / "model.safetensors")["lm_head.weight"]) == 60


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    tensor[7, 20, 40] = torch.nan  # of the last expert's up projection
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil, "gate_up_proj has values that are NaN"),
        (lambda tensor: tensor.transpose(1, 2).contiguous(), r"gate_proj.weight has shape \[20, 48\].*\[24, 40\]"),
        (lambda tensor: tensor[:7].contiguous(), "lacks 2 tensors .*experts.7.gate_proj.weight"),
    ],
)
def test_damaged_stacked_experts_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    source = make_family(tmp_path, "qwen3-vl-moe")
    check_weights(source, read_shape(source))
    tensors, name = load_file(source / "model.safetensors"), "model.language_model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = change(tensors[name])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        check_weights(source, read_shape(source))
