"""Check before an engine is started that SGLang can run the model, LoRA adapters and speculative decoding, and warn of
decode batches that are too large for SGLang's CUDA graphs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.families.entries import read_config
from penstock.engines.generation import EngineRefused
from penstock.engines.lora import TARGETS
from penstock.engines.sglang import control, older_release
from penstock.engines.sglang.passthrough import check_sglang_args, flag_name, package_directory, sglang_flags
from penstock.engines.sources import parse_source
from penstock.engines.weights.fp8_blocks import BLOCK, fp8_weights
from penstock.engines.weights.hf_headers import stored_tensors, weight_files
from penstock.storage.errors import EngineError, LayoutError, ModelError, check_rules

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.options import EngineOptions


# ---- the model -------------------------------------------------------------------------------------------------------

# Architectures for which SGLang 0.5.21 reads original_max_position_embeddings at the top level of config.json.
READ_AT_TOP_LEVEL = ("LlamaForCausalLM",)
# Flags with which the GPUs of an engine do not all shard the same weights.
OTHER_SHARDING = {"enable_dp_attention", "ep_size", "expert_parallel_size", "moe_dense_tp_size", "pp_size"}


def check_model(values: dict[str, Any]) -> None:
    """Check that the installed SGLang, if there is one, implements the model that a config.json describes, with its
    RoPE scaling. SGLang runs other architectures with the model code of transformers, where weights cannot be updated
    by their Hugging Face names."""
    architecture, root = values["architectures"][0], package_directory("sglang")
    if root is not None and not implements_architecture(architecture, root):
        raise EngineError(
            f"SGLang {version('sglang')} does not implement {architecture}: give --hf-checkpoint a model of another "
            f"architecture, or install a release that implements {architecture}; `penstock sft` and `penstock convert` "
            "work without SGLang"
        )
    name = "original_max_position_embeddings"
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    top, read = values.get(name), rope.get(name, values.get("max_position_embeddings"))
    vision = values.get("vision_config") or {}
    patch_dim = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2
    rules = (
        (
            architecture == "Qwen2_5_VLForConditionalGeneration" and patch_dim != 1176,
            f"config.json has a vision_config with patches of {patch_dim} values, but SGLang reads images for "
            f"{architecture} only with 1176 (in_channels 3, temporal_patch_size 2, patch_size 14): use such a model",
        ),
        (
            scaled and top not in (None, read) and architecture not in READ_AT_TOP_LEVEL,
            f"config.json has {name} {top} at the top level, where SGLang does not read it for {architecture} (SGLang "
            f"uses {read}): move the entry into rope_parameters (or rope_scaling)",
        ),
    )
    check_rules(rules, EngineError)


@cache
def implements_architecture(architecture: str, root: Path) -> bool:
    """Return whether the SGLang package at `root` implements an architecture: a file in srt/models then lists it in
    `EntryClass`."""
    for path in sorted((root / "srt" / "models").glob("*.py")):
        source = path.read_bytes()
        if architecture.encode() not in source or b"EntryClass" not in source:
            continue
        for node in parse_source(source, str(path)).body:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            classes = (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
            if "EntryClass" in map(ast.unparse, targets) and architecture in classes:
                return True
    return False


def check_fp8_widths(options: EngineOptions, shape: ModelShape) -> None:
    """Check that each GPU of an engine gets whole blocks of the fp8 weights that SGLang merges (query with key and
    value, gate with up)."""
    size, names = options.gpus_per_engine, fp8_weights(options.spec.model_path)
    if not names or options.external or options.spec.args.keys() & OTHER_SHARDING:
        return
    heads, groups = shape.num_attention_heads // size, max(1, shape.num_query_groups // size)
    widths = {  # part of a weight's name -> name of the width, its size on a GPU
        ".self_attn.q_proj.": ("num_attention_heads x head_dim", heads * shape.head_dim),
        ".self_attn.k_proj.": ("num_key_value_heads x head_dim", groups * shape.head_dim),
        ".mlp.gate_proj.": ("intermediate_size", shape.ffn_hidden_size // size),
    }
    if shape.latent:
        latent = shape.latent
        widths |= {
            ".self_attn.q_b_proj.": ("num_attention_heads x qk head dim", heads * shape.head_dim),
            ".self_attn.kv_b_proj.": (
                "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
                heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            ),
            ".self_attn.o_proj.": ("num_attention_heads x v_head_dim", heads * latent.v_head_dim),
        }
    if shape.experts:
        widths[".experts.0.gate_proj."] = ("moe_intermediate_size", shape.experts.ffn_hidden_size // size)
    for part, (width, num_rows) in widths.items():
        if num_rows % BLOCK and any(part in name for name in names):
            raise LayoutError(
                f"{options.spec.model_path} has fp8 weights in blocks of {BLOCK}, but {width} gives {num_rows} "
                f"rows for each of the {size} GPUs of an engine (--rollout-num-gpus-per-engine), and SGLang needs a "
                f"multiple of {BLOCK}: use fewer GPUs per engine, or a bf16 checkpoint"
            )


# ---- images ----------------------------------------------------------------------------------------------------------


def vision_args() -> dict[str, Any]:
    """Return the flags of a server that reads images.

    Requests have images in their final size, which no bounds must change. Resizing stays on, because the image of
    SGLang's warm-up request has a size that cannot be cut into patches. With the cache of preprocessed images (0.5.21)
    an image is processed once for all samples of its group, and token ids are never decoded. With CUDA graphs of the
    tower, SGLang would otherwise not interpolate the position embeddings of Qwen3-VL's patches as the trainer does.
    """
    cache = {"mm_preprocess_cache_size_mb": 1024} if "mm_preprocess_cache_size_mb" in sglang_flags() else {}
    bounds = {"min_pixels": 1, "max_pixels": 1 << 40}
    settings = {"mm_process_config": {"image": bounds}, "enable_precise_embedding_interpolation": True}
    return settings | cache


# ---- LoRA adapters ---------------------------------------------------------------------------------------------------

# Architectures whose log-probs with adapters are compared with the trainer's (tests/engines/test_sglang_adapters.py).
SERVED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
UNVERIFIED_PARALLELISM = {"enable_dp_attention", "dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size"}


def reason_against_adapters(options: EngineOptions, shape: ModelShape, layers: Iterable[str]) -> str | None:
    """Return why SGLang cannot serve adapters of these layers; see `EngineBackend.reason_against_adapters`."""
    layers, args = list(layers), options.spec.args
    is_own = not options.external and options.spec.python is None  # otherwise the engine's release is unknown
    if is_own and (reason := older_release.reason_against_adapters(options.gpus_per_engine, compare=options.compares)):
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
    """Check that an external server can load the run's adapters, and accepts adapters only from clients with its API
    key."""
    info = control.call_server(url, "/server_info")
    modules = info.get("lora_target_modules") or []
    missing = [] if "all" in modules else sorted(set(args["lora_target_modules"]) - set(modules))
    needed = f"--enable-lora --max-lora-rank {args['max_lora_rank']} --lora-target-modules " + " ".join(
        args["lora_target_modules"]
    )
    has_adapters = info.get("enable_lora") and (info.get("max_lora_rank") or 0) >= args["max_lora_rank"]
    rules = (
        (
            not has_adapters or missing,
            f"the external engine at {url} cannot load the run's adapters: start it with {needed}, or use "
            "--lora-publish merged",
        ),
        (
            info.get("max_loaded_loras") is not None,
            f"the external engine at {url} has --max-loaded-loras {info.get('max_loaded_loras')}, which unloads "
            "adapters that runs still use: start it without this flag",
        ),
    )
    check_rules(rules, EngineError)
    # The HTTP route for adapters unpickles its payload (CVE-2026-15969 in 0.5.15.post1); an admin key alone does not
    # protect it.
    try:
        control.call_server(url, "/load_lora_adapter_from_tensors", {}, with_key=False)
    except EngineRefused as refusal:
        if "HTTP 401" in str(refusal):
            return
    raise EngineError(
        f"the external engine at {url} loads adapters, which can execute code, from clients without an API key: start "
        "it with --api-key and --admin-api-key, and give the key with --sglang-api-key"
    )


# ---- speculative decoding --------------------------------------------------------------------------------------------

# Draft tokens come from the multi-token prediction (MTP) layer of --hf-checkpoint or from a separate draft model.
# Weight updates replace only the weights of the target model; MTP layer and draft model keep the weights with which the
# engine started (docs/design/0021-speculative-decoding.md).
ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3")
# Architectures whose MTP layer SGLang loads from the model's own directory.
MTP_ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
DRAFT_MODEL = ("speculative_draft_model_path", "speculative_draft_model")  # two spellings of one flag
SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def is_speculative(args: Mapping[str, Any]) -> bool:
    """Return whether these server flags (underscores in their names) enable speculative decoding."""
    return args.get("speculative_algorithm") is not None


def draft_model(args: Mapping[str, Any]) -> str | None:
    """Return the directory of the separate draft model, or None."""
    return next((str(args[name]) for name in DRAFT_MODEL if args.get(name) is not None), None)


def check_speculative(args: Mapping[str, Any], options: EngineOptions) -> None:
    """Check the flags of speculative decoding against the model and the other options: no sampling parameter of the run
    may be ignored, and no threshold may make the engine sample from another distribution than the target model's."""
    if not is_speculative(args):
        if unused := sorted(name for name in args if name.startswith("speculative_")):
            raise EngineError(
                f"{flag_name(unused[0])} has no effect without --sglang-speculative-algorithm: add this option (for "
                f"instance NEXTN), or omit {flag_name(unused[0])}"
            )
        return
    algorithm, draft = str(args["speculative_algorithm"]), draft_model(args)
    steps, topk, tokens = (args.get(name) for name in SIZES)
    default = (steps, topk, tokens) == (None, None, None) or args.get("speculative_adaptive")
    rules = [
        (
            algorithm.upper() not in ALGORITHMS,
            f"--sglang-speculative-algorithm {algorithm[:40]} is not supported: give NEXTN to draft with the model's "
            "own MTP layer, or EAGLE or EAGLE3 with --sglang-speculative-draft-model-path",
        ),
        (  # SGLang would not start
            not default and (steps is None or topk is None or (topk != 1 and tokens is None)),
            f"{', '.join(map(flag_name, SIZES))} depend on each other: give all of them, or none to use SGLang's "
            "defaults",
        ),
        *(
            (
                args.get(name, 1.0) != 1.0,
                f"{flag_name(name)} {args.get(name)} accepts draft tokens that the policy would not sample, so their "
                "log-probs are not those of the sampling distribution: omit the option, or give 1.0",
            )
            for name in THRESHOLDS
        ),
        (
            options.sampling_seeds,
            "--rollout-sampling-seeds cannot be combined with --sglang-speculative-algorithm, because SGLang verifies "
            "draft tokens without the seeds of the requests: omit --rollout-sampling-seeds, or the algorithm",
        ),
        (
            options.sampling.get("min_p"),
            "--rollout-sampling min_p has no effect with --sglang-speculative-algorithm, because SGLang verifies draft "
            "tokens without it: omit min_p, or the algorithm",
        ),
        (
            options.return_experts and args.get("speculative_eagle_topk", 1) != 1,
            "--use-rollout-routing-replay needs --sglang-speculative-eagle-topk 1, because SGLang does not move the "
            "routed experts of an accepted branch: give 1",
        ),
        (
            draft is not None and not (Path(draft) / "config.json").is_file(),
            f"--sglang-speculative-draft-model-path {draft} is not a model directory: download it",
        ),
        (  # SGLang loads the directory of an update into both models
            draft is not None and options.transport == "disk",
            "--update-weight-transport disk would load the policy's weights into the draft model of "
            "--sglang-speculative-draft-model-path, too: give --update-weight-transport nccl",
        ),
        (
            draft is None and algorithm.upper() == "EAGLE3",
            "--sglang-speculative-algorithm EAGLE3 needs a draft model: give --sglang-speculative-draft-model-path, "
            "or NEXTN to draft with the model's own MTP layer",
        ),
    ]
    check_rules(rules, EngineError)
    if draft is None:
        _check_mtp_layer(Path(options.spec.model_path))


def _check_mtp_layer(directory: Path) -> None:
    """Check that the model in a Hugging Face directory has exactly one MTP layer, with which SGLang drafts tokens."""
    config = read_config(directory / "config.json")
    [architecture, *_], count = config["architectures"], config.get("num_nextn_predict_layers") or 0
    has_layers = architecture in MTP_ARCHITECTURES and count > 0
    tensor = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    rules = (
        (
            not has_layers,
            f"{directory} ({architecture}, num_nextn_predict_layers {count}) has no multi-token prediction layer for "
            "--sglang-speculative-algorithm: give EAGLE or EAGLE3 with --sglang-speculative-draft-model-path, or omit "
            "--sglang-speculative-algorithm",
        ),
        (
            count > 1,
            f"{directory} has {count} multi-token prediction layers (num_nextn_predict_layers), but SGLang drafts with "
            "exactly one: omit --sglang-speculative-algorithm",
        ),
        (
            has_layers and count == 1 and tensor not in stored_tensors(directory, weight_files(directory)),
            f"{directory} lacks {tensor}, a tensor of the multi-token prediction layer that config.json has "
            "(num_nextn_predict_layers 1): use the original checkpoint, or an export made with --mtp keep",
        ),
    )
    check_rules(rules, ModelError)


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------

# Penstock does not make SGLang capture graphs for larger batches than by default: graphs take memory in addition to
# --sglang-mem-fraction-static, also while the trainer uses the GPU, so a run that fits could run out of memory.
GIB = 1 << 30
# From SGLang's arg_groups/memory_hook.py. A row applies to GPUs with less memory than its key, in GiB -> largest batch
# with a graph for engines of fewer than 4 GPUs, and for engines of 4 or more.
LIMITS = {20: (8, 8), 35: (48, 160), 60: (32, 160), 160: (256, 512)}
LIMITS_OF_LARGER_GPUS = (512, 512)
# Flags that set the batch sizes with a graph, or disable graphs, including the names of older releases.
SET_BY_USER = (
    *("cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "cuda_graph_max_bs", "cuda_graph_bs", "cuda_graph_config"),
    *("disable_cuda_graph", "disable_decode_cuda_graph"),
)
# Matches the name of every flag that sets CUDA graphs of prefills, including the names of older releases.
OF_PREFILL = re.compile("(?=.*cuda_graph)(?=.*(prefill|piecewise|breakable|config|tc_compiler))")
SPECULATIVE_REQUESTS = 48  # SGLang's default of --max-running-requests with speculative decoding


def without_prefill_graphs(args: dict[str, Any]) -> dict[str, Any]:
    """Return the server flags `args` and the flag that disables CUDA graphs of prefills, unless `args` configure these.

    By default SGLang runs the model three times for each of 58 lengths at the start, which takes 7 s for a model of
    135M parameters on an H100 (benchmarks/results/smollm2-h100.json). A rollout prefills in few, large batches; the
    time that graphs would save there was not measured.
    """
    name = "cuda_graph_backend_prefill"
    if name not in sglang_flags() or any(OF_PREFILL.match(flag.replace("-", "_")) for flag in args):
        return args
    return {**args, name: "disabled"}


def graph_warning(options: EngineOptions, num_samples: int, gpu_bytes: int) -> str | None:
    """Return a warning if the engines may decode batches without a CUDA graph; see `EngineBackend.graph_warning`."""
    args = check_sglang_args(options.spec.args)
    if any(args.get(name) for name in SET_BY_USER) or args.get("cuda_graph_backend_decode") == "disabled":
        return None
    ranks, size = _data_parallel_size(args), options.gpus_per_engine
    running = _positive_integer(args, "max_running_requests") or (SPECULATIVE_REQUESTS if is_speculative(args) else 0)
    batch = -(-num_samples // ranks)  # data-parallel ranks divide the samples, and the limit, among them
    batch = min(batch, max(1, running // ranks)) if running else batch
    is_installed = options.spec.python is None and bool(sglang_flags())  # otherwise the engine's release is unknown
    limit = graph_limit(gpu_bytes, size, is_older=is_installed and older_release.is_installed())
    if batch <= limit:
        return None
    more_gib = max(0.1, (graph_mib(args, batch) - graph_mib(args, limit)) / 1024)
    return (
        f"an engine may decode batches of {batch} samples, but by default SGLang captures CUDA graphs for at most "
        f"{limit} on {'a GPU' if size == 1 else f'{size} GPUs'} of {gpu_bytes / GIB:.0f} GiB; larger batches run "
        f"without a graph and may take several times as long per token: give --sglang-cuda-graph-max-bs {batch} if "
        f"each GPU has {more_gib:.1f} GiB left for it (SGLang's estimate), or {limit} to keep the default without this "
        "warning"
    )


def graph_limit(gpu_bytes: int, gpus_per_engine: int, *, is_older: bool = False) -> int:
    """Return the largest decode batch for which SGLang captures a CUDA graph by default."""
    rows = {**LIMITS, **(older_release.GRAPH_LIMITS if is_older else {})}.items()
    limits = next((limits for below, limits in rows if gpu_bytes < below * GIB), LIMITS_OF_LARGER_GPUS)
    return limits[gpus_per_engine >= 4]


def graph_mib(args: Mapping[str, Any], batch: int) -> float:
    """Return the MiB of a GPU that SGLang reserves for graphs of decode batches up to `batch`, if it chooses
    --mem-fraction-static itself."""
    per_rank = (3 if batch <= 300 else 4.5) if args.get("enable_dp_attention") else 0
    return batch * (2 + per_rank * _data_parallel_size(args))


def _data_parallel_size(args: Mapping[str, Any]) -> int:
    return _positive_integer(args, "dp_size") or _positive_integer(args, "data_parallel_size") or 1


def _positive_integer(args: Mapping[str, Any], name: str) -> int:
    """Return the value of a flag, or 0 if it is not given or is not a positive integer (SGLang refuses it then)."""
    value = args.get(name)
    return max(0, value) if type(value) is int else 0
