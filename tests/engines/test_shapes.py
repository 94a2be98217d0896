"""Shapes read from config.json: of every tiny family, of every real model on meta tensors, and refused entries."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engines.families import FAMILIES as REGISTRY
from penstock.engines.families import read_shape, shape_from_config, tensor_layout
from penstock.engines.families.shape import YarnScaling
from penstock.storage.errors import ModelError
from tests.engines.real_models import REAL_MODELS
from tests.families import FAMILIES, hf_model, make_family

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("families")
    return {name: make_family(directory / name, name) for name in FAMILIES}


def config_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())


def meta_model(values: dict[str, Any]) -> Any:
    """Return transformers' model of a config.json, without memory."""
    model_class = getattr(transformers, values["architectures"][0])
    with torch.device("meta"):
        return model_class(model_class.config_class(**{k: v for k, v in values.items() if k != "model_type"}))


def hub_shapes(model: Any) -> Shapes:
    """Transformers' tensors as the hub's files have them: experts one by one, a tied head once."""
    shapes: Shapes = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        if not (fused := re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)):
            shapes[name] = tuple(tensor.shape)
            continue
        num_experts, rows, columns = tensor.shape
        parts = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
        shape = (rows // len(parts), columns)
        shapes |= {f"{fused[1]}.{expert}.{part}.weight": shape for expert in range(num_experts) for part in parts}
    return shapes


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_and_flops_equal_transformers(checkpoints: dict[str, Path], name: str) -> None:
    """Parameter counts and FLOPs, computed from transformers' tensors."""
    shape, model = read_shape(checkpoints[name]), hf_model(checkpoints[name])
    parameters = dict(model.named_parameters())
    assert shape.num_parameters == sum(tensor.numel() for tensor in parameters.values())
    active = matrices = 0
    for key, tensor in parameters.items():
        routed = re.search(r"\.experts\.(gate_up|down)_proj$", key)
        here = tensor.numel() * (shape.experts.top_k / shape.experts.num_experts if routed and shape.experts else 1)
        active += here
        untied_embedding = key == "model.embed_tokens.weight" and not shape.tied_embeddings
        matrices += here if tensor.ndim > 1 and not untied_embedding else 0
    assert shape.num_active_parameters == active
    attention = model.model.layers[0].self_attn
    value = attention.v_head_dim if shape.latent else shape.head_dim
    assert shape.head_dim == (attention.qk_head_dim if shape.latent else attention.head_dim)
    # scores and sums, half masked
    pairs = shape.num_layers * shape.num_attention_heads * 2 * (shape.head_dim + value) * 100 / 2
    assert math.isclose(shape.train_flops(10, 100), 3 * (2 * matrices * 10 + pairs))


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_have_the_published_names_shapes_and_size(name: str) -> None:
    model = REAL_MODELS[name]
    shape, reference = model.shape, meta_model({"architectures": [model.architecture], **model.config})
    layout, expected = tensor_layout(shape), hub_shapes(reference)
    assert layout.hf_shapes.keys() == set(expected)
    assert layout.hf_shapes == expected
    # one op for all experts of a layer: the first and the last show it
    shown = (".local_experts.0.", f".local_experts.{shape.experts.num_experts - 1}.") if shape.experts else ()
    for megatron in layout.megatron_names():
        if ".local_experts." in megatron and not any(expert in megatron for expert in shown):
            continue
        hf = {hf_name: torch.empty(expected[hf_name], device="meta") for hf_name in layout.hf_names_of(megatron)}
        for hf_name, tensor in layout.to_hf(megatron, layout.to_megatron(megatron, hf.__getitem__)):
            assert tuple(tensor.shape) == expected[hf_name], hf_name

    assert shape.num_parameters == sum(tensor.numel() for tensor in reference.parameters())
    embedding = shape.vocab_size * shape.hidden_size
    longer = shape.model_copy(update={"num_layers": shape.num_layers + 1})
    with_mtp = longer.num_parameters + 2 * embedding + (2 * shape.hidden_size + 3) * shape.hidden_size
    for text, number in ((model.size, shape.num_parameters), (model.size_with_mtp, with_mtp)):
        assert not text or rounded(number, text) == text


def rounded(number: int, like: str) -> str:
    return f"{number / 1e9:.{len(like.partition('.')[2])}f}"


def test_defaults_equal_transformers() -> None:
    text = {name: family.defaults for name, family in REGISTRY.items() if "VL" not in name}  # test_vision_shapes.py
    for architecture, defaults in text.items():
        config = getattr(transformers, architecture).config_class()
        for name in defaults.keys() - {"sliding_window"}:  # transformers drops it where unused
            assert getattr(config, name) == defaults[name], (architecture, name)
        odd = architecture == "Glm4MoeForCausalLM"  # whose default heads of 42 dimensions would turn 21
        shape = shape_from_config({"architectures": [architecture]} | ({"head_dim": 128} if odd else {}))
        assert not shape.tied_embeddings and shape.num_query_groups == (
            config.num_key_value_heads or config.num_attention_heads
        )
        assert shape.qkv_bias == (architecture == "Qwen2ForCausalLM" or bool(getattr(config, "attention_bias", False)))
        assert (shape.rotary.base, shape.rotary.scaling) == (config.rope_parameters["rope_theta"], None)
        assert shape.rotary.fraction == config.rope_parameters.get("partial_rotary_factor", 1.0)
        assert (shape.experts is not None) == hasattr(config, "num_experts_per_tok")


@pytest.mark.parametrize("name", ["llama3.1", "glm4", "kimi-k2", "qwen3"])
def test_both_spellings_of_rope_settings_are_read(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    config = config_of(checkpoints[name])
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    settings["type"] = settings.pop("rope_type")
    if "partial_rotary_factor" in settings:
        config["partial_rotary_factor"] = settings.pop("partial_rotary_factor")
    config["rope_scaling"] = settings if len(settings) > 1 else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path) == read_shape(checkpoints[name])


def test_absent_yarn_mscales_are_zero(checkpoints: dict[str, Path]) -> None:
    """transformers computes the attention factor from `factor` alone unless both are given."""
    config = config_of(checkpoints["deepseek-v3"])
    shape = shape_from_config(config | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}})
    assert shape.rotary.scaling == YarnScaling(factor=4, original_max_positions=256, mscale=0, mscale_all_dim=0)


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("qwen3", {"architectures": ["MistralForCausalLM"]}, "names the architecture 'MistralForCausalLM'"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen3", {"attention_bias": True}, "attention_bias true"),
        ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types with 'sliding_"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, "use_sliding_window"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ("qwen3-moe", {"num_local_experts": 16}, "num_experts 8 and num_local_experts 16"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ("llama3", {"mlp_bias": True}, "mlp_bias true"),
        ("llama3", {"num_key_value_heads": 3}, "num_attention_heads 4 and num_key_value_heads 3"),
        ("llama3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ".*without low_freq_factor"),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "rope_parameters for full_attention"),
        ("llama3", {"rope_theta": 10000.0}, "rope_theta 10000.0 at the top level and 500000.0 in"),
        ("llama3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("glm4", {"head_dim": 10}, "RoPE on 5 dimensions of a head"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek-v3", {"n_group": 3}, "n_group 3, topk_group 2, n_routed_experts 16"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 and num_attention_heads 4"),
        ("deepseek-v3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}}, ".*YaRN"),
        ("glm4.7-flash", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types"),
        ("glm4.7-flash", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, "first_k_dense_replace 1 "),
    ],
)  # fmt: skip
def test_unsupported_entries_are_refused(
    checkpoints: dict[str, Path], name: str, changes: dict[str, Any], found: str
) -> None:
    config = config_of(checkpoints[name])
    with pytest.raises(ModelError, match=f"there/config.json (says )?{found}") as error:
        shape_from_config(config | changes, "there/config.json")
    assert "\n" not in str(error.value)


def test_dense_layers_are_counted_in_every_spelling(checkpoints: dict[str, Path]) -> None:
    flash, qwen, moonlight = (config_of(checkpoints[name]) for name in ("glm4.7-flash", "qwen3-moe", "moonlight"))
    del flash["first_k_dense_replace"]
    for config in (flash | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}, qwen | {"mlp_only_layers": [1, 0]}):
        shape = shape_from_config(config)
        assert shape.experts and shape.experts.num_dense_layers == 2
    dense = shape_from_config(moonlight | {"first_k_dense_replace": 4})
    assert dense.experts is None and not any("experts" in name for name in tensor_layout(dense).hf_shapes)
