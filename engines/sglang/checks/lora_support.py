"""LoRA adapters in SGLang: server flags, and checks that a server can load the adapters of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.engines.generation import EngineRefused
from penstock.engines.lora import TARGETS
from penstock.engines.sglang import control, older_release
from penstock.engines.sglang.checks.speculative import is_speculative
from penstock.engines.weights.fp8_blocks import fp8_weights
from penstock.storage.errors import EngineError

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.options import EngineOptions, ServedAdapters

# Architectures whose log-probs with adapters are compared with the trainer's (tests/engines/test_sglang_adapters.py).
SERVED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
UNVERIFIED_PARALLELISM = {"enable_dp_attention", "dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size"}


def lora_args(adapters: ServedAdapters) -> dict[str, Any]:
    """Return the flags of a server that loads these adapters."""
    return {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": list(adapters.modules),
        "max_loras_per_batch": 1 + adapters.max_versions,  # health checks use the model without an adapter
    }


def reason_against_adapters(
    options: EngineOptions, shape: ModelShape, layers: Iterable[str], *, compare: bool
) -> str | None:
    """Return why SGLang cannot serve adapters of these layers; see `EngineBackend.reason_against_adapters`."""
    layers, args = list(layers), options.spec.args
    is_own = not options.external and options.spec.python is None  # otherwise its release is not known here
    if is_own and (reason := older_release.reason_against_adapters(options.gpus_per_engine, compare=compare)):
        return reason
    if shape.latent is not None:
        return "SGLang's adapters do not support multi-head latent attention"
    if shape.architecture not in SERVED:
        return f"SGLang's adapters are not verified for {shape.architecture}"
    if shape.experts and not all(".self_attention." in layer for layer in layers):
        return f"SGLang's adapters are verified for the attention of a mixture of experts only ({TARGETS} attention)"
    if fp8_weights(options.spec.model_path) or args.get("quantization"):
        return "SGLang's adapters are not verified with quantized weights"
    if is_speculative(args):
        return "SGLang's adapters are not verified with speculative decoding (--sglang-speculative-algorithm)"
    if others := sorted(UNVERIFIED_PARALLELISM & args.keys()):
        return f"SGLang's adapters are not verified with --sglang-{others[0].replace('_', '-')}"
    return None


def check_external_adapters(url: str, args: Mapping[str, Any]) -> None:
    """Check that an external server can load the run's adapters, and that only clients with its API key can."""
    info = control.call_server(url, "/server_info")
    modules = info.get("lora_target_modules") or []
    missing = [] if "all" in modules else sorted(set(args["lora_target_modules"]) - set(modules))
    needed = f"--enable-lora --max-lora-rank {args['max_lora_rank']} --lora-target-modules " + " ".join(
        args["lora_target_modules"]
    )
    if not info.get("enable_lora") or (info.get("max_lora_rank") or 0) < args["max_lora_rank"] or missing:
        raise EngineError(
            f"the external engine at {url} cannot load the run's adapters: start it with {needed}, or use "
            "--lora-publish merged"
        )
    if info.get("max_loaded_loras") is not None:
        raise EngineError(
            f"the external engine at {url} has --max-loaded-loras {info['max_loaded_loras']}, which unloads adapters "
            "that runs still use: start it without this flag"
        )
    # The route unpickles its payload (CVE-2026-15969 in 0.5.15.post1), and an admin key alone does not protect it.
    try:
        control.call_server(url, "/load_lora_adapter_from_tensors", {}, with_key=False)
    except EngineRefused as refusal:
        if "HTTP 401" in str(refusal):
            return
    raise EngineError(
        f"the external engine at {url} loads adapters, which can execute code, from clients without an API key: start "
        "it with --api-key and --admin-api-key, and give the key with --sglang-api-key"
    )
