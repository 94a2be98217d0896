"""Shapes of vision-language models, read from config.json: tiny and published models, defaults, refused entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.engines.families import FAMILIES, count_rank_parameters, read_shape, shape_from_config, tensor_layout
from penstock.engines.megatron.memory_plan import count_stage_parameters
from penstock.engines.megatron.parallel import ParallelLayout
from penstock.storage.errors import ModelError
from tests.engines.test_config_entries import HARMLESS, Recorder, entries_of_transformers
from tests.engines.test_shapes import hub_shapes, meta_model, rounded
from tests.families import VISION_FAMILIES, hf_model, make_family

VISION = {name: family for name, family in FAMILIES.items() if "VL" in name}
QWEN2_5_VISION = dict(
    depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3, patch_size=14, spatial_merge_size=2,
    spatial_patch_size=14, temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31],
    tokens_per_second=2, hidden_act="silu",
)  # fmt: skip
QWEN3_VISION = dict(
    depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, in_channels=3, patch_size=16,
    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
SMALLER = dict(depth=24, hidden_size=1024, intermediate_size=4096, deepstack_visual_indexes=[5, 11, 17])


def qwen2_5(layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool) -> dict[str, Any]:
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", num_hidden_layers=layers,
        hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=groups,
        tie_word_embeddings=tied, vocab_size=151936 if tied else 152064, max_position_embeddings=128000,
        rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        use_sliding_window=False, sliding_window=32768, max_window_layers=layers, hidden_act="silu",
        image_token_id=151655, vision_config=QWEN2_5_VISION | {"out_hidden_size": hidden},
    )  # fmt: skip


def qwen3(layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool, **experts: Any) -> dict[str, Any]:
    text = dict(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=128, vocab_size=151936, max_position_embeddings=262144, rms_norm_eps=1e-6,
        rope_theta=5e6, attention_bias=False, hidden_act="silu",
        rope_scaling=dict(rope_type="default", mrope_section=[24, 20, 20], mrope_interleaved=True),
    )  # fmt: skip
    vision = QWEN3_VISION | {"out_hidden_size": hidden} | (SMALLER if hidden == 2560 else {})
    architecture = "Qwen3VLMoeForConditionalGeneration" if experts else "Qwen3VLForConditionalGeneration"
    return dict(
        architectures=[architecture], model_type="qwen3_vl_moe" if experts else "qwen3_vl", tie_word_embeddings=tied,
        image_token_id=151655, text_config=text | experts, vision_config=vision,
    )  # fmt: skip


EXPERTS = dict(
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
    mlp_only_layers=[],
)  # fmt: skip
PUBLISHED = {  # config.json as on the hub, and the hub's number of parameters in billions
    "Qwen2.5-VL-3B": (qwen2_5(36, 2048, 11008, 16, 2, True), "3.75"),
    "Qwen2.5-VL-7B": (qwen2_5(28, 3584, 18944, 28, 4, False), "8.29"),
    "Qwen3-VL-4B": (qwen3(36, 2560, 9728, 32, 8, True), "4.44"),
    "Qwen3-VL-8B": (qwen3(36, 4096, 12288, 32, 8, False), "8.77"),
    "Qwen3-VL-30B-A3B": (qwen3(48, 2048, 6144, 32, 4, False, **EXPERTS), "31.1"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_names_shapes_and_size_of_the_hub(name: str) -> None:
    values, size = PUBLISHED[name]
    shape, model = shape_from_config(values), meta_model(values)
    expected = hub_shapes(model)
    if shape.family == "qwen2_5_vl":
        names = {"model.language_model.": "model.", "model.visual.": "visual."}
        for old, new in names.items():
            expected = {key.replace(old, new): tensor for key, tensor in expected.items()}
    assert tensor_layout(shape).hf_shapes == expected
    assert shape.num_parameters == sum(tensor.numel() for tensor in model.parameters())
    assert rounded(shape.num_parameters, size) == size


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_counts_of_ranks_have_the_whole_tower(name: str, tmp_path: Path) -> None:
    source = make_family(tmp_path, name)
    shape = read_shape(source)
    tower = sum(param.numel() for param in hf_model(source).model.visual.parameters())
    text, layers = shape.model_copy(update={"vision": None, "family": "qwen2"}), range(4)
    text = (
        text if name == "qwen2.5-vl" else text.model_copy(update={"family": "qwen3_moe" if shape.experts else "qwen3"})
    )
    for tensor in (1, 2):
        count, without = (count_rank_parameters(each, layers, tensor=tensor).total for each in (shape, text))
        assert count - without == tower
    layout = ParallelLayout(pipeline=2)
    with_tower = [count_stage_parameters(shape, layout, layers, stage).total for stage in (0, 1)]
    without = [count_stage_parameters(text, layout, layers, stage).total for stage in (0, 1)]
    assert with_tower == [without[0] + tower, without[1]]


def test_entries_in_and_outside_of_text_config_are_the_same(tmp_path: Path) -> None:
    for name in VISION_FAMILIES:
        source = make_family(tmp_path / name, name)
        values = json.loads((source / "config.json").read_text())
        text = values.pop("text_config", None)
        other = {**text, **values} if text else {"text_config": values, **values}
        assert shape_from_config(other) == read_shape(source)
    tied = values | {"text_config": text | {"tie_word_embeddings": True}}  # only the outer entry counts
    assert not shape_from_config(tied).tied_embeddings and shape_from_config(values | text).vision is not None


@pytest.mark.parametrize("architecture", VISION)
def test_defaults_equal_transformers(architecture: str) -> None:
    config = getattr(transformers, architecture).config_class()
    text, family = config.text_config, VISION[architecture]
    own = {"sliding_window", "max_window_layers", "norm_topk_prob", "image_token_id", "tie_word_embeddings"}
    for name in family.defaults.keys() - own:
        assert getattr(text, name) == family.defaults[name], name
    assert config.image_token_id == 151655 and not config.tie_word_embeddings
    sections = {} if "3" in architecture else {"rope_parameters": {"mrope_section": [16, 24, 24]}}
    values = {"architectures": [architecture], "vision_config": {"out_hidden_size": text.hidden_size}, **sections}
    shape = shape_from_config(values)
    assert shape.rotary.base == text.rope_parameters["rope_theta"]
    vision, tower = config.vision_config, shape.vision
    assert tower is not None and (tower.num_blocks, tower.hidden_size) == (vision.depth, vision.hidden_size)
    assert (tower.ffn_hidden_size, tower.num_attention_heads) == (vision.intermediate_size, vision.num_heads)
    assert (tower.patch_size, tower.temporal_patch_size) == (vision.patch_size, vision.temporal_patch_size)
    assert (tower.in_channels, tower.merge_size) == (vision.in_channels, vision.spatial_merge_size)
    assert tower.full_attention_blocks == tuple(getattr(vision, "fullatt_block_indexes", ()))
    assert tower.deepstack_blocks == tuple(getattr(vision, "deepstack_visual_indexes", ()))
    assert tower.positions_per_side**2 == getattr(vision, "num_position_embeddings", 0)


OTHER = {  # of videos; a method; read above; rope_scaling
    *("tokens_per_second", "video_token_id", "vision_start_token_id", "get_text_config", "text_config"),
    "rope_parameters",
}


@pytest.mark.parametrize("architecture", VISION)
def test_every_entry_that_transformers_reads_is_read(architecture: str, tmp_path: Path) -> None:
    family = next(name for name, fields in VISION_FAMILIES.items() if fields["architecture"] == architecture)
    values = json.loads((make_family(tmp_path, family) / "config.json").read_text())
    vision = Recorder(values["vision_config"])
    windows = {"use_sliding_window": True, "sliding_window": None}
    flat = Recorder({**values.pop("text_config", {}), **values, **windows, "vision_config": vision})
    shape_from_config(flat)
    assert entries_of_transformers(architecture) - HARMLESS - OTHER <= flat.seen | vision.seen


@pytest.mark.parametrize(
    ("name", "changes", "vision", "found"),
    [
        ("qwen3-vl", {}, {"hidden_act": "silu"}, r"\(vision_config\) says hidden_act 'silu'"),
        ("qwen3-vl", {}, {"num_heads": 4}, "hidden_size 24 and num_heads 4"),
        ("qwen3-vl", {}, {"out_hidden_size": 41}, "out_hidden_size 41, and the language model has hidden_size 40"),
        ("qwen3-vl", {}, {"num_position_embeddings": 24}, "num_position_embeddings 24"),
        ("qwen3-vl", {}, {"deepstack_visual_indexes": [2, 0]}, r"deepstack_visual_indexes \[2, 0\]"),
        ("qwen3-vl", {}, {"patch_size": None}, "patch_size null"),
        ("qwen3-vl", {}, {"depth": "3"}, 'depth "3"'),
        ("qwen2.5-vl", {}, {"window_size": 7}, "window_size 7"),
        ("qwen2.5-vl", {}, {"fullatt_block_indexes": 1}, "fullatt_block_indexes 1"),
        ("qwen2.5-vl", {"rope_scaling": {"type": "mrope"}}, {}, "mrope_section null"),
        ("qwen2.5-vl", {"rope_scaling": {"mrope_section": [1, 2, 3]}}, {}, r"mrope_section \[1, 2, 3\]"),
        ("qwen2.5-vl", {"rope_scaling": {"mrope_section": [1, 2, 2], "mrope_interleaved": True}}, {}, "mrope_inter"),
        ("qwen2.5-vl", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, {}, "use_sliding_w"),
        ("qwen3-vl-moe", {"norm_topk_prob": False}, {}, "norm_topk_prob false"),
        ("qwen3-vl-moe", {"vision_config": []}, None, "vision_config"),
        ("qwen3-vl-moe", {"image_token_id": None}, {}, "image_token_id null"),
    ],
)  # fmt: skip
def test_unsupported_entries_are_refused(
    name: str, changes: dict[str, Any], vision: dict[str, Any] | None, found: str, tmp_path: Path
) -> None:
    values = json.loads((make_family(tmp_path, name) / "config.json").read_text())
    values = {**values.pop("text_config", {}), **values} | changes
    if vision is not None:
        values["vision_config"] = values["vision_config"] | vision
    with pytest.raises(ModelError, match=found) as error:
        shape_from_config(values, "there/config.json")
    assert "\n" not in str(error.value) and str(error.value).startswith("there/config.json ")
