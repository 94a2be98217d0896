"""Reading a Hugging Face `config.json`: a row per architecture says which of its entries make what of the shape.

An entry that Penstock cannot honour is refused by one sentence, never ignored: a model that is slightly another one would still
train. What the numbers mean is `shape.py`'s; an entry's absence, and the spellings of rotary settings, are `hf_entries.py`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.megatron.hf_entries import (
    DEFAULTS,
    Entries,
    refuse_attention_bias,
    refuse_sliding_windows,
    refuse_the_unusual,
    rotary,
)
from engines.megatron.hf_fields import MAX_EXPERT_MATRICES
from engines.megatron.shape import Experts, LatentAttention, Llama3Scaling, ModelShape
from storage.errors import ModelError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME


def read_shape(path: Path) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises:
        ModelError: no config, an architecture without a layout, or an entry that cannot be honoured.
    """
    return shape_of(read_config(path), str(path))


def read_config(path: Path) -> dict[str, Any]:
    """Return the entries of a config.json.

    Raises:
        ModelError: the file is missing or is not a JSON object; a hub id in place of a directory gets the download command.
    """
    if hub_id := _hub_id(path.parent):
        name = path.parent.name
        raise ModelError(
            f"{hub_id} is not a directory and Penstock downloads nothing: run `hf download {hub_id} --local-dir {name}` and give "
            f"--hf-checkpoint {name}"
        )
    if not path.exists():
        raise ModelError(
            f"{path} does not exist: give --hf-checkpoint a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): it must be a readable file") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a JSON {type(values).__name__}, but it must be an object: download it again")
    return values


def _hub_id(directory: Path) -> str | None:
    """The name of a model on the hub that was given in place of a directory."""
    here = Path.cwd()
    name = str(directory.relative_to(here) if directory.is_relative_to(here) else directory)
    return name if HUB_ID.fullmatch(name) and not directory.parent.exists() else None


def shape_of(values: dict[str, Any], source: str = "config.json") -> ModelShape:
    """Return the shape that the entries of a config.json describe; `source` names it in messages.

    Raises:
        ModelError: see `read_shape`.
    """
    architecture = (Entries(values, {}, source)["architectures"] or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{source} names the architecture {architecture!r}; Penstock converts {', '.join(ARCHITECTURES)}: use a "
            "checkpoint of one of these"
        )
    config, row = Entries(values, DEFAULTS[architecture], source), ARCHITECTURES[architecture]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    fields: dict[str, Any] = dict(
        architecture=architecture,
        family=row.family,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"] or heads,
        head_dim=config["head_dim"] or hidden // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        qk_layernorm=row.qk_layernorm,
        qkv_bias=row.qkv_bias,
        tied_embeddings=bool(config["tie_word_embeddings"]),
    )
    refuse_the_unusual(config, architecture)
    fields |= row.read(config)
    if "rotary" not in fields:
        fields["rotary"] = rotary(config)
    shape = ModelShape.model_validate(fields)
    _check(shape, config)
    return shape


@dataclass(frozen=True)
class _Architecture:
    family: str  # row of storage.layouts
    read: Callable[[Entries], dict[str, Any]]  # fields of the shape that this architecture has beyond the common ones
    qk_layernorm: bool = False
    qkv_bias: bool = False


def _qwen(config: Entries) -> dict[str, Any]:
    refuse_attention_bias(config)
    refuse_sliding_windows(config)
    return {}


def _qwen2(config: Entries) -> dict[str, Any]:
    refuse_sliding_windows(config)  # `attention_bias` is no entry of Qwen2's: the biases are always there
    return {}


def _qwen3_moe(config: Entries) -> dict[str, Any]:
    dense = sorted(config["mlp_only_layers"] or [])
    if config["decoder_sparse_step"] != 1:
        config.refuse(
            f"decoder_sparse_step {config['decoder_sparse_step']}", "but Penstock has experts in every layer after the dense ones"
        )
    if dense != list(range(len(dense))):
        config.refuse(f"mlp_only_layers {dense}", "but Penstock has dense layers only before all layers with experts")
    if not config["num_experts"]:
        config.refuse(f"num_experts {config['num_experts']}", "but this architecture is a mixture of experts")
    experts = Experts(
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        num_dense_layers=len(dense),
        normalized=bool(config["norm_topk_prob"]),
    )
    return _qwen(config) | {"experts": _unless_all_dense(config, experts)}


def _llama(config: Entries) -> dict[str, Any]:
    refuse_attention_bias(config)
    if config["mlp_bias"]:
        config.refuse("mlp_bias true", "but Penstock's MLPs have no biases")
    return {}


def _glm(config: Entries) -> dict[str, Any]:
    return {"qkv_bias": bool(config["attention_bias"]), "rotary": rotary(config, fraction=0.5, interleaved=True)}


def _glm4(config: Entries) -> dict[str, Any]:
    return _glm(config) | {"sandwich_norms": True}


def _glm4_moe(config: Entries) -> dict[str, Any]:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "qk_layernorm": bool(config["use_qk_norm"]),
        "rotary": rotary(config, fraction=0.5),
        "experts": _corrected_experts(config, config["first_k_dense_replace"] or 0),
        "num_mtp_layers": config["num_nextn_predict_layers"] or 0,
    }


def _glm4_moe_lite(config: Entries) -> dict[str, Any]:
    kinds, dense = config["mlp_layer_types"], config["first_k_dense_replace"]
    if kinds is not None:
        num_dense = kinds.count("dense")
        if kinds != ["dense"] * num_dense + ["sparse"] * (config["num_hidden_layers"] - num_dense):
            config.refuse(f"mlp_layer_types {kinds}", "but Penstock has dense layers only before all layers with experts")
        if dense not in (None, num_dense):
            config.refuse(
                f"first_k_dense_replace {dense} and {num_dense} dense mlp_layer_types",
                "which contradict each other",
                "correct it",
            )
        dense = num_dense
    return _latent(config, 1 if dense is None else dense)


def _deepseek_v3(config: Entries) -> dict[str, Any]:
    return _latent(config, config["first_k_dense_replace"] or 0)


def _latent(config: Entries, num_dense_layers: int) -> dict[str, Any]:
    refuse_attention_bias(config)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if groups not in (None, heads):
        config.refuse(
            f"num_key_value_heads {groups} and num_attention_heads {heads}", "but latent attention has a key for every head"
        )
    latent = LatentAttention(
        **{name: config[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    )
    turning = rotary(config, interleaved=bool(config["rope_interleave"]))
    if isinstance(turning.scaling, Llama3Scaling):
        config.refuse("rope_type 'llama3'", "but latent attention here has YaRN or no scaling")
    return {
        "num_query_groups": heads,
        "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        "latent": latent,
        "rotary": turning,
        "experts": _corrected_experts(config, num_dense_layers),
        "num_mtp_layers": config["num_nextn_predict_layers"] or 0,
    }


def _corrected_experts(config: Entries, num_dense_layers: int) -> Experts | None:
    """DeepSeek-V3's routing: sigmoid scores, a frozen correction for choosing, groups, shared experts."""
    for name, needed in {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}.items():
        if config[name] not in (None, needed):
            config.refuse(f"{name} {config[name]!r}", f"but Penstock routes this family with {needed!r} only")
    groups, top_groups, num_experts = config["n_group"] or 1, config["topk_group"] or 1, config["n_routed_experts"]
    if groups > 1 and (num_experts % groups or num_experts // groups < 2 or top_groups > groups):
        config.refuse(
            f"n_group {groups}, topk_group {top_groups}, n_routed_experts {num_experts}",
            "but groups must be equal, of two experts at least",
        )
    if top_groups >= groups:
        groups = top_groups = 1  # every group is taken
    experts = Experts(
        num_experts=num_experts,
        top_k=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        shared_ffn_hidden_size=config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
        num_dense_layers=num_dense_layers,
        score="sigmoid",
        normalized=bool(config["norm_topk_prob"]),
        bias=True,
        num_groups=groups,
        top_groups=top_groups,
        scaling=config["routed_scaling_factor"],
    )
    return _unless_all_dense(config, experts)


def _unless_all_dense(config: Entries, experts: Experts) -> Experts | None:
    return experts if experts.num_dense_layers < config["num_hidden_layers"] else None


ARCHITECTURES: dict[str, _Architecture] = {
    "Qwen2ForCausalLM": _Architecture("qwen2", _qwen2, qkv_bias=True),
    "Qwen3ForCausalLM": _Architecture("qwen3", _qwen, qk_layernorm=True),
    "Qwen3MoeForCausalLM": _Architecture("qwen3_moe", _qwen3_moe, qk_layernorm=True),
    "LlamaForCausalLM": _Architecture("llama", _llama),
    "GlmForCausalLM": _Architecture("glm", _glm),
    "Glm4ForCausalLM": _Architecture("glm4", _glm4),
    "Glm4MoeForCausalLM": _Architecture("glm4_moe", _glm4_moe),
    "Glm4MoeLiteForCausalLM": _Architecture("glm4_moe_lite", _glm4_moe_lite, qk_layernorm=True),
    "DeepseekV3ForCausalLM": _Architecture("deepseek_v3", _deepseek_v3, qk_layernorm=True),
}
assert ARCHITECTURES.keys() == DEFAULTS.keys()


def _check(shape: ModelShape, config: Entries) -> None:
    """Refuse what cannot be a model at all."""
    if not shape.head_dim:
        config.refuse(
            f"hidden_size {shape.hidden_size} and num_attention_heads {shape.num_attention_heads}",
            "which leave nothing for a head",
            "correct it",
        )
    if shape.experts and shape.num_layers * shape.experts.num_experts > MAX_EXPERT_MATRICES:
        config.refuse(
            f"{shape.experts.num_experts} experts in {shape.num_layers} layers", "which is more than any model has", "correct it"
        )
    if shape.num_attention_heads % shape.num_query_groups:
        config.refuse(
            f"num_attention_heads {shape.num_attention_heads} and num_key_value_heads {shape.num_query_groups}",
            "which must divide",
            "correct it",
        )
    turning = (shape.latent.qk_rope_head_dim if shape.latent else shape.head_dim) * shape.rotary.fraction
    if turning % 2:
        config.refuse(
            f"a head of which {turning:g} dimensions turn", "which must be pairs", "correct head_dim or partial_rotary_factor"
        )
    if shape.experts and shape.experts.top_k > shape.experts.num_experts // shape.experts.num_groups * shape.experts.top_groups:
        config.refuse(
            f"num_experts_per_tok {shape.experts.top_k}", "which is more than there are experts to choose from", "correct it"
        )
