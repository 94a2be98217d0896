"""Flags of SGLang's server that Penstock refuses or translates, with the reason. All others are passed on."""

from __future__ import annotations

# Flags that Penstock sets -> the option or value from which it sets them.
RESERVED = {
    "model_path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "the engine's own address",
    "port": "a free port, chosen for each engine",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "the engine's placement",
    "dist_init_addr": "the address of the engine's first node",
    "nccl_init_addr": "the address of the engine's first node",
    "base_gpu_id": "the engine's placement",
    "gpu_id_step": "the engine's placement",
    "weight_version": "the policy version at every weight update",
    "admin_api_key": "--sglang-api-key, which is the key of all routes",
    "config": "[rollout.sglang] of Penstock's configuration file",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "enable_fp32_lm_head": "--fp32-lm-head, for trainer and engines",
    "enable_lora": "--lora-rank and --lora-publish",
    "max_lora_rank": "--lora-rank",
    "lora_target_modules": "--lora-target-modules",
}
_ONE_ROLE = "every engine does both prefill and decode; omit it"
_ADAPTERS = "engines get their adapters from the trainer; omit it"
_STORED_KEYS = "its keys and values outlive the weights that computed them; omit it"
_WEIGHTS = "weights come from --hf-checkpoint and then from the trainer; omit it"
# Names, or beginnings of names that end with "_", of flags that Penstock cannot serve -> reason and what to do.
REFUSED = {
    **dict.fromkeys(
        ("hicache_storage_", "enable_lmcache", "lmcache_", "enable_flexkv", "flexkv_", "radix_cache_backend"),
        _STORED_KEYS,
    ),
    **dict.fromkeys(
        ("enable_unified_cache_external_linker", "unified_cache_external_", "enable_streaming_session"), _STORED_KEYS
    ),
    "disaggregation_": _ONE_ROLE,
    "enable_pd_role_switch": _ONE_ROLE,
    "encoder_": "only text models are supported; omit it",
    "load_format": _WEIGHTS,
    "remote_instance_weight_loader_": _WEIGHTS,
    "lora_": _ADAPTERS,
    "enable_lora_": _ADAPTERS,
    "max_loaded_loras": "it would unload adapters that requests still use; omit it",
    "skip_tokenizer_init": "requests are made of token ids in any case; omit it",
    "tokenizer_path": "the tokenizer is that of --hf-checkpoint; omit it",
    "elastic_ep_": "an engine's GPUs do not change; omit it",
    "ep_join_": "an engine's GPUs do not change; omit it",
}
# Exceptions to the beginnings of names in REFUSED.
PASSED_ON = {"lora_backend"}


def reason_for_refusal(name: str) -> str:
    """Return why Penstock refuses a flag (underscores, without prefix) and what to do, or "" if it does not."""
    if name in RESERVED:
        return f"omit it, Penstock sets it from {RESERVED[name]}"
    if name in PASSED_ON:
        return ""
    beginnings = (key for key in REFUSED if key.endswith("_") and name.startswith(key))
    return REFUSED.get(name) or next((REFUSED[key] for key in beginnings), "")
