"""The entries of a Hugging Face `config.json`: what silence means, how rotary settings are spelled, and what nobody here honours.

Which entries an architecture has, and what becomes of them, is `hf_config.py`'s. Nothing of transformers is imported, for
preflight reads configs too.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from engines.megatron.hf_fields import FOREIGN, MODEL_TYPES, wrong_type
from engines.megatron.shape import Llama3Scaling, Rotary, YarnScaling
from storage.errors import ModelError

DEFAULTS: dict[str, dict[str, Any]] = {  # of transformers' config classes; a test compares them
    "Qwen2ForCausalLM": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, max_position_embeddings=32768, rms_norm_eps=1e-6, max_window_layers=28, sliding_window=4096,
    ),
    "Qwen3ForCausalLM": dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6, max_window_layers=28,
        sliding_window=4096,
    ),
    "Qwen3MoeForCausalLM": dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=4096, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128, norm_topk_prob=False,
    ),
    "LlamaForCausalLM": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=2048, rms_norm_eps=1e-6,
    ),
    "GlmForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07, attention_bias=True,
    ),
    "Glm4ForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-07, attention_bias=True,
    ),
    "Glm4MoeForCausalLM": dict(
        vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, moe_intermediate_size=1408,
        num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1,
        first_k_dense_replace=1, norm_topk_prob=True,
    ),
    "Glm4MoeLiteForCausalLM": dict(
        vocab_size=154880, hidden_size=2048, intermediate_size=10240, num_hidden_layers=47, num_attention_heads=20,
        max_position_embeddings=202752, rms_norm_eps=1e-5, moe_intermediate_size=1536, num_experts_per_tok=4,
        n_shared_experts=1, n_routed_experts=64, routed_scaling_factor=1.8, n_group=1, topk_group=1, norm_topk_prob=True,
        kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, rope_interleave=True,
    ),
    "DeepseekV3ForCausalLM": dict(
        vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61, num_attention_heads=128,
        max_position_embeddings=4096, rms_norm_eps=1e-6, moe_intermediate_size=2048, num_experts_per_tok=8, n_shared_experts=1,
        n_routed_experts=256, routed_scaling_factor=2.5, n_group=8, topk_group=4, first_k_dense_replace=3, norm_topk_prob=True,
        kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, rope_interleave=True,
    ),
}  # fmt: skip


SPELLINGS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}  # the hub's, transformers 5's


class Entries:
    """The entries of one config.json; what it leaves out is transformers' default, and None where that has none either."""

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], source: str) -> None:
        self.values, self.defaults, self.source = values, defaults, source

    def __getitem__(self, name: str) -> Any:
        other = SPELLINGS.get(name, name)
        if name in self.values and other in self.values and self.values[name] != self.values[other]:
            found = f"{name} {_shown(self.values[name])} and {other} {_shown(self.values[other])}"
            self.refuse(found, "which contradict each other", "correct it")
        value = self.values.get(name, self.values.get(other, self.defaults.get(name)))
        return self.checked(name, value, given=name in self.values or other in self.values)

    def checked(self, name: str, value: Any, given: bool = True) -> Any:
        """Return the value of an entry.

        Raises:
            ModelError: `given` in config.json with another type than the entry has, or out of range.
        """
        if given and (needed := wrong_type(name, value)):
            self.refuse(f"{name} {_shown(value)}", f"but this entry must be {needed}", "correct it")
        return value

    def refuse(self, found: str, needed: str, do: str = "use another checkpoint") -> NoReturn:
        raise ModelError(f"{self.source} says {found}, {needed}: {do}")


def _shown(value: Any) -> str:
    """A value as JSON writes it, not longer than a few words."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rotary(config: Entries, fraction: float = 1.0, interleaved: bool = False) -> Rotary:
    """Rotary settings in either spelling: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    settings = config["rope_scaling"] or config["rope_parameters"] or {}
    if any(isinstance(value, dict) for value in settings.values()):
        config.refuse(f"rope_parameters for {', '.join(settings)}", "but all layers must turn alike")
    factor = _once(config, settings, "partial_rotary_factor")
    if factor not in (None, fraction) and fraction == 1:
        config.refuse(f"partial_rotary_factor {factor}", "but this architecture turns whole heads in Penstock")
    return Rotary(
        base=_once(config, settings, "rope_theta") or 10000.0,
        fraction=fraction if factor is None else factor,
        interleaved=interleaved,
        scaling=_scaling(config, settings),
    )


def _once(config: Entries, settings: dict[str, Any], name: str) -> Any:
    """An entry that stands at the top or among the rotary settings."""
    top, inner = config[name], config.checked(name, settings.get(name))
    if top is not None and inner is not None and top != inner:
        config.refuse(
            f"{name} {top} at the top and {inner} among the rotary settings", "which contradict each other", "correct it"
        )
    return top if inner is None else inner


def _scaling(config: Entries, settings: dict[str, Any]) -> Llama3Scaling | YarnScaling | None:
    def setting(name: str) -> Any:
        return config.checked(name, settings.get(name))

    kind = setting("rope_type") or setting("type") or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        config.refuse(f"rope_type {kind!r}", "but Penstock has 'default', 'llama3' and 'yarn'")
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [name for name in needed if setting(name) is None]:
        config.refuse(f"rope_type {kind!r} without {missing[0]}", "which it needs", "add it")
    # transformers 5.12.1 (`standardize_rope_params`): the entry at the top counts before that among the settings
    inner, top = setting("original_max_position_embeddings"), config["original_max_position_embeddings"]
    original = top or inner or config["max_position_embeddings"]
    if kind == "llama3":
        return Llama3Scaling(**{name: settings[name] for name in needed}, original_max_positions=original)
    if settings.get("attention_factor") is not None or not settings.get("truncate", True):
        config.refuse(
            "attention_factor or truncate among the YaRN settings", "but Penstock derives the one and always does the other"
        )
    return YarnScaling(
        factor=settings["factor"],
        original_max_positions=original,
        beta_fast=setting("beta_fast") or 32.0,
        beta_slow=setting("beta_slow") or 1.0,
        mscale=setting("mscale") or 0.0,  # without both, transformers' length follows from the factor alone
        mscale_all_dim=setting("mscale_all_dim") or 0.0,
    )


def refuse_the_unusual(config: Entries, architecture: str) -> None:
    """Refuse entries that any architecture might have and that are not honoured here.

    Raises:
        ModelError: naming the first of them.
    """
    if config["is_causal"] is False:
        config.refuse("is_causal false", "but Penstock's attention is causal", "use a decoder-only checkpoint")
    if (config["hidden_act"] or "silu") != "silu":
        config.refuse(f"hidden_act {config['hidden_act']!r}", "but Penstock's MLPs have 'silu'")
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    if kinds is not None and len(kinds) != layers:
        config.refuse(f"{len(kinds)} layer_types and num_hidden_layers {layers}", "which contradict each other", "correct it")
    if windows := [kind for kind in kinds or () if kind != "full_attention"]:
        config.refuse(f"layer_types with {windows[0]!r}", "but Penstock attends to the whole sequence in every layer")
    if config["dual_chunk_attention_config"]:
        config.refuse(
            "dual_chunk_attention_config",
            "but Penstock attends to the whole sequence in every layer",
            "drop it for sequences that fit max_position_embeddings",
        )
    model_type = config["model_type"]
    if MODEL_TYPES.get(model_type, architecture) != architecture:
        config.refuse(f"model_type {model_type!r} and architecture {architecture!r}", "which contradict each other", "correct it")
    for name, neutral in FOREIGN.items():
        if config[name] not in (None, neutral):
            config.refuse(f"{name} {_shown(config[name])}", f"which Penstock's {architecture} does not have")


def refuse_sliding_windows(config: Entries) -> None:
    full = config["max_window_layers"] or 0  # the first ones; Qwen3's mixtures have no such entry and a window in every layer
    if config["use_sliding_window"] and config["sliding_window"] is not None and config["num_hidden_layers"] > full:
        config.refuse(
            "use_sliding_window true",
            "but Penstock attends to the whole sequence in every layer",
            "set it to false for sequences that fit the window",
        )


def refuse_attention_bias(config: Entries) -> None:
    if config["attention_bias"]:
        config.refuse("attention_bias true", "which gives this architecture's attention biases that Penstock does not have")
