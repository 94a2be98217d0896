"""Qwen2.5-VL and Qwen3-VL: the language models of Qwen2, Qwen3 and Qwen3-MoE with M-RoPE, and a vision tower.

config.json has the entries of the language model at the top level or in `text_config`, and those of the tower in
`vision_config`. Weight files of Qwen3-VL-MoE stack the experts of a layer; its tensor table has them one by one, with
the names of Qwen3-MoE, which inference engines load as well.
"""

from __future__ import annotations

from typing import Any

from penstock.engines.families.entries import (
    FLAG,
    LAYERS,
    MAX_LAYERS,
    ConfigEntries,
    EntryType,
    integer_between,
    rotary_from_config,
    to_short_json,
)
from penstock.engines.families.family import Family
from penstock.engines.families.llama import (
    QWEN3,
    QWEN3_MOE,
    qwen2_shape_fields,
    qwen3_moe_shape_fields,
    qwen3_shape_fields,
)
from penstock.engines.families.shape import ModelShape, Rotary, Vision, VisionVariant
from penstock.engines.families.tensor_rows import TensorRow, decoder_rows, renamed, vision_rows

# field of `Vision` -> entry of vision_config
_FIELDS = dict(
    num_blocks="depth",
    hidden_size="hidden_size",
    ffn_hidden_size="intermediate_size",
    num_attention_heads="num_heads",
    output_size="out_hidden_size",
    in_channels="in_channels",
    patch_size="patch_size",
    temporal_patch_size="temporal_patch_size",
    merge_size="spatial_merge_size",
)
_BLOCKS: EntryType = (
    "an ascending list of block numbers",
    lambda value: LAYERS[1](value) and value == sorted(set(value)),
)
_VISION_TYPES: dict[str, EntryType] = {
    **dict.fromkeys((*_FIELDS.values(), "window_size", "num_position_embeddings"), integer_between(1)),
    "depth": integer_between(1, MAX_LAYERS),
    **dict.fromkeys(("fullatt_block_indexes", "deepstack_visual_indexes"), _BLOCKS),
}
_TYPES: dict[str, EntryType] = {
    "image_token_id": integer_between(0),
    "mrope_section": ("a list of three integers", lambda value: LAYERS[1](value) and len(value) == 3),
    "mrope_interleaved": FLAG,
}
_BOTH = dict(num_heads=16, in_channels=3, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=3584)
_VISION_DEFAULTS: dict[VisionVariant, dict[str, Any]] = {
    "qwen2.5": _BOTH | dict(
        depth=32, hidden_size=3584, hidden_act="silu", intermediate_size=3420, patch_size=14, window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    ),
    "qwen3": _BOTH | dict(
        depth=27, hidden_size=1152, hidden_act="gelu_pytorch_tanh", intermediate_size=4304, patch_size=16,
        num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
    ),
}  # fmt: skip


def read_vision(config: ConfigEntries, variant: VisionVariant) -> Vision:
    """Return the vision tower that `vision_config` of a config.json describes."""
    source, defaults = f"{config.source} (vision_config)", _VISION_DEFAULTS[variant]
    entries = ConfigEntries(config["vision_config"] or {}, source, defaults, _VISION_TYPES)
    if missing := [name for name in defaults if entries[name] is None]:
        entries.refuse(f"{missing[0]} null", "but this entry must have a value", "correct config.json")
    if entries["hidden_act"] != defaults["hidden_act"]:
        entries.refuse(
            f"hidden_act {entries['hidden_act']!r}", f"but Penstock supports only {defaults['hidden_act']!r}"
        )
    hidden, heads, merge = entries["hidden_size"], entries["num_heads"], entries["spatial_merge_size"]
    if hidden % heads or hidden // heads % 4:
        found = f"hidden_size {hidden} and num_heads {heads}"
        entries.refuse(found, "but RoPE by rows and columns needs heads of a multiple of 4", "correct config.json")
    if entries["out_hidden_size"] != config["hidden_size"]:
        found = f"out_hidden_size {entries['out_hidden_size']}, and the language model has hidden_size"
        entries.refuse_contradiction(f"{found} {config['hidden_size']}")
    fields: dict[str, Any] = {}
    if variant == "qwen3":
        side = int(entries["num_position_embeddings"] ** 0.5)
        if side**2 != entries["num_position_embeddings"]:
            found = f"num_position_embeddings {entries['num_position_embeddings']}"
            entries.refuse(found, "but they form a square, so this must be a square number", "correct config.json")
        fields |= dict(positions_per_side=side, deepstack_blocks=entries["deepstack_visual_indexes"])
    else:
        window = entries["window_size"] // merge // entries["patch_size"]
        if not window:
            found = f"window_size {entries['window_size']}"
            entries.refuse(found, "which is smaller than one merged patch", "correct config.json")
        fields |= dict(window_size=window, full_attention_blocks=entries["fullatt_block_indexes"])
    for name, blocks in fields.items():
        if name.endswith("_blocks") and blocks and blocks[-1] >= entries["depth"]:
            entries.refuse_contradiction(f"block numbers {to_short_json(blocks)} and depth {entries['depth']}")
    sizes = {field: entries[name] for field, name in _FIELDS.items()}
    return Vision(variant=variant, image_token_id=config["image_token_id"], **sizes, **fields)


def read_mrope(config: ConfigEntries, theta: float, sections: list[int] | None, alternating: bool) -> Rotary:
    """Return the RoPE settings of a config.json with M-RoPE. `theta` and `sections`: transformers' defaults;
    `alternating`: whether this architecture's sections alternate."""
    name = "rope_scaling" if config["rope_scaling"] else "rope_parameters"
    settings = {"mrope_section": sections, **(config[name] or {})}
    for kind in ("type", "rope_type"):  # older files call RoPE without frequency scaling "mrope"
        if settings.get(kind) == "mrope":
            settings[kind] = "default"
    rope = ConfigEntries(settings, config.source, {}, config.types)
    if config["rope_theta"] is None and rope["rope_theta"] is None:
        settings["rope_theta"] = theta
    sections = rope["mrope_section"]
    pairs = (config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]) // 2
    if sections is None or sum(sections) != pairs:
        found = f"mrope_section {to_short_json(sections)}"
        config.refuse(found, f"but its numbers must add up to the {pairs} pairs of a head", "correct config.json")
    if rope["mrope_interleaved"] not in (None, alternating):
        config.refuse(
            f"mrope_interleaved {to_short_json(rope['mrope_interleaved'])}",
            f"but Penstock supports only {to_short_json(alternating)} for this architecture",
        )
    rotary = rotary_from_config(ConfigEntries(config.values | {name: settings}, config.source, {}, config.types))
    return rotary.model_copy(update=dict(sections=tuple(sections), alternating_sections=alternating))


def qwen3_vl_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen3-VL config.json."""
    rotary = read_mrope(config, 5e5, [24, 20, 20], alternating=True)
    return qwen3_shape_fields(config) | dict(rotary=rotary, vision=read_vision(config, "qwen3"))


def qwen3_vl_moe_shape_fields(config: ConfigEntries) -> dict[str, Any]:
    """Return the `ModelShape` fields of a Qwen3-VL-MoE config.json."""
    if config["norm_topk_prob"] is False:
        config.refuse("norm_topk_prob false", "which transformers ignores for this architecture", "set it to true")
    return qwen3_moe_shape_fields(config) | qwen3_vl_shape_fields(config)


def qwen3_vl_rows(shape: ModelShape) -> list[TensorRow]:
    """Return the tensor table of a Qwen3-VL model, dense or MoE."""
    return [*renamed(decoder_rows(shape), {"model.": "model.language_model."}), *vision_rows(shape, "model.visual.")]


_OUTER = dict(image_token_id=151655, tie_word_embeddings=False)
QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_types=("qwen2_5_vl",),
    defaults=_OUTER | dict(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-5, max_window_layers=80,
        sliding_window=4096,
    ),
    read=lambda config: qwen2_shape_fields(config) | dict(
        rotary=read_mrope(config, 1e6, None, alternating=False), vision=read_vision(config, "qwen2.5")
    ),
    rows=lambda shape: [*decoder_rows(shape), *vision_rows(shape, "visual.")],  # the names of the hub's files
    entry_types=_TYPES,
)  # fmt: skip
QWEN3_VL = Family(
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    model_types=("qwen3_vl",),
    defaults=QWEN3.defaults | _OUTER | dict(max_position_embeddings=128000),
    read=qwen3_vl_shape_fields,
    rows=qwen3_vl_rows,
    entry_types=_TYPES,
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_types=("qwen3_vl_moe",),
    defaults=QWEN3_MOE.defaults | _OUTER | dict(
        intermediate_size=5632, num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=128000,
        moe_intermediate_size=1408, num_experts_per_tok=4, num_experts=60, norm_topk_prob=True,
    ),
    read=qwen3_vl_moe_shape_fields,
    rows=qwen3_vl_rows,
    entry_types=_TYPES,
    expert_entries=QWEN3_MOE.expert_entries,
    stacked_experts=True,
)  # fmt: skip
