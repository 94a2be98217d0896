"""The entries of a Hugging Face `config.json` by type, and those that describe a model which no supported architecture is.

`hf_entries.py` reads them, `hf_config.py` says what they mean for a shape. No torch here: preflight uses it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LARGEST = 2**31 - 1  # of any size; one row or column more than Megatron's kernels can index
LARGEST_NUMBER = 1e30  # of anything else: NaN and infinities are above it
MAX_LAYERS = 10_000
MAX_EXPERT_MATRICES = 1_000_000  # layers times experts


def _count(low: int, high: int = LARGEST) -> tuple[str, Callable[[Any], bool]]:
    upper = f" and at most {high}" if high < LARGEST else ""
    return f"a whole number of at least {low}{upper}", lambda value: type(value) is int and low <= value <= high


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < LARGEST_NUMBER


POSITIVE = ("a positive number", _is_positive)
FRACTION = ("a number above 0 and at most 1", lambda value: _is_positive(value) and value <= 1)
FLAG = ("true or false", lambda value: type(value) is bool)
TEXT = ("a string", lambda value: isinstance(value, str))
TABLE = ("an object", lambda value: isinstance(value, dict))
TEXTS = ("a list of strings", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
LAYERS = ("a list of layer numbers", lambda value: isinstance(value, list) and all(type(n) is int and n >= 0 for n in value))

# entry -> what is needed, and whether a value is that; null passes unless the entry is in NEEDED
TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_hidden_layers": _count(1, MAX_LAYERS),
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "original_max_position_embeddings", "moe_intermediate_size", "num_experts_per_tok",
            "n_routed_experts", "num_local_experts", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
            "v_head_dim",
        ),
        _count(1),
    ),
    **dict.fromkeys(
        (
            "num_experts", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "n_group", "topk_group",
            "decoder_sparse_step", "max_window_layers", "sliding_window",
        ),
        _count(0),
    ),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), POSITIVE),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), ("a number", lambda value: type(value) in (int, float) and abs(value) < LARGEST_NUMBER)),
    "partial_rotary_factor": FRACTION,
    **dict.fromkeys(
        (
            "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "use_qk_norm",
            "rope_interleave", "is_causal",
        ),
        FLAG,
    ),
    **dict.fromkeys(("hidden_act", "scoring_func", "topk_method", "rope_type", "type", "model_type"), TEXT),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), TEXTS),
    "mlp_only_layers": LAYERS,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), TABLE),
}  # fmt: skip

NEEDED = {  # null is not allowed for these: transformers has no default either
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings",
    "rms_norm_eps", "hidden_act", "moe_intermediate_size", "num_experts_per_tok", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "routed_scaling_factor", "is_causal",
}  # fmt: skip

# entry -> its only harmless value besides null. Other architectures have them; transformers ignores them in those that are
# supported here, while SGLang applies some to any architecture: such a checkpoint is another model than its name says.
FOREIGN: dict[str, Any] = {
    **dict.fromkeys(
        (
            "final_logit_softcapping", "attn_logit_softcapping", "attn_logit_cap", "query_pre_attn_scalar", "attention_multiplier",
            "attention_chunk_size", "swiglu_limit", "index_topk", "compression_config", "sparse_attention_config", "clip_qkv",
        ),
        None,
    ),
    **dict.fromkeys(
        (
            "logit_scale", "logits_scaling", "final_logits_scaling", "output_multiplier_scale", "embedding_multiplier",
            "embedding_multiplier_scale", "scale_emb", "lm_head_multiplier", "residual_multiplier", "mup_width_scale",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "alibi", "use_alibi", "use_mup", "parallel_residual", "use_parallel_residual", "learnable_sink", "add_swa_attention_sink_bias",
            "add_full_attention_sink_bias", "mla_nope", "use_mla_nope", "use_ngram_embedding", "is_encoder_decoder",
            "add_cross_attention", "bidirectional", "use_bidirectional_attention", "bias",
        ),
        False,
    ),
    **dict.fromkeys(("rope_is_neox_style",), True),
}  # fmt: skip

MODEL_TYPES = {  # what transformers and SGLang choose the code by -> architectures here that are this
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}


def wrong_type(name: str, value: Any) -> str | None:
    """Return what the entry `name` needs if `value` is not that, else None. Entries without a type accept everything."""
    needed, fits = TYPES.get(name, ("", lambda value: True))
    if value is None:
        return needed if name in NEEDED else None
    return None if fits(value) else needed
